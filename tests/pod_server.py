"""Forks the hosts of pods: python -m pod_server DESCRIPTOR

It has the imports that all hosts need, and no device and no thread, which a fork could not use.
Through the connection it gets pairs: a Job of pod_host.py, and the place of the hosts' files. It
answers each with the hosts' exit codes.
"""

import gc
import importlib
import mmap
import sys
from functools import partial
from multiprocessing.connection import Connection

import forks
import numpy as np
import pod_host

# What the hosts would import, each for itself.
IMPORTED = (
    "pod_runs",  # with it all scripts
    "models.encoders.bert",
    "models.encoders.distilbert",
    "models.encoders.xlnet",
    "sacrebleu",
    "sklearn.metrics",
    "torch.utils.tensorboard",
    "torchrec.models.dlrm",
    "train.common.xla.while_loop",
    "transformers.models.bert.modeling_bert",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.xlnet.modeling_xlnet",
)


def serve(job: pod_host.Job, place: str) -> list[int]:
    """Runs a pod; returns the status of each host, as os.waitpid has it."""
    counts = np.frombuffer(mmap.mmap(-1, 8 * job.hosts), np.int64)
    work = partial(pod_host.be_host, job=job, arrivals=counts, place=place)
    return forks.run(job.hosts, work)


def main() -> None:
    """Serves until the other end is closed."""
    connection = Connection(int(sys.argv[1]))
    sys.modules["wandb"] = None  # which timm would import, and takes as long as torch
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # else collections in a fork would copy all memory
    gc.enable()
    while True:
        try:
            job, place = connection.recv()
        except EOFError:
            return
        connection.send(serve(job, place))


if __name__ == "__main__":
    main()
