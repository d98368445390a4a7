"""What a run is as a benchmark of MLPerf Training, for --log mlperf (train/common/watch)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of MLPerf Training, and how a run trains it.

    The names are those of mlperf_logging/mllog/constants.py.

    Attributes:
        name: such as resnet.
        metric: of the script's evaluations, its `eval_accuracy`.
        target: the metric that ends a run with success.
        train_samples, eval_samples: examples of both splits.
        batch_size: examples of an update, over all devices.
        samples_per_epoch: that `epoch_num` is counted in; 1: it counts samples, as that of bert.
        hyperparameters: name -> value of what else the rules ask for.
    """

    name: str
    metric: str
    target: float
    train_samples: int
    eval_samples: int
    batch_size: int
    samples_per_epoch: int
    hyperparameters: Mapping[str, float | str]

    def epoch(self, step: int) -> float:
        """Returns `epoch_num` after a step."""
        return round(step * self.batch_size / self.samples_per_epoch, 6)
