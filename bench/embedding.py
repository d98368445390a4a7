"""Seconds of an embedding step (lookup, a small loss, update) against the number of rows: ours and the alternatives.

    ours       train.common.embedding.ShardedEmbeddingBags under its automatic plan, and under --plan when it is given
    gspmd      F.embedding on an nn.Parameter that is sharded by rows over the same devices, autograd, torch.optim: its
               gradient is as large as the table
    eager      nn.EmbeddingBag(sparse=True) and torch.optim (SGD, Adagrad, SparseAdam), on the CPU
    torchrec   torchrec's EmbeddingBagCollection on the CPU and torch.optim: dense gradients
    fbgemm     torchrec's FusedEmbeddingBagCollection on the CPU: fbgemm's lookup, with the update in its backward pass

    same       tables, ids (uniform and new in every step: few duplicates, no help from caches), targets, initial
               distribution and learning rate; the losses are compared
    timed      from a batch that is where it is used (on the device; as a KeyedJaggedTensor) to the updated tables
    how        a process for each number of rows, in which the contenders take turns step by step, in rotating order;
               those that do not fit the memory together get a process of their own. --rounds times all of that
    run        python -m bench.embedding --rows 1e6,4e6,16e6

    fill       python -m bench.embedding --clicks FOLDER --dim 128 times nothing: how full the slots of plan "exchange"
               are with the ids of a click log, a power law's and uniform ones, computed on the host

Tables halve in size from one to the next; every example looks up one id in each. Ratios are taken within a round, and
their median is printed. Run it on a machine that does nothing else.
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
from pathlib import Path
from typing import Literal, NamedTuple

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
LR, WARM = 0.05, 2  # learning rate; steps that are not counted
USED_MEMORY = 0.75  # of the machine's
SYNTHETIC_ROWS = 40_000_000  # of each table; MLPerf's largest


@dataclass(frozen=True)
class Options:
    rows: str = "1e6,4e6,16e6"  # of all tables together; one or more numbers
    dim: int = 64  # columns
    batch: int = 2048  # examples a step
    tables: int = 8  # features, with a table each
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = (
        "sgd"  # the rule of all contenders
    )
    plan: Literal["", "exchange", "data"] = ""  # besides the automatic one, for ours
    devices: int = 1  # virtual devices of XLA's CPU backend, over which ours and gspmd shard; the others have one
    steps: int = 20  # counted ones, of each contender in each round; WARM more before them are not
    seconds: float = (
        60.0  # a slow contender has fewer steps: it stops after so long in a round, not before 3
    )
    rounds: int = 3  # see above
    clicks: str = ""  # a folder of prepared clicks; see "fill" above
    out: str = "runs/bench/embedding.json"  # where the figures go
    contenders: str = (
        ""  # run these, in this process, for the one number of rows; how the rounds call themselves
    )


def table_rows(rows: int, tables: int) -> list[int]:
    """Halves from one to the next, at least 2."""
    return [max(2, rows >> min(t + 1, tables - 1)) for t in range(tables)]


def needed_bytes(contender: str, rows: int, options: Options) -> float:
    """Memory at the peak of a step: weight and state, and what else is as large as the tables."""
    weight, full = 4.0 * rows * options.dim, row_bytes(options.dim, OPTIMIZERS[options.optimizer]())
    # A dense gradient; and GSPMD's new weight beside the old one, since XLA makes it in another place.
    extra = {"torchrec": weight, "gspmd": 2 * weight}.get(contender, 0.0)
    return rows * full + extra


def host_batches(options: Options, sizes: list[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "ids": torch.stack(
                [
                    torch.randint(0, n, (options.batch,), generator=generator, dtype=torch.int32)
                    for n in sizes
                ],
                1,
            ),
            "y": torch.rand(options.batch, len(sizes), options.dim, generator=generator),
        }
        for _ in range(WARM + options.steps)
    ]


def squared_error(embedded: Tensor, y: Tensor) -> Tensor:
    return ((embedded - y) ** 2).sum((1, 2)).mean()


# ---- contenders: each makes a function that trains on a batch, waits for the end, and returns the loss ---------------


def on_device(batches: list[dict[str, Tensor]], mesh: device.Mesh) -> list[dict[str, Tensor]]:
    return [
        {name: device.upload(tensor, mesh) for name, tensor in batch.items()} for batch in batches
    ]


def waiting(step: Callable, *args) -> Callable[[dict], Tensor]:
    def run(batch: dict[str, Tensor]) -> Tensor:
        loss = step(*args, batch)
        device.wait_for_steps()
        return loss

    return run


def ours(options: Options, sizes: list[int], mesh: device.Mesh, plan: str = "auto") -> Callable:
    tables = [Table(f"table{t}", rows, plan=plan) for t, rows in enumerate(sizes)]
    embeddings = ShardedEmbeddingBags(
        tables, options.dim, mesh, OPTIMIZERS[options.optimizer](), LR, seed=0
    )
    print(f"ours, {plan}: {', '.join(embeddings.plans)}", flush=True)

    def train_step(embeddings, batch):
        loss = squared_error(embeddings(batch["ids"]), batch["y"])
        loss.backward()
        embeddings.step()
        return loss.detach()

    return waiting(device.compiled(train_step, mesh), embeddings)


def gspmd(options: Options, sizes: list[int], mesh: device.Mesh) -> Callable | None:
    optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    if options.optimizer not in optimizers:
        return None
    rows = -(-sum(sizes) // mesh.num_devices) * mesh.num_devices
    bounds = torch.tensor(sizes).repeat_interleave(torch.tensor(sizes)).float() ** -0.5
    bounds = F.pad(bounds, (0, rows - sum(sizes))).to(mesh.device)
    device.annotate(bounds, mesh.spmd, ("data",))
    weight = nn.Parameter(
        (torch.rand(rows, options.dim, device=mesh.device) * 2 - 1) * bounds[:, None]
    )
    device.annotate(weight, mesh.spmd, ("data", None))
    starts = torch.tensor([sum(sizes[:t]) for t in range(len(sizes))], dtype=torch.int32).to(
        mesh.device
    )
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


def eager(options: Options, sizes: list[int], mesh: device.Mesh) -> Callable | None:
    optimizers = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "lazy_adam": torch.optim.SparseAdam,
    }
    if options.optimizer not in optimizers:
        return None
    bags = nn.ModuleList()
    for rows in sizes:
        weight = torch.empty(rows, options.dim).uniform_(-(rows**-0.5), rows**-0.5)
        bags.append(nn.EmbeddingBag(rows, options.dim, mode="sum", sparse=True, _weight=weight))
    optimizer = optimizers[options.optimizer](bags.parameters(), lr=LR)

    def step(batch):
        optimizer.zero_grad()
        loss = squared_error(
            torch.stack([bag(batch["ids"][:, t, None]) for t, bag in enumerate(bags)], 1),
            batch["y"],
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def torchrec_bags(
    options: Options, sizes: list[int], mesh: device.Mesh, fused: bool = False
) -> Callable | None:
    import torchrec  # takes seconds
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    if fused:
        optimizers["rowwise_adagrad"] = torchrec.optim.RowWiseAdagrad
    if options.optimizer not in optimizers:
        return None
    configs = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=options.dim,
            name=f"table{t}",
            feature_names=[f"feature{t}"],
        )
        for t, rows in enumerate(sizes)
    ]
    rule, cpu, optimizer = optimizers[options.optimizer], torch.device("cpu"), None
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
                weight.uniform_(-(weight.shape[0] ** -0.5), weight.shape[0] ** -0.5)

    def step(batch):
        if optimizer is not None:
            optimizer.zero_grad()
        pooled = bags(batch["features"]).values().reshape(options.batch, len(sizes), options.dim)
        loss = squared_error(pooled, batch["y"])
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


def jagged(batches: list[dict[str, Tensor]]) -> list[dict]:
    from torchrec import KeyedJaggedTensor

    return [
        {
            "features": KeyedJaggedTensor(
                keys=[f"feature{t}" for t in range(batch["ids"].shape[1])],
                values=batch["ids"].long().T.reshape(-1).contiguous(),
                lengths=torch.ones(batch["ids"].numel(), dtype=torch.long),
            ),
            "y": batch["y"],
        }
        for batch in batches
    ]


def measure(options: Options, names: list[str]) -> dict[str, dict]:
    """Times contenders in this process: name -> {"seconds": of each step, "losses": the first ones}."""
    mesh, sizes = device.setup(0, "float32"), table_rows(int(float(options.rows)), options.tables)
    batches = host_batches(options, sizes)
    forms = {"xla": on_device(batches, mesh), "cpu": batches}
    makers = {
        "ours": (ours, "xla"),
        "ours, --plan": (lambda *args: ours(*args, plan=options.plan), "xla"),
        "eager": (eager, "cpu"),
        "gspmd": (gspmd, "xla"),
        "torchrec": (torchrec_bags, "jagged"),
        "fbgemm": (lambda *args: torchrec_bags(*args, fused=True), "jagged"),
    }
    if {"torchrec", "fbgemm"} & set(names):
        forms["jagged"] = jagged(batches)
    steps, results = {}, {}
    for name in names:
        make, form = makers[name]
        step = make(options, sizes, mesh)
        results[name] = (
            {"seconds": [], "losses": []}
            if step
            else {"not run": f"has no rule like {options.optimizer}"}
        )
        if step:
            steps[name] = (step, forms[form])
    for number in range(WARM + options.steps):
        order = list(steps)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name in order:
            seconds = results[name]["seconds"]
            if len(seconds) >= 3 and sum(seconds) > options.seconds:
                continue
            step, batch = steps[name][0], steps[name][1][number]
            started = time.perf_counter()
            loss = step(batch)
            elapsed = time.perf_counter() - started
            if number < WARM:
                results[name]["losses"].append(float(loss))
            else:
                seconds.append(elapsed)
    return results


# ---- how full the slots of the exchange are --------------------------------------------------------------------------


class Fill(NamedTuple):
    """How full the slots of a step are.

    Attributes:
        slots: for the ids of a pair of devices; pair: the share that the fullest pair uses.
        updates: rows that a device can update; update: the share that the fullest device uses.
    """

    slots: int
    pair: float
    updates: int
    update: float


def exchange_fill(rows: Tensor) -> Fill:
    """Returns what a step's `pair_load` and `update_load` would be; `rows` [devices, ids] are array rows, int32."""
    devices, ids = rows.shape

    def fullest(distinct: Tensor) -> int:
        owner = owner_of(distinct, devices)[0]
        return int(torch.bincount(owner).max())

    slots = planned_capacity(ids / devices, devices**2, 1.0, ids)
    updates = planned_capacity(ids, devices, 1.0, devices * slots)
    fullest_pair = max(fullest(own.unique()) for own in rows)
    fullest_owner = fullest(rows.unique())
    return Fill(slots, fullest_pair / slots, updates, fullest_owner / updates)


def drawn_rows(devices: int, examples: int, tables: int, skewed: bool) -> Tensor:
    """Draws the rows [devices, examples * tables] of one-hot features with SYNTHETIC_ROWS rows each, uniformly or by a
    power law (density 1 / row)."""
    random = torch.rand(
        devices, examples, tables, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    ids = SYNTHETIC_ROWS**random - 1 if skewed else random * SYNTHETIC_ROWS
    return (ids.int() + torch.arange(tables, dtype=torch.int32) * SYNTHETIC_ROWS).reshape(
        devices, -1
    )


def clicked_rows(clicks: ClickLog, dim: int, devices: int, examples: int) -> Tensor:
    """Returns the rows [devices, ids] of the first examples of a log, in the tables that `auto` exchanges.
    Raises InputError where there is none, or a feature has several ids."""
    tables = [
        Table(name, rows) for name, rows in zip(clicks.features, clicks.table_rows, strict=True)
    ]
    plans = choose_plans(tables, dim, devices, OPTIMIZERS["sgd"](), math.inf)
    exchanged = [t for t, plan in enumerate(plans) if plan == "exchange"]
    if not exchanged or max(clicks.lookups) > 1:
        raise InputError(
            "--clicks needs one id a feature and a table of more than 1 MiB, which a larger --dim may give"
        )
    sizes = [-(-tables[t].rows // devices) * devices for t in exchanged]
    starts = torch.tensor([sum(sizes[:t]) for t in range(len(sizes))], dtype=torch.int32)
    ids = clicks.batch(np.arange(devices * examples))["ids"][:, exchanged]
    return (torch.from_numpy(ids) + starts).reshape(devices, -1)


def fill_table(clicks: ClickLog, dim: int) -> str:
    """Markdown: as many examples of the log as 256 devices can share equally are the batch of one step."""
    lines = [
        "| devices | ids of a device | | slots of a pair | fullest | updates of a device | fullest |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for devices in (8, 64, 256):
        examples = len(clicks) // 256 * 256 // devices
        rows = clicked_rows(clicks, dim, devices, examples)
        drawn = devices, examples, rows.shape[1] // examples
        kinds = {
            "uniform": drawn_rows(*drawn, False),
            "power law": drawn_rows(*drawn, True),
            "clicks": rows,
        }
        for kind, rows in kinds.items():
            fill = exchange_fill(rows)
            shares = f"{fill.slots} | {fill.pair:.2f} | {fill.updates:,} | {fill.update:.2f}"
            lines.append(f"| {devices} | {rows.shape[1]:,} | {kind} | {shares} |")
    return "\n".join(lines)


# ---- rounds ----------------------------------------------------------------------------------------------------------


def groups(rows: int, options: Options) -> tuple[list[list[str]], dict[str, str]]:
    """Contenders that fit the memory together, first fit; and why those that are left out are."""
    memory = USED_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting, left_out = [], {}
    for name in CONTENDERS:
        needed = needed_bytes(name, rows, options)
        if name == "ours, --plan" and not options.plan:
            continue
        if needed > memory:
            left_out[name] = f"needs {needed / 2**30:.1f} GiB, {memory / 2**30:.1f} are there"
            continue
        for group in fitting:
            if sum(needed_bytes(other, rows, options) for other in [*group, name]) <= memory:
                group.append(name)
                break
        else:
            fitting.append([name])
    return fitting, left_out


def run_round(options: Options, rows: int, names: list[str], folder: str) -> dict[str, dict]:
    """`measure` in a process of its own."""
    out = os.path.join(folder, "part.json")
    values = asdict(options) | {"rows": str(rows), "contenders": ";".join(names), "out": out}
    flags = [item for key, value in values.items() for item in (f"--{key}", str(value))]
    environment = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    environment["CPU_NUM_DEVICES"] = str(options.devices)
    subprocess.run([sys.executable, "-m", "bench.embedding", *flags], check=True, env=environment)
    return json.loads(Path(out).read_text())


def check_losses(results: dict[str, dict]) -> None:
    """Whoever has another loss does other work. (Initial weights are drawn anew by each, within a small bound.)"""
    losses = {name: result["losses"] for name, result in results.items() if result.get("losses")}
    for name, values in losses.items():
        if not all(
            math.isclose(a, b, rel_tol=0.01) for a, b in zip(values, losses["ours"], strict=True)
        ):
            raise RuntimeError(
                f"{name} does not train the same tables: its losses are {values}, ours {losses['ours']}"
            )


def table(results: dict[int, dict[str, dict]]) -> str:
    """Markdown: milliseconds and ratios."""
    first = min(results)
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
            low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
            smallest = results[first].get(name, {})
            lines.append(
                f"| {rows:,} | {name} | {statistics.median(ordered):.1f} ({low:.1f} to {high:.1f}) "
                f"| {ratio(result, contenders['ours'])} | {ratio(result, smallest) if 'rounds' in smallest else ''} |"
            )
    return "\n".join(lines)


def main(options: Options) -> dict[int, dict[str, dict]]:
    """Runs all rounds, prints the table and writes --out; returns the figures of each number of rows."""
    if options.contenders:
        part = measure(options, options.contenders.split(";"))
        Path(options.out).write_text(json.dumps(part))
        return {}
    if options.clicks:
        print(fill_table(open_clicks(options.clicks, "train"), options.dim))
        return {}
    numbers = [int(float(part)) for part in options.rows.split(",")]
    results: dict[int, dict[str, dict]] = {rows: {} for rows in numbers}
    with tempfile.TemporaryDirectory(prefix="bench-embedding-") as folder:
        for round_number in range(options.rounds):
            # Neither end of the list always has the machine first.
            for rows in numbers if round_number % 2 == 0 else numbers[::-1]:
                fitting, left_out = groups(rows, options)
                parts: dict[str, dict] = {}
                for names in fitting:
                    print(
                        f"round {round_number + 1}, {rows:,} rows: {'; '.join(names)}", flush=True
                    )
                    parts |= run_round(options, rows, names, folder)
                check_losses(parts)
                parts |= {name: {"not run": reason} for name, reason in left_out.items()}
                for name, part in parts.items():
                    total = results[rows].setdefault(
                        name, {} if "not run" in part else {"seconds": [], "rounds": []}
                    )
                    if "not run" in part:
                        total["not run"] = part["not run"]
                    else:
                        total["seconds"] += part["seconds"]
                        total["rounds"].append(statistics.median(part["seconds"]))
    print(f"\n{table(results)}")
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    Path(options.out).write_text(
        json.dumps({"options": asdict(options), "results": results}, indent=2) + "\n"
    )
    return results


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
