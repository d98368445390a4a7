"""What train/predict.py needs of each kind of export: how it is opened, what its inputs are, how
its network is called.

    pieces.py          inputs whose outputs are computed together, and the order of the answers
    answer_formats.py  from a network's outputs to what is written: names and probabilities
    pictures.py        exports of train/resnet50.py
    sentences.py       exports of train/glue.py, and other classifiers of transformers
    entities.py        exports of train/tagging.py, and other taggers of transformers
    clicks.py          exports of train/dlrm.py, on a user's own columns
    submission.py      GLUE's test sets, in the files that the benchmark's server takes

A copy of a script (make copy … WITH=predict) has the file of its own kind.
"""
