"""train/transformer.py and train/translate.py as their users run them: the model learns, gives the same numbers on
other devices, after a kill, from several batches an update and from packed rows; keeps its graph contract; its export
translates; and bad input is refused."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import safetensors.torch
import torch

from data import batching, wmt
from errors import InputError
from models import fairseq
from models.transformer import ARCHITECTURES, Transformer, label_smoothed
from train import transformer, translate
from train.common import averaging, checkpoint, cli, device, files, loading

LEARNS = replace(transformer.TINY, batch_tokens=2048, updates=260, warmup_updates=80, eval_every=1000, save_every=8)
# 50 is no multiple of save_every: the mean is that of updates 40, 48 and 50.
SHORT = replace(LEARNS, updates=50, log_every=1, keep=3)
TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
UNTRAINED, LEARNED = 1, 25  # BLEU


def records(path) -> list[dict]:
    """The lines of metrics.jsonl without their timings."""
    return [{**json.loads(line), "timing": None} for line in open(f"{path}/metrics.jsonl")]


def losses(path) -> list[float]:
    return [record["loss"] for record in records(path) if "loss" in record]


def exported(path) -> dict[str, torch.Tensor]:
    return torch.load(f"{path}/export/model.pt", weights_only=False)["model"]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flags(config, preset) -> list[str]:
    """The command line that makes this config of a preset."""
    made = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(preset, field.name):
            made += [f"--{field.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return made


# A training on the command line that sends itself and its workers a signal before it begins a batch.
SIGNALLED = """
import glob, os, time
from train import transformer
from train.common import cli, device

seed_step = device.seed_step

def seed_or_die(seed, number):
    if number == {batch}:
        while not glob.glob("{runs}/*/checkpoints/step_{saved:08d}/COMPLETE"):  # another thread writes it
            time.sleep(0.02)
        os.killpg(os.getpgrp(), {signal})
    seed_step(seed, number)

device.seed_step = seed_or_die
cli.run(transformer.main, transformer.PRESETS)
"""


def run(config, program: tuple[str, ...] = ("-m", "train.transformer"), devices: int = 4) -> tuple[int, str]:
    """Trains in a process of its own, with a worker process: (exit code, output)."""
    process = subprocess.run(
        [sys.executable, *program, "tiny", *flags(replace(config, workers=1), transformer.TINY)],
        env={**os.environ, "CPU_NUM_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        start_new_session=True,
    )
    return process.returncode, process.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned something: (its folder, the metrics that main returned, its config)."""
    config = replace(LEARNS, runs=str(tmp_path_factory.mktemp("runs")), name="learns")
    return f"{config.runs}/learns", transformer.main(config), config


@pytest.fixture(scope="module")
def short(trained):
    """A shorter one, for comparisons bit for bit: (its folder, its config)."""
    config = replace(SHORT, runs=trained[2].runs, name="short")
    transformer.main(config)
    return f"{config.runs}/short", config


@pytest.fixture
def no_evaluation(monkeypatch):
    monkeypatch.setattr(transformer, "evaluate", lambda *_: {"bleu": 0.0, "loss": 0.0, "ppl": 1.0})


@pytest.fixture
def few_pairs(monkeypatch):
    """64 training pairs: an epoch can be one batch, or two batches that make one update."""
    pairs = wmt.SyntheticPairs("train", 64), {"valid": wmt.SyntheticPairs("valid", 16)}
    monkeypatch.setattr(transformer, "open_data", lambda config: pairs)
    return pairs[0]


# ---- it learns -------------------------------------------------------------------------------------------------------


def test_it_learns_words_and_their_order(trained):
    rng = np.random.default_rng(0)
    references = transformer.open_data(trained[2])[1]["valid"].references()
    any_order = [" ".join(rng.permutation(line.split())) for line in references]
    assert UNTRAINED < sacrebleu.corpus_bleu(any_order, [references]).score < LEARNED
    assert trained[1]["bleu"] > LEARNED
    assert trained[1]["ppl"] < 5


def test_without_a_learning_rate_it_does_not(tmp_path):
    # Weights that do not move are the same after 10 updates and after all.
    metrics = transformer.main(replace(LEARNS, lr=0.0, updates=10, runs=str(tmp_path)))
    assert metrics["bleu"] < UNTRAINED
    assert metrics["ppl"] > 50


def test_learning_rate_is_fairseqs_inverse_square_root():
    config = replace(transformer.TINY, lr=0.4, warmup_updates=4)
    rates = [transformer.learning_rate(config, step) for step in (0, 1, 2, 4, 16)]
    assert rates == pytest.approx([1e-7, 0.1, 0.2, 0.4, 0.2], rel=1e-5)


def test_run_folder_holds_everything_about_the_run(trained):
    path, metrics, _ = trained
    names = {"config.json", "metrics.jsonl", "curves.png", "summary.json", "tb", "checkpoints", "export"}
    assert names <= set(os.listdir(path))
    assert set(os.listdir(f"{path}/export")) == {"model.pt", "dict.w.txt", "dict.v.txt"}
    summary = json.load(open(f"{path}/summary.json"))
    assert summary["metrics"] == metrics and summary["tokens_per_second"] > 0
    assert sorted(os.listdir(f"{path}/checkpoints")) == ["step_00000248", "step_00000256", "step_00000260"]


def test_a_finished_run_is_not_trained_again(trained, capsys):
    _, metrics, config = trained
    assert transformer.main(config) == metrics
    assert "is finished" in capsys.readouterr().out


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_one_device_gives_the_losses_of_four_and_compiles_a_graph_a_shape(short, tmp_path):
    config = replace(short[1], runs=str(tmp_path), name="one")
    code, output = run(config, devices=1)
    assert code == 0 and "on 1 CPU device(s)" in output, output
    # Adam turns the last digits of a gradient near 0 into whole steps: later the runs part.
    one, four = losses(tmp_path / "one")[:25], losses(short[0])[:25]
    assert one == pytest.approx(four, rel=1e-5)
    assert four[0] - four[24] > 0.5
    report = json.load(open(tmp_path / "one/summary.json"))["report"]
    assert report["recompilations"] == report["fallbacks"] == []
    # Training, evaluation and translation, each in two shapes; and tiny ones: Adam's, a number that hosts compare.
    assert report["graphs"] <= 3 * 2 + 3


def test_killed_and_terminated_it_goes_on_to_the_same_numbers_and_the_same_mean(short, tmp_path, capsys):
    path, config = short
    config = replace(config, runs=str(tmp_path), name="killed")
    killed = SIGNALLED.format(batch=30, signal=int(signal.SIGKILL), runs=tmp_path, saved=24)
    code, output = run(config, ("-c", killed))
    assert code == -signal.SIGKILL and "step    25/50" in output, output
    # Update 41 lies between two that are averaged; its checkpoint must not take the place of one of them.
    terminated = SIGNALLED.format(batch=41, signal=int(signal.SIGTERM), runs=tmp_path, saved=40)
    code, output = run(config, ("-c", terminated))
    assert code == 143 and "stopped by a signal at update 41: saved" in output, output
    assert "resuming after step 24" in output
    transformer.main(config)
    output = capsys.readouterr().out
    assert "resuming after step 41" in output and "mean of the checkpoints of updates [40, 48, 50]" in output
    assert records(tmp_path / "killed") == records(path)  # every loss and metric, bit for bit
    assert equal(exported(tmp_path / "killed"), exported(path))


def test_the_export_is_the_mean_of_the_last_checkpoints(short):
    path, _ = short
    states = [safetensors.torch.load_file(f"{path}/checkpoints/step_{n:08d}/state.safetensors") for n in (40, 48, 50)]
    weights = exported(path)
    for name in states[0]:
        if name.startswith("model.") and not name.endswith("positions"):
            mean = sum(state[name].double() for state in states) / 3
            assert torch.equal(weights[name.removeprefix("model.")], mean.float()), name
    assert not torch.equal(weights[TIED[0]], states[2][f"model.{TIED[0]}"])


def test_several_batches_an_update_and_packed_rows_give_the_numbers_of_one_batch(few_pairs, no_evaluation, tmp_path):
    """The 64 pairs are one batch; or two of unequal numbers of tokens; or one of half as many rows, packed."""
    config = replace(SHORT, lengths=(16,), batch_tokens=1024, updates=10, lr=2e-3, warmup_updates=5, runs=str(tmp_path))
    transformer.main(replace(config, name="one"))
    transformer.main(replace(config, name="two", batch_tokens=512, update_every=2))
    transformer.main(replace(config, name="packed", lengths=(32,), pack=True))
    for run_of, shape in (("one", (64, 16, 16)), ("packed", (32, 32, 32))):
        (found,) = transformer.training_plan(transformer_config(tmp_path / run_of), few_pairs).shapes
        assert found == shape
    one = losses(tmp_path / "one")
    assert one[1] == pytest.approx(one[0], rel=1e-4)  # the warm-up begins at 1e-7
    assert one[0] - one[9] > 0.5
    for other in ("two", "packed"):
        assert losses(tmp_path / other) == pytest.approx(one, rel=3e-6), other
        for name, weight in exported(tmp_path / "one").items():
            # A weight moves by up to 1e-2 here; where its gradient is rounding alone, Adam makes steps of that.
            torch.testing.assert_close(exported(tmp_path / other)[name], weight, rtol=0, atol=2e-3)


def transformer_config(path) -> transformer.Config:
    """The config that a run's folder keeps."""
    kept = json.load(open(f"{path}/config.json"))["config"]
    return transformer.Config(**{**kept, "lengths": tuple(kept["lengths"])})


def test_a_crash_and_a_signal_within_an_update_change_nothing(no_evaluation, tmp_path, monkeypatch, capsys):
    config = replace(SHORT, update_every=3, batch_tokens=512, updates=9, save_every=3, keep=2, dropout=0.1)
    config = replace(config, runs=str(tmp_path))
    transformer.main(replace(config, name="whole"))
    seed_step = device.seed_step

    def at_batch(wanted: int, act: Callable) -> None:
        def seed_or_act(seed, number):
            if number == wanted:
                act()
            seed_step(seed, number)

        monkeypatch.setattr(device, "seed_step", seed_or_act)

    def crash():
        raise ZeroDivisionError

    config = replace(config, name="crashed")
    at_batch(17, crash)  # the second batch of update 6
    with pytest.raises(ZeroDivisionError):
        transformer.main(config)
    at_batch(22, lambda: os.kill(os.getpid(), signal.SIGTERM))  # the first batch of update 8
    with pytest.raises(SystemExit, match="143"):
        transformer.main(config)
    monkeypatch.setattr(device, "seed_step", seed_step)
    transformer.main(config)
    output = capsys.readouterr().out
    assert "resuming after step 3" in output and "resuming after step 8" in output
    assert records(tmp_path / "crashed") == records(tmp_path / "whole")
    assert equal(exported(tmp_path / "crashed"), exported(tmp_path / "whole"))


def test_packed_rows_give_the_sums_and_gradients_of_separate_rows():
    pairs = wmt.SyntheticPairs("train", 30, seed=1)
    torch.manual_seed(0)
    model = Transformer(ARCHITECTURES["transformer_tiny"], 84, 84)
    plan = batching.pack(pairs.lengths, (16, 40, 40))
    [(packed, shape)] = plan.epoch(None)
    assert plan.most > 3 and (packed >= 0).sum() == 30 and (packed < 0).all(1).any()  # an empty row, too
    found = []
    for indices, lengths in ((np.arange(30), (16, 16)), (packed, shape)):
        batch = {name: torch.from_numpy(value) for name, value in pairs.batch(indices, lengths).items()}
        logits = model(*(batch.get(name) for name in ("source", "previous", "source_segment", "target_segment")))
        sums = label_smoothed(logits, batch["target"], 0.1)
        gradients = torch.autograd.grad(sums["loss"], list(model.parameters()))
        found.append([*(sums[name].detach() for name in ("loss", "nll", "tokens")), *gradients])
    for separate, together in zip(*found, strict=True):
        torch.testing.assert_close(together, separate, rtol=1e-5, atol=1e-4)


# ---- the contract ----------------------------------------------------------------------------------------------------


def test_graph_contract(trained):
    report = json.load(open(f"{trained[0]}/summary.json"))["report"]
    assert report["recompilations"] == report["fallbacks"] == []


def test_an_evaluation_reads_the_device_as_often_whatever_its_batches(mesh):
    config = replace(LEARNS, lengths=(16,), batch_tokens=256)
    few, many = (wmt.SyntheticPairs("valid", size) for size in (16, 80))
    model, _ = transformer.build(config, few, mesh)
    step = device.compiled(transformer.eval_step, mesh)
    translator = translate.Translator(model, mesh, config)
    transformer.evaluate(step, translator, model, few, config, mesh)
    reads, graphs = [device.host_reads()], device.compilations()
    for pairs in (few, many, few):
        transformer.evaluate(step, translator, model, pairs, config, mesh)
        reads.append(device.host_reads())
    assert np.diff(reads).tolist() == [2, 2, 2]  # the sums, and the tokens
    assert device.compilations() == graphs
    assert model.training


def test_tied_embeddings_stay_one_tensor(mesh, few_pairs, tmp_path):
    config = replace(SHORT, lengths=(16,), batch_tokens=1024, lr=1e-3)

    def is_one(model) -> bool:
        weights = [dict(model.named_parameters(remove_duplicate=False))[name] for name in TIED]
        values = [value for _, value in checkpoint.to_host(dict(zip(TIED, weights, strict=True))).items()]
        same = all(weight is weights[0] for weight in weights) and all(torch.equal(v, values[0]) for v in values)
        return same and weights[0].device.type == "xla"

    model, optimizer = transformer.build(config, few_pairs, mesh)
    assert is_one(model) and len(optimizer.state) == len(list(model.parameters()))
    step = device.compiled(transformer.train_step, mesh)
    plan = transformer.training_plan(config, few_pairs)
    with checkpoint.Checkpointer(str(tmp_path), every=2) as checkpoints:
        with loading.parallel_loader(few_pairs, plan, mesh, train=True, stop=2) as loader:
            for number, batch in enumerate(loader, 1):
                step(model, optimizer, batch, config, mesh)
                checkpoints.save(number, model, optimizer)
        assert is_one(model)
        checkpoints.wait()
        (saved,) = (files.load_weights(f"{tmp_path}/step_00000002/state.safetensors")[0],)
        assert sum(name.startswith("model.") and saved[name].shape == (84, 64) for name in saved) == 1
        other, other_optimizer = transformer.build(config, few_pairs, mesh)
        assert checkpoints.restore(other, other_optimizer, mesh) == 2 and is_one(other)
        averaging.average(checkpoints, other, mesh)
        assert is_one(other)
    transformer.export(f"{tmp_path}/export", other, few_pairs, config)
    weights = exported(tmp_path)
    assert all(torch.equal(weights[name], saved[f"model.{TIED[0]}"]) for name in TIED)


# ---- the export ------------------------------------------------------------------------------------------------------


def load_export(path) -> Transformer:
    """The exported model on the CPU."""
    name = f"{path}/export/model.pt"
    settings, weights = fairseq.read_checkpoint(Path(name).read_bytes(), name)
    assert (settings["source_lang"], settings["target_lang"]) == ("w", "v")
    model = Transformer(fairseq.architecture(settings, weights, name), 84, 84)
    fairseq.load_weights(model, weights, name)
    return model.eval()


def test_the_export_read_back_has_the_logits_and_the_loss_of_the_run(trained, mesh):
    path, metrics, config = trained
    model = load_export(path)
    assert replace(model.arch, dropout=0.0) == ARCHITECTURES["transformer_tiny"]
    pairs = transformer.open_data(config)[1]["valid"]
    batch = {name: torch.from_numpy(value) for name, value in pairs.batch(np.arange(len(pairs)), (16, 16)).items()}
    with torch.no_grad():
        logits = model(batch["source"], batch["previous"])
        sums = label_smoothed(logits, batch["target"], config.label_smoothing)
    assert (sums["loss"] / sums["tokens"]).item() == pytest.approx(metrics["loss"], rel=1e-5)
    text_model, text = translate.load(f"{path}/export", mesh)
    assert text.source_dictionary == pairs.source_dictionary and text.target_dictionary is text.source_dictionary
    on_device = device.compiled(lambda model, source, previous: model(source, previous), mesh)(
        text_model, batch["source"][:8].to(mesh.device), batch["previous"][:8].to(mesh.device)
    )
    torch.testing.assert_close(on_device.cpu(), logits[:8], rtol=1e-4, atol=1e-4)


def test_training_goes_on_from_an_export(trained, few_pairs, mesh):
    config = replace(trained[2], weights=f"{trained[0]}/export/model.pt")
    model, _ = transformer.build(config, few_pairs, mesh)
    weights = exported(trained[0])
    assert all(torch.equal(value, weights[name]) for name, value in checkpoint.to_host(model.state_dict()).items())


def translated(monkeypatch, capsys, folder, text: bytes, **settings) -> list[str]:
    """What train/translate.py writes for this standard input, by line."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    made = {"lengths": (8, 16), "batch_tokens": 2048, "beam": 2, "precision": "float32", **settings}
    translate.main(translate.Config(model_dir=str(folder), **made))
    output = capsys.readouterr().out
    assert output.endswith("\n") or not output
    return output.split("\n")[:-1]


def test_translating_the_validation_text_has_the_bleu_of_the_run(trained, monkeypatch, capsys):
    path, metrics, config = trained
    pairs = transformer.open_data(config)[1]["valid"]
    sources = [pairs.source_dictionary.symbols[i] for i in range(84)]
    rows = pairs.batch(np.arange(len(pairs)), (16, 16))["source"].tolist()
    lines = [" ".join(sources[token] for token in row if token > wmt.UNK) for row in rows]
    hypotheses = translated(monkeypatch, capsys, f"{path}/export", "\n".join(lines).encode())
    assert sacrebleu.corpus_bleu(hypotheses, [pairs.references()]).score == metrics["bleu"]


def test_lines_keep_their_order_whatever_is_in_them(trained, monkeypatch, capsys):
    folder = f"{trained[0]}/export"
    lines = ["w1 w2 w3", "", "w7 w7 w9 w30 w31 w1 w4 w22 w0", "w5 zebra w6", "w12 w13 w14 w15", "ü w3 w3 \u2028 w4"]
    forward = translated(monkeypatch, capsys, folder, "\n".join(lines).encode())
    backward = translated(monkeypatch, capsys, folder, ("\n".join(lines[::-1]) + "\n").encode())
    assert len(forward) == len(lines) and forward == backward[::-1]
    assert len(set(forward)) == len(lines)
    assert translated(monkeypatch, capsys, folder, b"") == []
    # As its users start it.
    command = [sys.executable, "-m", "train.translate", "text", "--model-dir", folder, "--precision", "float32"]
    process = subprocess.run(
        [*command, "--beam", "2"], input="\n".join(lines).encode(), capture_output=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.decode().split("\n") == [*forward, ""]


# ---- what the user can get wrong: one sentence, exit code 2, no traceback --------------------------------------------


def command(monkeypatch, capsys, *arguments, main=transformer.main, presets=transformer.PRESETS) -> tuple[int, str]:
    """Exit code and standard error of a script with these arguments."""
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.run(main, presets)
    return exit.value.code, capsys.readouterr().err


def assert_one_sentence(result, *words):
    code, error = result
    assert code == 2
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "Traceback" not in error, error
    for word in words:
        assert word in error, error


def write_folder(folder, languages=("en", "de"), words=(20, 20), size: int = 12, longest: int = 6) -> str:
    """A folder as fairseq-preprocess leaves it, with dictionaries of so many words."""
    os.makedirs(folder)
    rng = np.random.default_rng(0)
    for language, count in zip(languages, words, strict=True):
        dictionary = wmt.Dictionary([f"word{number}" for number in range(count)])
        dictionary.save(f"{folder}/dict.{language}.txt")
        for split in ("train", "valid"):
            sizes = rng.integers(2, longest + 1, size)
            tokens = rng.integers(4, len(dictionary), sizes.sum())
            tokens[np.cumsum(sizes) - 1] = wmt.EOS
            prefix = f"{folder}/{split}.{'-'.join(languages)}.{language}"
            wmt.write_mmap(prefix, tokens, sizes, len(dictionary))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lr", "-1"), ("--lr is -1.0", "at least 0")),
        (("--lr", "nan"), ("--lr is nan", "at least 0")),
        (("--updates", "0"), ("--updates is 0", "at least 1")),
        (("--update-every", "0"), ("--update-every is 0", "at least 1")),
        (("--warmup-updates", "0"), ("--warmup-updates is 0", "at least 1")),
        (("--beam", "0"), ("--beam is 0", "at least 1")),
        (("--keep", "0"), ("--keep is 0", "at least 1")),
        (("--workers", "-2"), ("--workers is -2", "at least -1")),
        (("--dropout", "1"), ("--dropout is 1.0", "below 1")),
        (("--label-smoothing", "-0.1"), ("--label-smoothing is -0.1", "below 1")),
        (("--lengths", "16", "8"), ("--lengths are (16, 8)", "must rise")),
        (("--lengths", "8", "8"), ("--lengths are (8, 8)", "must rise")),
        (("--lengths", "1", "8"), ("--lengths are (1, 8)", "between 2 and 1024")),
        (("--lengths", "8", "2000"), ("--lengths are (8, 2000)", "between 2 and 1024")),
        (("--lengths", "3"), ("16384", "3")),
        (("--data", ""), ("--data is missing", "make data", "synthetic")),
        (("--data", "/nowhere/at/all"), ("/nowhere/at/all", "make data")),
        (("--weights", "/nowhere/model.pt"), ("/nowhere/model.pt",)),
        (("--name", "a/b"), ("--name a/b", "--runs")),
    ],
)
def test_values_that_training_refuses(monkeypatch, capsys, tmp_path, arguments, words):
    assert_one_sentence(command(monkeypatch, capsys, "tiny", "--runs", tmp_path, *arguments), *words)


def test_two_dictionaries_cannot_share_their_embeddings(monkeypatch, capsys, tmp_path):
    folder = write_folder(tmp_path / "two", words=(20, 30))
    result = command(monkeypatch, capsys, "tiny", "--runs", tmp_path, "--data", folder)
    assert_one_sentence(result, folder, "two dictionaries", "--share-embeddings decoder")


def test_weights_of_another_dictionary_or_size(monkeypatch, capsys, tmp_path, trained):
    weights = f"{trained[0]}/export/model.pt"
    folder = write_folder(tmp_path / "other")
    arguments = ("tiny", "--runs", tmp_path, "--weights", weights, "--data")
    result = command(monkeypatch, capsys, *arguments, folder)
    assert_one_sentence(result, weights, "another dictionary", "84 words", "24")
    result = command(monkeypatch, capsys, *arguments, "synthetic", "--arch", "transformer_small")
    assert_one_sentence(result, weights, "does not fit the model")
    (tmp_path / "text.pt").write_text("no weights")
    result = command(monkeypatch, capsys, "tiny", "--runs", tmp_path, "--weights", tmp_path / "text.pt")
    assert_one_sentence(result, "text.pt", "not a fairseq checkpoint")


def test_other_values_for_the_same_name(monkeypatch, capsys, trained):
    _, _, config = trained
    arguments = ("tiny", *flags(replace(config, lr=0.1), transformer.TINY))
    assert_one_sentence(command(monkeypatch, capsys, *arguments), "lr was 0.004, now 0.1", "another --name")


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, capsys, tmp_path, few_pairs, no_evaluation):
    config = replace(SHORT, lengths=(16,), batch_tokens=1024, lr=1e30, warmup_updates=1, runs=str(tmp_path))
    with pytest.raises(InputError, match="loss is (nan|inf) at step .*the training diverged"):
        transformer.main(config)


def translation_error(monkeypatch, capsys, *arguments, text: bytes = b"w1 w2\n") -> tuple[int, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    presets = {"text": ("", translate.Config(precision="float32"))}
    return command(monkeypatch, capsys, "text", *arguments, main=translate.main, presets=presets)


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (b"w1 w2\n" + b"w3 " * 1030, (), ("sentence 2", "1031 tokens", "1024", "cut it")),
        (b"w1 w2\nw3 \xff w4\n", (), ("not UTF-8", "byte 9", "convert it")),
        (b"w1\n", ("--beam", "0"), ("--beam is 0", "at least 1")),
        (b"w1\n", ("--batch-tokens", "0"), ("--batch-tokens is 0", "at least 1")),
        (b"w1\n", ("--lengths", "0"), ("--lengths are (0,)", "at least 2")),
        (b"w1\n", ("--lengths", "64", "16"), ("--lengths are (64, 16)", "must rise")),
        (b"w1\n", ("--model-dir", ""), ("--model-dir is missing", "export")),
        (b"w1\n", ("--model-dir", "/nowhere/export"), ("/nowhere/export/model.pt",)),
    ],
)
def test_values_that_translation_refuses(monkeypatch, capsys, trained, text, arguments, words):
    model_dir = ("--model-dir", f"{trained[0]}/export") if "--model-dir" not in arguments else ()
    result = translation_error(monkeypatch, capsys, *model_dir, *arguments, text=text)
    assert_one_sentence(result, *words)


def test_an_export_with_another_dictionary_or_without_one(monkeypatch, capsys, trained, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(f"{trained[0]}/export", folder)
    for language in "wv":
        path = folder / f"dict.{language}.txt"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    result = translation_error(monkeypatch, capsys, "--model-dir", folder)
    assert_one_sentence(result, "model.pt", "another dictionary", "84 words", "83")
    os.remove(folder / "dict.w.txt")
    assert_one_sentence(translation_error(monkeypatch, capsys, "--model-dir", folder), "dict.w.txt")
