"""Several processes of plain PyTorch, one for each device, as torchrun starts them:

    torchrun --standalone --nproc-per-node 4 -m train.glue tiny --device cpu

Each computes the loss and the gradients of its own rows of a batch (`Mesh.rows`). What a process
calls its loss is such that the mean over all processes is the loss of the batch. The processes
meet in torch.distributed's collectives: gloo's on CPUs, NCCL's on GPUs. All of them must call the
functions below at the same points, in the same order, and in the thread of the training loop.

DistributedDataParallel is not used: it acts when its own forward pass is called, and our steps also
call parts of a model; and it knows nothing of gradients that are accumulated.
"""

import atexit
import contextlib
import datetime
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from errors import InputError, LostProcess

# What torchrun sets; MASTER_PORT is where processes find each other.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# So long a process waits for the others in a collective. The main process may be writing, or
# evaluating; one that has died is noticed at once.
TIMEOUT = datetime.timedelta(minutes=30)
PATIENCE = 60  # seconds that a process waits for the others at the start without a word
BUCKET_BYTES = 25 * 2**20  # of gradients that are averaged together; DistributedDataParallel's


class Place(NamedTuple):
    """This process among all."""

    index: int  # of the process, from 0
    count: int  # of all processes
    device: int  # of its machine, from 0: each process has one


def place() -> Place:
    """Returns this process's place, as torchrun's variables say.

    Raises:
        InputError: WORLD_SIZE asks for several, and other variables are missing, or are no place
            among so many.
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return Place(index=0, count=1, device=0)

    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {', '.join(missing)} is not set: "
            "start the processes by torchrun, which sets them, or unset WORLD_SIZE"
        )
    count = _number("WORLD_SIZE", low=1)
    index = _number("RANK", low=0, below=count)
    device = _number("LOCAL_RANK", low=0, below=count)
    _number("MASTER_PORT", low=1, below=2**16)
    return Place(index, count, device)


def _number(name: str, low: int, below: float = math.inf) -> int:
    """Returns the number in an environment variable; InputError where it is not from `low` on and
    `below` the other bound."""
    value = os.environ[name]
    if value.isdecimal() and low <= int(value) < below:
        return int(value)
    upper_bound = f" and below {below}" if below < math.inf else ""
    raise InputError(
        f"{name} is {value}; it must be a number of at least {low}{upper_bound}: "
        "start the processes by torchrun, which sets it"
    )


def join(kind: str) -> None:
    """Joins this process to the others, once; returns when all have come.

    Args:
        kind: "cpu", or "cuda". Numbers on the host go by gloo there, too.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    try:
        with meeting(), _saying_what_it_waits_for(), _output_to_error():
            dist.init_process_group(backend, timeout=TIMEOUT)
    except LostProcess as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise InputError(
            f"MASTER_PORT {os.environ['MASTER_PORT']} is taken by another program; "
            "give torchrun another --master-port"
        ) from error
    atexit.register(dist.destroy_process_group)


@contextlib.contextmanager
def _saying_what_it_waits_for() -> Iterator[None]:
    """Says on the terminal that not all processes have come, when this takes long."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    sentence = (
        f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waits at {where}: "
        "others have not come yet; have all been started?"
    )
    timer = threading.Timer(PATIENCE, print, (sentence,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _output_to_error() -> Iterator[None]:
    """Sends what is printed inside to the standard error. gloo says on the standard output of every
    process how many others it is connected to."""
    _open_standard_streams()
    if sys.stdout is not None:  # as Python has it where that one was closed
        sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def _open_standard_streams() -> None:
    """Opens what is closed of the input, the output and the error, as by the shell's `>&-`, to
    nowhere. gloo would write into what is opened next: the connection to the other processes."""
    descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def count() -> int:
    """Returns how many processes there are; 1 where this one has joined no others."""
    return dist.get_world_size() if dist.is_initialized() else 1


def index() -> int:
    """Returns this process's number among those that it has joined, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Makes an error of the collectives inside a LostProcess."""
    try:
        yield
    except RuntimeError as error:  # all of torch.distributed's are
        reason = str(error).splitlines()[0]
        raise LostProcess(
            "this process waits for another one of the run, which has ended or does not answer; "
            f"what that one has printed says why; the same command resumes ({reason})"
        ) from error


# ---- collectives ---------------------------------------------------------------------------------
def gather_rows(rows: Tensor) -> Tensor:
    """Returns the rows of all processes [P * n, ...], in their order; each gives [n, ...]."""
    if count() == 1:
        return rows
    rows = rows.contiguous()
    of_all = rows.new_empty(count() * len(rows), *rows.shape[1:])
    with meeting():
        dist.all_gather(list(of_all.chunk(count())), rows)
    return of_all


def mean(value: Tensor) -> Tensor:
    """Returns the mean over the processes of a tensor that has one shape on all; without its
    gradient."""
    value = value.detach()
    if count() == 1:
        return value
    total = value.clone()
    with meeting():
        dist.all_reduce(total)
    return total / count()


def send_from_owners(tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
    """Gives each process what the owner of each tensor has in it.

    Args:
        tensors: contiguous; the same shapes and types on all processes. Those of others than the
            owner are overwritten.
        owners: the number of a process for each tensor.
    """
    with meeting():
        works = []
        for tensor, owner in zip(tensors, owners, strict=True):
            works.append(dist.broadcast(tensor.detach(), src=owner, async_op=True))
        for work in works:
            work.wait()


class SharedMean(torch.autograd.Function):
    """The mean over the processes of what each has computed.

    Each process's loss depends on the mean. What counts is the mean of the losses, so that a
    gradient here is the mean over the processes, too.
    """

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return mean(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return mean(gradient.contiguous())


# ---- gradients -----------------------------------------------------------------------------------
@dataclass
class _Bucket:
    """Gradients that are averaged in one collective."""

    parameters: list[nn.Parameter]
    waiting: int = 0  # for so many gradients of this backward pass
    values: Tensor | None = None  # the gradients, one after the other, while they are averaged
    work: dist.Work | None = None


class GradientMean:
    """Averages a model's gradients over the processes, during each backward pass.

    When a bucket has all its gradients, its collective starts, beside the rest of the backward
    pass; the buckets start in the same order in all processes. When `backward()` returns, each
    `grad` is the mean. The running statistics of batch norm, which each process has taken of its
    own rows, are averaged as well.

    Inside of `paused` nothing is averaged: gradients accumulate. The next backward pass averages
    their sums.

    Args:
        model: on its device. Its parameters stay the same objects.
    """

    _paused = False  # of all models

    def __init__(self, model: nn.Module):
        self._names = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._names[parameter] = name
                parameter.register_post_accumulate_grad_hook(self._add)
        self._statistics = []
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                self._statistics += [module.running_mean, module.running_var]

        self._running = False  # a backward pass is
        self._found: list[nn.Parameter] | None = None  # those with gradients, in the first pass
        self._fill_buckets(list(self._names))

    def _fill_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        """Shares out parameters, those of the last layers first: they get their gradients first."""
        self._buckets = [_Bucket([])]
        self._bucket_of = {}
        size = 0
        for parameter in reversed(parameters):
            others = self._buckets[-1].parameters
            fits = size + parameter.nbytes <= BUCKET_BYTES
            if others and not (fits and parameter.dtype == others[0].dtype):
                self._buckets.append(_Bucket([]))
                size = 0
            size += parameter.nbytes
            self._buckets[-1].parameters.append(parameter)
            self._bucket_of[parameter] = self._buckets[-1]

    def _add(self, parameter: nn.Parameter) -> None:
        """Follows when a gradient has been added to a parameter's `grad`."""
        if GradientMean._paused:
            return
        if not self._running:
            self._begin()
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            raise RuntimeError(self._explain_changed(parameter))
        bucket.waiting -= 1
        self._start_complete()

    def _begin(self) -> None:
        """Prepares for the gradients of a backward pass, of which the first one has come."""
        self._running = True
        self._next = 0  # of the buckets, that is to start
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
        Variable._execution_engine.queue_callback(self._finish)

    def _start_complete(self) -> None:
        """Starts the buckets that have all their gradients, in their order."""
        if self._found is None:  # see `_find_gradients`
            return
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._start(self._buckets[self._next])
            self._next += 1

    def _start(self, bucket: _Bucket) -> None:
        gradients = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                raise RuntimeError(self._explain_changed(parameter))
            gradients.append(parameter.grad.flatten())
        bucket.values = torch.cat(gradients).div_(count())
        with meeting():
            bucket.work = dist.all_reduce(bucket.values, async_op=True)

    def _finish(self) -> None:
        """Ends a backward pass: starts what has not been started, and waits for all buckets."""
        if self._found is None:
            self._find_gradients()
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        self._average_statistics()
        for bucket in self._buckets:
            with meeting():
                bucket.work.wait()
            sizes = [parameter.numel() for parameter in bucket.parameters]
            means = bucket.values.split(sizes)
            for parameter, of_parameter in zip(bucket.parameters, means, strict=True):
                parameter.grad.copy_(of_parameter.view_as(parameter))
            bucket.values = None
            bucket.work = None
        self._running = False

    def _average_statistics(self) -> None:
        """Averages the running statistics of batch norm."""
        if not self._statistics:
            return
        flat = torch.cat([each.flatten() for each in self._statistics])
        means = mean(flat).split([each.numel() for each in self._statistics])
        for each, of_each in zip(self._statistics, means, strict=True):
            each.copy_(of_each.view_as(each))

    def _find_gradients(self) -> None:
        """Leaves out the parameters that the first backward pass has given no gradient, as it will
        be in all others: the buckets would wait for them until the end of each.

        The first pass has the buckets of all others already: how sums of more than two processes
        are rounded depends on the place in a bucket, and a resumed run must repeat them."""
        self._found = [parameter for parameter in self._names if parameter.grad is not None]
        has_gradient = [parameter.grad is not None for parameter in self._names]
        of_all = gather_rows(torch.tensor([has_gradient]).int())
        for parameter, of_parameter in zip(self._names, of_all.unbind(1), strict=True):
            if of_parameter.min() != of_parameter.max():
                raise RuntimeError(self._explain_changed(parameter))
        self._fill_buckets(self._found)

    def _explain_changed(self, parameter: nn.Parameter) -> str:
        return (
            f"the parameter {self._names[parameter]} has a gradient in some steps or processes, "
            "and in others none: on several processes each step must train the same parameters"
        )


@contextlib.contextmanager
def paused(is_paused: bool) -> Iterator[None]:
    """Inside, backward passes average no gradients, if `is_paused`."""
    before = GradientMean._paused
    GradientMean._paused = is_paused
    try:
        yield
    finally:
        GradientMean._paused = before
