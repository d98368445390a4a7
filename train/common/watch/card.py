"""The model card of an export in transformers' format, export/README.md: what the hub shows of it.

It has the data, the metrics of summary.json, the command, versions, hyperparameters and the picture
of curves.py, and nothing of the environment. It is written before the run counts as finished, by
huggingface_hub, which transformers needs anyway; nothing is uploaded. docs/tracking.md says how to.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from errors import InputError
from train.common.files import write_file
from train.common.hooks import Watcher
from train.common.metrics import format_number
from train.common.watch.curves import draw_curves, records

# The hub's name of what a transformers class of this ending is for.
TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForQuestionAnswering": "question-answering",
    "ForQuestionAnsweringSimple": "question-answering",  # of XLNet
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "LMHeadModel": "text-generation",
}


@dataclass(frozen=True)
class Flags:
    """None: it costs nothing."""


def watcher(flags: Flags) -> Callable[[Any], Watcher]:
    """Returns what makes the writer of a Run."""
    return Card


class Card(Watcher):
    """Writes the card of a run that finishes."""

    def __init__(self, run: Any):
        self._run = run

    def summary(self) -> dict[str, Any]:
        run = self._run
        folder = f"{run.path}/export"
        try:
            content = run.folder.read("export/config.json") if run.mesh.main_process else None
            model = json.loads(content or b"{}")
            if "model_type" in model:
                write_file(f"{folder}/curves.png", draw_curves(records(run), run.name))
                write_file(f"{folder}/README.md", card(run, model).encode())
                run.message(
                    f"{folder}/README.md is its model card: docs/tracking.md says how to publish "
                    "the folder"
                )
        except (InputError, ValueError) as error:  # as in curves.py
            run.message("warning: no model card: " + str(error).partition(";")[0])
        return {}


def card(run: Any, model: dict[str, Any]) -> str:
    """Returns the model card of a Run whose summary has its metrics.

    Args:
        model: config.json of the run's export.
    """
    from huggingface_hub import EvalResult, ModelCardData

    stored = json.loads(run.folder.read("config.json"))
    config = stored["config"]
    data = _hub_id(config["data"])
    first_weights = _hub_id(config.get("checkpoint", ""))
    architecture = (model.get("architectures") or [""])[0]
    task = None
    for ending, name_of_task in TASKS.items():
        if architecture.endswith(ending):
            task = name_of_task
            break

    dataset_name = config["data"].rstrip("/").rpartition("/")[2]
    if config.get("task"):
        dataset_name = f"{dataset_name} {config['task']}".strip()
    results = []
    for key, value in run.summary["metrics"].items():
        if value is not None:
            result = EvalResult(
                task_type=task or "other",
                dataset_type=data or dataset_name,
                dataset_name=dataset_name,
                metric_type=key,
                metric_value=value,
            )
            results.append(result)
    header = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=[model["model_type"]],
        base_model=first_weights if config.get("pretrained", True) else None,
        datasets=[data] if data else None,
        model_name=run.name,
        eval_results=results,
    )
    return f"---\n{header.to_yaml()}\n---\n\n{_text(run, stored, dataset_name)}"


def _text(run: Any, stored: dict[str, Any], data: str) -> str:
    """Returns what stands below the header; `stored` is the run's config.json."""
    config = stored["config"]
    start = stored["starts"][-1]
    devices = start["devices"]
    git = start["git"]
    summary = run.summary
    trial = ""
    if config["data"] == "synthetic":
        trial = ": a trial, of no use but to see that training works"
    commit = ""
    if git:
        changes = " with changes" if git["dirty"] else ""
        commit = f", of version {git['version']} (commit {git['commit']}{changes})"
    took = f"{summary['steps']:,} steps in {summary['training_seconds']:,.0f} s without evaluations"
    found = summary.get("best", {})
    if found.get("step"):
        took += f"; the weights are those of step {found['step']:,}, the best by {found['metric']}"
    machines = f"{devices['devices']} {devices['kind']} device(s)"
    metrics = {key: format_number(value) for key, value in summary["metrics"].items()}
    flags = {}
    for key, value in _flat(config).items():
        if key not in ("runs", "name") and value not in ("", None, []):
            flags[f"`--{key}`"] = f"`{value}`"
    parts = [
        f"# {run.name}",
        f"`{config.get('model', run.name)}`, trained on `{data}`{trial}.",
        "![loss, learning rate and metrics over the steps](curves.png)",
        "## Results",
        _table("metric", "value", metrics),
        "## Training",
        f"{took}, on {machines}, in {len(stored['starts'])} start(s). The last command{commit}:",
        f"    {start['command']}",
        "## Versions",
        _table("package", "version", start["versions"]),
        "## Settings",
        _table("flag", "value", flags),
        "## License",
        "Not chosen yet: set `license:` at the top, as those of the data and of the first weights "
        "allow.",
    ]
    return "\n\n".join(parts) + "\n"


def _hub_id(name: str) -> str | None:
    """Returns a name that is the hub's, such as nyu-mll/glue, and no folder's; otherwise None."""
    return name if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not os.path.exists(name) else None


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags of a config, those of its groups, too."""
    flags: dict[str, Any] = {}
    for key, value in config.items():
        flags |= _flat(value) if isinstance(value, dict) else {key.replace("_", "-"): value}
    return flags


def _table(key: str, value: str, rows: dict[str, Any]) -> str:
    lines = [f"| {key} | {value} |", "| --- | --- |"]
    for name, text in rows.items():
        cell = str(text).replace("|", "\\|")
        lines.append(f"| {name} | {cell} |")
    return "\n".join(lines)
