"""The scripts as the shared tests see them: small configurations, and what is known of their
runs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from helpers import Stop
from smooth import smooth_units

from copied import convergence
from copied.convergence import Ranges
from train import dlrm, glue, pretrain, resnet50, squad, tagging, transformer


@dataclass(frozen=True)
class Trial:
    """A script, and how its shared tests run it."""

    script: ModuleType
    short: Any  # a run that logs every step, for comparisons bit for bit
    checkpoints: tuple[int, ...]  # steps of those that it keeps
    kill: Stop  # when it gets SIGKILL
    terminate: int  # the step at which it gets SIGTERM
    # Number of first losses -> relative tolerance between one and four devices.
    close: dict[int, float]
    moved: float  # least difference of the largest and the smallest of the losses compared
    graphs: int  # most graphs that a run on one device compiles
    reads: int  # most reads of the device by the host in that run, besides the losses it logs
    may_be_0: str  # the numbers of its Config that may; all others are above
    # A run that is compared between one and four devices; the short one if None.
    alike: Any = None
    # Changes the process of that run, by a function as setattr.
    alike_with: Callable[[Callable], None] | None = None
    # Changes that make the loss infinite.
    diverges: dict[str, Any] = field(default_factory=lambda: {"lr": 1e30})

    @property
    def _convergence(self) -> convergence.Convergence:
        return convergence.OF_SCRIPTS[self.script.__name__.rpartition(".")[2]]

    @property
    def learns(self) -> Any:
        """A trial run that reaches `learned`."""
        return replace(self.script.TINY, **self._convergence.learns)

    @property
    def learned(self) -> Ranges:
        """The ranges of its final metrics."""
        return self._convergence.learned

    @property
    def still(self) -> dict[str, Any]:
        """Changes for a run of rate 0."""
        return self._convergence.still

    @property
    def untrained(self) -> Ranges:
        """The ranges that this stays in; outside of `learned`."""
        return self._convergence.untrained


TRANSLATES = replace(transformer.TINY, **convergence.OF_SCRIPTS["transformer"].learns)
MASKS = replace(pretrain.TINY, **convergence.OF_SCRIPTS["pretrain"].learns)

TRIALS = {
    "resnet50": Trial(
        script=resnet50,
        short=replace(resnet50.TINY, epochs=2, log_every=1, save_every=10),
        checkpoints=(50, 60, 64),
        kill=Stop(step=45, saved=40),  # in the second epoch
        terminate=52,
        alike=replace(resnet50.TINY, epochs=1, warmup_epochs=0.5, lr=0.01, log_every=1),
        # Rounding grows from step to step, and with the learning rate.
        close={1: 1e-5, 10: 1e-4, 20: 1e-3},
        moved=0.05,
        graphs=3,  # of training and evaluation, and of a number that hosts compare
        reads=3,
        diverges={"lr": 1e12},
        may_be_0=(
            "eval_size eval_resize lr warmup_epochs momentum weight_decay label_smoothing average "
            "norm_groups seed workers patience"
        ),
    ),
    "dlrm": Trial(
        script=dlrm,
        short=replace(dlrm.TINY, warmup_steps=20, log_every=1, save_every=48),
        checkpoints=(240, 256),
        kill=Stop(step=112, saved=96),
        terminate=150,
        # Adaptive rules turn the last digits of a gradient near 0 into whole steps.
        alike=replace(dlrm.TINY, optimizer="sgd", lr=0.5, log_every=8),
        alike_with=smooth_units,
        close={33: 1e-5},
        moved=0.05,
        # Of the tables' first values, training, evaluation, and a number that hosts compare.
        graphs=4,
        reads=8,
        diverges={"lr": 1e30, "optimizer": "sgd"},
        may_be_0="hash_rows model_devices lr warmup_steps seed workers eval_every patience",
    ),
    "glue": Trial(
        script=glue,
        short=replace(glue.TINY, lengths=(32,), epochs=0.25, log_every=1, eval_every=5),
        checkpoints=(16,),
        kill=Stop(step=9, saved=5),
        terminate=12,
        close={16: 2e-5},
        moved=0.02,
        graphs=3,  # of training and evaluation in one length, and Adam's
        reads=9,
        may_be_0="lr warmup weight_decay patience seed workers eval_every save_every",
    ),
    "squad": Trial(
        script=squad,
        short=replace(squad.TINY, epochs=0.25, log_every=1, eval_every=5),
        checkpoints=(19,),
        kill=Stop(step=9, saved=5),
        terminate=12,
        close={19: 2e-5},
        moved=0.02,
        graphs=3,  # of training and evaluation, and Adam's
        reads=9,
        may_be_0="stride lr warmup weight_decay patience seed workers eval_every save_every",
    ),
    "transformer": Trial(
        script=transformer,
        # Its export is the mean of the last three checkpoints.
        short=replace(TRANSLATES, lengths=(16,), updates=26, log_every=1, save_every=4, keep=3),
        checkpoints=(16, 20, 24, 26),  # the last one is between two
        kill=Stop(step=14, saved=12),
        terminate=21,  # its checkpoint must not take the place of one that is averaged
        # Adam turns the last digits of a gradient near 0 into whole steps: later the runs part.
        close={25: 1e-5},
        moved=0.5,
        graphs=5,  # of training, evaluation and translation in one shape, and two tiny ones
        reads=12,
        diverges={"lr": 1e30, "warmup_updates": 1},
        may_be_0="dropout lr label_smoothing length_penalty seed workers patience",
    ),
    "pretrain": Trial(
        script=pretrain,
        short=replace(MASKS, steps=10, warmup_steps=5, log_every=1, eval_every=4, keep=3),
        checkpoints=(4, 8, 10),
        kill=Stop(step=7, saved=4),
        terminate=7,
        close={10: 1e-5},
        moved=0.5,
        graphs=3,  # of training and evaluation, and Adam's
        reads=7,
        diverges={"lr": 1e30, "warmup_steps": 1},
        may_be_0="predictions lr warmup_steps seed workers save_every patience",
    ),
    "tagging": Trial(
        script=tagging,
        short=replace(tagging.TINY, epochs=0.25, log_every=1, eval_every=5),
        checkpoints=(16,),
        kill=Stop(step=9, saved=5),
        terminate=12,
        close={16: 2e-5},
        moved=0.02,
        graphs=3,  # of training and evaluation, and Adam's
        reads=9,
        may_be_0="tag_column lr warmup weight_decay patience seed workers eval_every save_every",
    ),
}
