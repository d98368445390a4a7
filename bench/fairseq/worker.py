"""fairseq's side of bench/translation.py, in the environment of `make fairseq`.

Takes --model-dir, --beam, --length-penalty, --max-len-a, --max-len-b, --sentences, and the flags of
fairseq-train. Reads one command per line, answers with a line of JSON:

    train N          N updates on the batches of fairseq-train:
                     {"seconds", "tokens" (target tokens, without padding)}
    translate        the validation split in batches of --sentences:
                     {"seconds", "hypotheses": [[tokens], …]}
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings

# fairseq's loader reads its configuration objects.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

warnings.filterwarnings("ignore")
logging.disable(logging.INFO)


class Training:
    """fairseq's trainer on its own batches, epoch after epoch."""

    def __init__(self, flags: list[str]):
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, flags))
        utils.set_torch_seed(cfg.common.seed)
        task = tasks.setup_task(cfg.task)
        task.load_dataset("train")
        model = task.build_model(cfg.model)
        self.trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
        self.batches = self._batches()

    def _batches(self):
        epoch = 1
        while True:
            iterator = self.trainer.get_train_iterator(epoch=epoch, load_dataset=epoch == 1)
            self.trainer.begin_epoch(epoch)
            yield from iterators.GroupedIterator(iterator.next_epoch_itr(shuffle=True), 1)
            epoch += 1

    def run(self, updates: int) -> dict:
        """Makes updates."""
        tokens = 0
        started = time.perf_counter()
        for _ in range(updates):
            samples = next(self.batches)
            with metrics.aggregate("train"):
                self.trainer.train_step(samples)
            tokens += sum(sample["ntokens"] for sample in samples)
        return {"seconds": time.perf_counter() - started, "tokens": tokens}


class Search:
    """fairseq's beam search on the validation split."""

    def __init__(self, arguments: argparse.Namespace, data: str):
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task(
            [f"{arguments.model_dir}/model.pt"], arg_overrides={"data": data}
        )
        (model,) = models
        task.load_dataset("valid")
        model.prepare_for_inference_(cfg)
        search = argparse.Namespace(
            beam=arguments.beam,
            lenpen=arguments.length_penalty,
            max_len_a=arguments.max_len_a,
            max_len_b=arguments.max_len_b,
        )
        valid = task.dataset("valid")

        self.model = model.eval()
        self.task = task
        self.generator = task.build_generator([model], search)
        self.batches = task.get_batch_iterator(
            valid, max_sentences=arguments.sentences, required_batch_size_multiple=1
        )
        self.size = len(valid)

    def run(self) -> dict:
        """Translates the split."""
        hypotheses = [[]] * self.size
        started = time.perf_counter()
        for sample in self.batches.next_epoch_itr(shuffle=False):
            found = self.task.inference_step(self.generator, [self.model], sample)
            for index, best_first in zip(sample["id"].tolist(), found, strict=True):
                hypotheses[index] = best_first[0]["tokens"].tolist()
        return {"seconds": time.perf_counter() - started, "hypotheses": hypotheses}


def main() -> None:
    """Answers commands until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir")
    parser.add_argument("--beam", type=int)
    parser.add_argument("--length-penalty", type=float)
    parser.add_argument("--max-len-a", type=float)
    parser.add_argument("--max-len-b", type=float)
    parser.add_argument("--sentences", type=int)
    arguments, flags = parser.parse_known_args()
    # What fairseq prints must not come between the answers.
    answers = sys.stdout
    sys.stdout = sys.stderr
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    training = Training(flags)
    search = Search(arguments, flags[0]) if arguments.model_dir else None
    for line in sys.stdin:
        command, *number = line.split()
        result = training.run(int(number[0])) if command == "train" else search.run()
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
