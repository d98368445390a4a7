"""One file a data set: the real loading, and a synthetic twin of the same shapes that can be learned.

A data set is a class with `__len__` and `example(index, rng)`, which returns one example as a dict of numpy arrays and
numbers. All randomness comes from `rng`, which the loader seeds from (seed, epoch, index): neither the order nor the
augmentation depends on the number of worker processes. Nothing in data/ knows of XLA or of train/.
"""
