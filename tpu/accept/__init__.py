"""The first fifteen minutes on a new kind of TPU: tries what the project promises, and writes what
it found.

    make accept TPU=my-tpu ZONE=us-east5-b ARGS="--runs gs://my-bucket/accept"
        from another machine
    make accept
        on this machine: its chips, or a CPU

    __main__.py     the command line
    checks.py       what is tried, one after the other
    children.py     the programs that it starts: their log, their time limits, their end
    predictions.py  what is predicted with an export, and how the answers are compared
    expected.py     what a trial must reach, and the recipes of the tables of results
    page.py         the page that a person can send
    results.py      the tables of README.md and docs/results.md, of grids and runs, too

It runs on the client with python3 (3.9 or later, only the standard library) and drives `make train`
here, or `python3 -m tpu.launch` for a TPU. All that it knows of a run is what the run prints
(train/common/watch/report.py).
"""
