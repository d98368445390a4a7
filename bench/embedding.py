"""Seconds of an embedding step (lookup, a small loss, update) against the number of rows.

    ours       train.common.embedding.ShardedEmbeddingBags under its automatic plan, and under
               --plan when it is given
    gspmd      F.embedding on an nn.Parameter that is sharded by rows over the same devices,
               autograd, torch.optim: its gradient is as large as the table
    eager      nn.EmbeddingBag(sparse=True) and torch.optim (SGD, Adagrad, SparseAdam), on the CPU
    torchrec   torchrec's EmbeddingBagCollection on the CPU and torch.optim: dense gradients
    fbgemm     torchrec's FusedEmbeddingBagCollection on the CPU: fbgemm's lookup, with the update
               in its backward pass

    same       tables, ids (uniform and new in every step: few duplicates, no help from caches),
               targets, initial distribution and learning rate; the losses are compared
    timed      from a batch that is where it is used (on the device; as a KeyedJaggedTensor) to the
               updated tables
    how        one process for each number of rows, in which the contenders take turns step by step,
               in rotating order; those that do not fit the memory together get a process of their
               own. --rounds times all of that
    run        python -m bench.embedding --rows 1e6,4e6,16e6

    fill       python -m bench.embedding --clicks FOLDER --dim 128 times nothing: how full the slots
               of plan "exchange" are with the ids of a click log, a power law's and uniform ones,
               computed on the host

Tables halve in size from one to the next; every example looks up one id in each. Ratios are taken
within a round, and their median is printed. Run it on a machine that does nothing else.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from data.criteo import ClickLog, open_clicks
from errors import InputError
from train.common import device
from train.common.embedding import OPTIMIZERS, ShardedEmbeddingBags, Table
from train.common.embedding.exchange import planned_capacity
from train.common.embedding.memory import choose_plans
from train.common.embedding.optimizers import row_bytes
from train.common.embedding.owners import owner_of

CONTENDERS = ("ours", "ours, --plan", "eager", "fbgemm", "gspmd", "torchrec")
LR = 0.05
WARM_UP_STEPS = 2  # they are not timed; their losses are compared
LEAST_STEPS = 3  # timed ones of a slow contender
USED_MEMORY = 0.75  # of the machine's
SYNTHETIC_ROWS = 40_000_000  # of each table; MLPerf's largest


@dataclass(frozen=True)
class Options:
    rows: str = "1e6,4e6,16e6"  # of all tables together; one or more numbers
    dim: int = 64  # columns
    batch: int = 2048  # examples per step
    tables: int = 8  # features, with a table each
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = (
        "sgd"  # of all contenders
    )
    plan: Literal["", "exchange", "data"] = ""  # besides the automatic one, for ours
    devices: int = 1  # virtual CPU devices of XLA for ours and gspmd; the others have one
    steps: int = 20  # timed ones, of each contender in each round; 2 more before them are not
    seconds: float = 60.0  # a contender stops after so long in a round, not before 3 timed steps
    rounds: int = 3  # see above
    clicks: str = ""  # a folder of prepared clicks; see "fill" above
    out: str = "runs/bench/embedding.json"  # where the figures go
    contenders: str = ""  # times these in this process, for one number of rows; the rounds use it


def table_rows(rows: int, tables: int) -> list[int]:
    """Returns the rows of each table: half of the one before it, at least 2."""
    sizes = []
    for number in range(tables):
        halvings = min(number + 1, tables - 1)  # the last two are of one size
        sizes.append(max(2, rows >> halvings))
    return sizes


def needed_bytes(contender: str, rows: int, options: Options) -> float:
    """Returns the memory at the peak of a step.

    That is the weight with its optimizer state, and what else is as large as the tables.
    """
    weight_and_state = row_bytes(options.dim, OPTIMIZERS[options.optimizer]())
    weight = 4.0 * rows * options.dim
    further = 0.0
    if contender == "torchrec":
        further = weight  # a dense gradient
    if contender == "gspmd":
        # A dense gradient, and the new weight beside the old one: XLA allocates another buffer.
        further = 2 * weight
    return rows * weight_and_state + further


def host_batches(options: Options, sizes: list[int]) -> list[dict[str, Tensor]]:
    """Returns a batch for each step: ids [batch, tables] and targets y [batch, tables, dim]."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(WARM_UP_STEPS + options.steps):
        columns = []
        for rows in sizes:
            ids = torch.randint(0, rows, (options.batch,), generator=generator, dtype=torch.int32)
            columns.append(ids)
        targets = torch.rand(options.batch, len(sizes), options.dim, generator=generator)
        batches.append({"ids": torch.stack(columns, 1), "y": targets})
    return batches


def squared_error(embedded: Tensor, y: Tensor) -> Tensor:
    """Returns the squared error of each example, summed over tables and columns; their mean."""
    return ((embedded - y) ** 2).sum((1, 2)).mean()


# ---- contenders: each makes a function that trains on a batch, waits and returns the loss --------


def on_device(batches: list[dict[str, Tensor]], mesh: device.Mesh) -> list[dict[str, Tensor]]:
    """Uploads the batches."""
    uploaded = []
    for batch in batches:
        uploaded.append({name: device.upload(tensor, mesh) for name, tensor in batch.items()})
    return uploaded


def waiting(step: Callable, *args) -> Callable[[dict], Tensor]:
    """Returns a function of a batch that runs a step and waits until the device has done it."""

    def run(batch: dict[str, Tensor]) -> Tensor:
        loss = step(*args, batch)
        device.wait_for_steps()
        return loss

    return run


def ours(
    options: Options, sizes: list[int], mesh: device.Mesh, plan: str = "auto"
) -> Callable[[dict], Tensor]:
    """Makes the step of "ours", with all tables under one plan."""
    tables = [Table(f"table{number}", rows, plan=plan) for number, rows in enumerate(sizes)]
    optimizer = OPTIMIZERS[options.optimizer]()
    embeddings = ShardedEmbeddingBags(tables, options.dim, mesh, optimizer, LR, seed=0)
    print(f"ours, {plan}: {', '.join(embeddings.plans)}", flush=True)

    def train_step(embeddings, batch):
        loss = squared_error(embeddings(batch["ids"]), batch["y"])
        loss.backward()
        embeddings.step()
        return loss.detach()

    return waiting(device.compiled(train_step, mesh), embeddings)


def gspmd(options: Options, sizes: list[int], mesh: device.Mesh) -> Callable[[dict], Tensor] | None:
    """Makes the step of "gspmd", or None where torch.optim has no such rule."""
    optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    if options.optimizer not in optimizers:
        return None

    # All tables are one weight, padded so that each device has as many rows as another.
    rows = math.ceil(sum(sizes) / mesh.num_devices) * mesh.num_devices
    bounds = torch.tensor(sizes).repeat_interleave(torch.tensor(sizes)).float() ** -0.5
    bounds = F.pad(bounds, (0, rows - sum(sizes))).to(mesh.device)
    device.annotate(bounds, mesh.spmd, ("data",))
    uniform = torch.rand(rows, options.dim, device=mesh.device) * 2 - 1
    weight = nn.Parameter(uniform * bounds[:, None])
    device.annotate(weight, mesh.spmd, ("data", None))

    starts = torch.tensor(first_rows(sizes), dtype=torch.int32).to(mesh.device)
    optimizer = optimizers[options.optimizer]([weight], lr=LR, foreach=False)
    if options.optimizer == "adagrad":
        device.annotate(optimizer.state[weight]["sum"], mesh.spmd, ("data", None))

    def train_step(optimizer, starts, batch):
        loss = squared_error(F.embedding(batch["ids"] + starts, weight), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return waiting(device.compiled(train_step, mesh), optimizer, starts)


def first_rows(sizes: list[int]) -> list[int]:
    """Returns the row at which each table begins where all stand one after the other."""
    return [sum(sizes[:number]) for number in range(len(sizes))]


def eager(options: Options, sizes: list[int], mesh: device.Mesh) -> Callable[[dict], Tensor] | None:
    """Makes the step of "eager", or None where torch.optim has no such sparse rule."""
    optimizers = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "lazy_adam": torch.optim.SparseAdam,
    }
    if options.optimizer not in optimizers:
        return None

    bags = nn.ModuleList()
    for rows in sizes:
        bound = rows**-0.5
        weight = torch.empty(rows, options.dim).uniform_(-bound, bound)
        bags.append(nn.EmbeddingBag(rows, options.dim, mode="sum", sparse=True, _weight=weight))
    optimizer = optimizers[options.optimizer](bags.parameters(), lr=LR)

    def step(batch):
        optimizer.zero_grad()
        embedded = [bag(batch["ids"][:, number, None]) for number, bag in enumerate(bags)]
        loss = squared_error(torch.stack(embedded, 1), batch["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def torchrec_bags(
    options: Options, sizes: list[int], mesh: device.Mesh, fused: bool = False
) -> Callable[[dict], Tensor] | None:
    """Makes the step of "torchrec", with `fused` of "fbgemm", or None where it has no such rule."""
    import torchrec  # takes seconds
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    if fused:
        optimizers["rowwise_adagrad"] = torchrec.optim.RowWiseAdagrad
    if options.optimizer not in optimizers:
        return None

    configs = []
    for number, rows in enumerate(sizes):
        config = torchrec.EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=options.dim,
            name=f"table{number}",
            feature_names=[f"feature{number}"],
        )
        configs.append(config)

    rule = optimizers[options.optimizer]
    cpu = torch.device("cpu")
    optimizer = None  # the fused bags update themselves in their backward pass
    if fused:
        bags = FusedEmbeddingBagCollection(
            configs, optimizer_type=rule, optimizer_kwargs={"lr": LR}, device=cpu
        )
    else:
        bags = torchrec.EmbeddingBagCollection(tables=configs, device=cpu)
        optimizer = rule(bags.parameters(), lr=LR)

    with torch.no_grad():
        for name, weight in bags.state_dict().items():
            if name.endswith(".weight"):
                bound = weight.shape[0] ** -0.5
                weight.uniform_(-bound, bound)

    def step(batch):
        if optimizer is not None:
            optimizer.zero_grad()
        pooled = bags(batch["features"]).values()
        pooled = pooled.reshape(options.batch, len(sizes), options.dim)
        loss = squared_error(pooled, batch["y"])
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


def jagged(batches: list[dict[str, Tensor]]) -> list[dict]:
    """Returns the batches as torchrec wants them: "features", with one id in each bag, and "y"."""
    from torchrec import KeyedJaggedTensor

    converted = []
    for batch in batches:
        ids = batch["ids"]
        features = KeyedJaggedTensor(
            keys=[f"feature{number}" for number in range(ids.shape[1])],
            values=ids.long().T.reshape(-1).contiguous(),
            lengths=torch.ones(ids.numel(), dtype=torch.long),
        )
        converted.append({"features": features, "y": batch["y"]})
    return converted


@dataclass(frozen=True)
class Maker:
    """What makes a contender's step, and the form of the batches that the step takes."""

    make: Callable[..., Callable[[dict], Tensor] | None]
    form: Literal["xla", "cpu", "jagged"]


def measure(options: Options, names: list[str]) -> dict[str, dict]:
    """Times contenders in this process.

    Returns:
        By name {"seconds": of each timed step, "losses": of the warm-up steps}, or
        {"not run": why}.
    """
    mesh = device.setup(0, "float32")
    sizes = table_rows(int(float(options.rows)), options.tables)
    batches = host_batches(options, sizes)
    forms = {"xla": on_device(batches, mesh), "cpu": batches}
    makers = {
        "ours": Maker(ours, "xla"),
        "ours, --plan": Maker(partial(ours, plan=options.plan), "xla"),
        "eager": Maker(eager, "cpu"),
        "gspmd": Maker(gspmd, "xla"),
        "torchrec": Maker(torchrec_bags, "jagged"),
        "fbgemm": Maker(partial(torchrec_bags, fused=True), "jagged"),
    }
    if "torchrec" in names or "fbgemm" in names:
        forms["jagged"] = jagged(batches)

    steps = {}
    results = {}
    for name in names:
        step = makers[name].make(options, sizes, mesh)
        if step is None:
            results[name] = {"not run": f"has no rule like {options.optimizer}"}
        else:
            results[name] = {"seconds": [], "losses": []}
            steps[name] = step

    for number in range(WARM_UP_STEPS + options.steps):
        order = list(steps)
        first = number % len(order)
        order = order[first:] + order[:first]
        for name in order:
            seconds = results[name]["seconds"]
            if len(seconds) >= LEAST_STEPS and sum(seconds) > options.seconds:
                continue
            batch = forms[makers[name].form][number]
            started = time.perf_counter()
            loss = steps[name](batch)
            elapsed = time.perf_counter() - started
            if number < WARM_UP_STEPS:
                results[name]["losses"].append(float(loss))
            else:
                seconds.append(elapsed)
    return results


# ---- how full the slots of the exchange are ------------------------------------------------------


@dataclass(frozen=True)
class Fill:
    """How full the slots of a step are."""

    slots: int  # for the ids that one device sends to another
    pair: float  # share of them that the fullest pair of devices uses
    updates: int  # rows that a device can update
    update: float  # share of them that the fullest device uses


def exchange_fill(rows: Tensor) -> Fill:
    """Returns what a step's `pair_load` and `update_load` would be.

    Args:
        rows: array rows that each device looks up, int32 [devices, ids].
    """
    devices, ids = rows.shape

    def most_of_an_owner(distinct: Tensor) -> int:
        owner, _ = owner_of(distinct, devices)
        return int(torch.bincount(owner).max())

    slots = planned_capacity(ids / devices, devices**2, 1.0, ids)
    updates = planned_capacity(ids, devices, 1.0, devices * slots)
    fullest_pair = max(most_of_an_owner(own.unique()) for own in rows)
    fullest_owner = most_of_an_owner(rows.unique())
    return Fill(slots, fullest_pair / slots, updates, fullest_owner / updates)


def drawn_rows(devices: int, examples: int, tables: int, skewed: bool) -> Tensor:
    """Draws the rows [devices, examples * tables] of one-hot features.

    Each has SYNTHETIC_ROWS rows; they are drawn uniformly, or by a power law (density 1 / row)
    where `skewed`.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(devices, examples, tables, generator=generator, dtype=torch.float64)
    if skewed:
        ids = SYNTHETIC_ROWS**random - 1
    else:
        ids = random * SYNTHETIC_ROWS
    starts = torch.arange(tables, dtype=torch.int32) * SYNTHETIC_ROWS
    return (ids.int() + starts).reshape(devices, -1)


def clicked_rows(clicks: ClickLog, dim: int, devices: int, examples: int) -> Tensor:
    """Returns the rows [devices, ids] of the first examples of a log, in the tables that `auto`
    exchanges.

    Raises:
        InputError: there is no such table, or a feature has several ids.
    """
    tables = []
    for name, rows in zip(clicks.features, clicks.table_rows, strict=True):
        tables.append(Table(name, rows))
    plans = choose_plans(tables, dim, devices, OPTIMIZERS["sgd"](), math.inf)
    exchanged = [number for number, plan in enumerate(plans) if plan == "exchange"]
    if not exchanged or max(clicks.lookups) > 1:
        raise InputError(
            "--clicks needs one id a feature and a table of more than 1 MiB, "
            "which a larger --dim may give"
        )

    # A table has as many rows on each device as on another.
    sizes = [math.ceil(tables[number].rows / devices) * devices for number in exchanged]
    starts = torch.tensor(first_rows(sizes), dtype=torch.int32)
    ids = clicks.batch(np.arange(devices * examples))["ids"][:, exchanged]
    return (torch.from_numpy(ids) + starts).reshape(devices, -1)


def fill_table(clicks: ClickLog, dim: int) -> str:
    """Returns Markdown: how full the slots of a step are on 8, 64 and 256 devices.

    The batch of the step is as many examples of the log as 256 devices can share equally.
    """
    lines = [
        "| devices | ids of a device | | slots of a pair | fullest "
        "| updates of a device | fullest |",
        "|---|---|---|---|---|---|---|",
    ]
    for devices in (8, 64, 256):
        examples = len(clicks) // 256 * 256 // devices
        clicked = clicked_rows(clicks, dim, devices, examples)
        tables = clicked.shape[1] // examples
        rows_of = {
            "uniform": drawn_rows(devices, examples, tables, skewed=False),
            "power law": drawn_rows(devices, examples, tables, skewed=True),
            "clicks": clicked,
        }
        for kind, rows in rows_of.items():
            fill = exchange_fill(rows)
            slots = f"{fill.slots} | {fill.pair:.2f}"
            updates = f"{fill.updates:,} | {fill.update:.2f}"
            lines.append(f"| {devices} | {rows.shape[1]:,} | {kind} | {slots} | {updates} |")
    return "\n".join(lines)


# ---- rounds --------------------------------------------------------------------------------------


def groups(rows: int, options: Options) -> tuple[list[list[str]], dict[str, str]]:
    """Returns groups of contenders that fit the memory together, and why others are left out.

    A contender joins the first group that has memory for it.
    """
    memory = USED_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting = []
    left_out = {}
    for name in CONTENDERS:
        if name == "ours, --plan" and not options.plan:
            continue
        needed = needed_bytes(name, rows, options)
        if needed > memory:
            needed_gib = f"{needed / 2**30:.1f} GiB"
            left_out[name] = f"needs {needed_gib}, {memory / 2**30:.1f} are there"
            continue
        for group in fitting:
            together = sum(needed_bytes(other, rows, options) for other in [*group, name])
            if together <= memory:
                group.append(name)
                break
        else:
            fitting.append([name])
    return fitting, left_out


def run_round(options: Options, rows: int, names: list[str], folder: str) -> dict[str, dict]:
    """Runs `measure` in a process of its own."""
    out = os.path.join(folder, "part.json")
    values = asdict(options) | {"rows": str(rows), "contenders": ";".join(names), "out": out}
    flags = []
    for key, value in values.items():
        flags += [f"--{key}", str(value)]

    environment = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    environment["CPU_NUM_DEVICES"] = str(options.devices)
    command = [sys.executable, "-m", "bench.embedding", *flags]
    subprocess.run(command, check=True, env=environment)
    return json.loads(Path(out).read_text())


def check_losses(results: dict[str, dict]) -> None:
    """Raises RuntimeError where a contender has other losses than ours: it does other work.

    Each draws its own initial weights, within a small bound, so the losses differ a little.
    """
    losses = {}
    for name, result in results.items():
        if result.get("losses"):
            losses[name] = result["losses"]
    for name, values in losses.items():
        pairs = zip(values, losses["ours"], strict=True)
        if not all(math.isclose(its, our, rel_tol=0.01) for its, our in pairs):
            raise RuntimeError(
                f"{name} does not train the same tables: "
                f"its losses are {values}, ours {losses['ours']}"
            )


def table(results: dict[int, dict[str, dict]]) -> str:
    """Returns Markdown: milliseconds and ratios."""
    fewest = results[min(results)]
    lines = [
        "| rows | | ms a step, median (10 % to 90 %) | to ours | to itself at the fewest rows |",
        "|---|---|---|---|---|",
    ]

    def ratio(one: dict, other: dict) -> str:
        pairs = zip(one["rounds"], other["rounds"], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    for rows, contenders in results.items():
        for name, result in contenders.items():
            if "not run" in result:
                lines.append(f"| {rows:,} | {name} | not run: {result['not run']} | | |")
                continue
            ordered = sorted(1000 * value for value in result["seconds"])
            last = len(ordered) - 1
            low = ordered[round(0.1 * last)]
            high = ordered[round(0.9 * last)]
            milliseconds = f"{statistics.median(ordered):.1f} ({low:.1f} to {high:.1f})"
            to_ours = ratio(result, contenders["ours"])
            at_fewest_rows = fewest.get(name, {})
            to_itself = ""
            if "rounds" in at_fewest_rows:
                to_itself = ratio(result, at_fewest_rows)
            lines.append(f"| {rows:,} | {name} | {milliseconds} | {to_ours} | {to_itself} |")
    return "\n".join(lines)


def add_round(totals: dict[str, dict], measured: dict[str, dict]) -> None:
    """Adds a round's measurements to the totals of its number of rows."""
    for name, result in measured.items():
        if "not run" in result:
            totals.setdefault(name, {})["not run"] = result["not run"]
        else:
            total = totals.setdefault(name, {"seconds": [], "rounds": []})
            total["seconds"] += result["seconds"]
            total["rounds"].append(statistics.median(result["seconds"]))


def main(options: Options) -> dict[int, dict[str, dict]]:
    """Runs all rounds, prints the table and writes --out.

    Returns:
        By number of rows and contender {"seconds": of all timed steps, "rounds": the median of
        each}, or {"not run": why}.
    """
    if options.contenders:
        measured = measure(options, options.contenders.split(";"))
        Path(options.out).write_text(json.dumps(measured))
        return {}
    if options.clicks:
        print(fill_table(open_clicks(options.clicks, "train"), options.dim))
        return {}

    numbers = [int(float(number)) for number in options.rows.split(",")]
    results: dict[int, dict[str, dict]] = {rows: {} for rows in numbers}
    with tempfile.TemporaryDirectory(prefix="bench-embedding-") as folder:
        for round_number in range(options.rounds):
            # Neither end of the list always has the machine first.
            for rows in numbers if round_number % 2 == 0 else numbers[::-1]:
                fitting, left_out = groups(rows, options)
                measured: dict[str, dict] = {}
                for names in fitting:
                    together = "; ".join(names)
                    print(f"round {round_number + 1}, {rows:,} rows: {together}", flush=True)
                    measured |= run_round(options, rows, names, folder)
                check_losses(measured)
                measured |= {name: {"not run": reason} for name, reason in left_out.items()}
                add_round(results[rows], measured)

    print(f"\n{table(results)}")
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    record = {"options": asdict(options), "results": results}
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    return results


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
