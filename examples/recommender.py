"""Recommends the next film from the last ones that a user has seen: embedding tables in a model of
your own.

    python -m examples.recommender tiny                              synthetic histories: seconds
    python -m examples.recommender movielens --data /data/ml-100k    any of MovieLens' sets

`CPU_NUM_DEVICES=8 python -m examples.recommender tiny --plan exchange` runs on eight devices and
gives the same numbers.

Three tables have a row per film: as seen before, as seen last, as the next one. A linear layer
makes a user's vector of the first two. Its product with a film's row in the third is the film's
score. The loss is a softmax over the films of the batch, corrected for how often each is drawn (Yi
et al. 2019, "Sampling-Bias-Corrected Neural Modeling").
"""

from dataclasses import dataclass

import torch
from torch import nn

from data.histories import open_histories
from train.common import cli, device, loading
from train.common.embedding import LazyAdam, ShardedEmbeddingBags, Table


@dataclass(frozen=True)
class Config:
    data: str = ""  # a MovieLens folder, or "synthetic"
    plan: str = "auto"  # of the tables, see docs/embeddings.md
    dim: int = 64  # columns of a table
    last: int = 8  # films to look back at
    epochs: int = 6
    batch_size: int = 512
    lr: float = 0.003
    device: str = "xla"  # or cpu, cuda
    seed: int = 0


def vectors(model, embeddings, ids):
    # [batch, dim] each; id 0 is no film.
    before, last, film = embeddings(ids, present=ids).unbind(1)
    return model(torch.cat([before, last], 1)), film


def train_step(model, embeddings, optimizer, batch):
    user, film = vectors(model, embeddings, batch["ids"])
    scores = user @ film.T - batch["log_share"]
    own_score = (user * film).sum(1)
    loss = (torch.logsumexp(scores, 1) - own_score).mean()
    loss.backward()
    optimizer.step()
    embeddings.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def eval_step(model, embeddings, batch, mesh):
    both = torch.stack(vectors(model, embeddings, batch["ids"]))  # [2, batch, dim]
    device.replicate(both, mesh)  # every host reads all of it
    return both


def main(config):
    mesh = device.setup(config.seed, "float32", kind=config.device)
    cli.need_data(config, "a MovieLens folder")
    data = open_histories(config.data, config.last)

    lookups = {"before": config.last - 1, "last": 1, "film": 1}  # the columns of ids, in order
    tables = []
    for name, columns in lookups.items():
        tables.append(Table(name, data.films + 1, columns, "mean", config.plan))
    embeddings = ShardedEmbeddingBags(tables, config.dim, mesh, LazyAdam(), config.lr, config.seed)
    model = device.to_device(nn.Linear(2 * config.dim, config.dim), mesh)
    optimizer = torch.optim.Adam(model.parameters(), config.lr, foreach=False)
    device.init_optimizer_state(optimizer, mesh)

    step_fn = device.compiled(train_step, mesh)
    steps = config.epochs * loading.steps_per_epoch(data.train, config.batch_size, mesh)
    loader = loading.parallel_loader(
        data.train, config.batch_size, mesh, train=True, seed=config.seed, stop=steps
    )
    for batch in loader:
        loss = step_fn(model, embeddings, optimizer, batch)
    embeddings.check()  # plan "exchange" had a slot for every id

    eval_fn = device.compiled(eval_step, mesh)
    loader = loading.parallel_loader(data.held_out, config.batch_size, mesh, train=False)
    vectors_of_batches = [eval_fn(model, embeddings, batch, mesh) for batch in loader]
    users, films = torch.cat(device.read(vectors_of_batches), 1).numpy()
    metrics = data.recall(users[: data.users], films[data.users : len(data.held_out)])

    shown = [f"{name} {value:.4f}" for name, value in metrics.items()]
    print(f"loss {device.fetch([loss])[0]:.4f}", *shown)
    return metrics


if __name__ == "__main__":
    cli.run(
        main, {"tiny": ("a trial", Config("synthetic")), "movielens": ("needs --data", Config())}
    )
