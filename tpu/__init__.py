"""What concerns Cloud TPUs: starting runs on them from another machine, and looking at what is there."""
