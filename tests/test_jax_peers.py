"""research/jax_peers.py: which of JAX's settings stands beside ours, and that its steps are lowered
for a TPU."""

import os
from unittest.mock import MagicMock

import pytest

from research import jax_peers
from tpu.compiler import analysis, hlo
from tpu.compiler.hlo_pb2 import HloModuleProto

NAME = "BERT-base pretraining, 512 tokens"


def report(rng: str, cycles: float) -> dict:
    """Returns the report of a step that fits."""
    return {
        "rng": rng,
        "fits": True,
        "cycles": cycles,
        "memory": {"needed": 2**30},
        "bytes_accessed": 2e9,
        "random_bytes": 1e9,
        "uncounted": {"bundles": 5e4},
        "libtpu": "0.0.51",
    }


TOO_LARGE = {"rng": "rbg", "fits": False, "needed": 20 * 2**30, "libtpu": "0.0.51"}


def page(jax: dict[str, dict]) -> str:
    """Returns the page of JAX's settings beside our two."""
    stock = {NAME: {"usual": report("", 9e6), "ours": report("", 2e6)}}
    return jax_peers.page({NAME: jax}, stock)


def test_the_quicker_setting_is_shown_and_both_are_named():
    quick = report("rbg", 4e6)
    slow = report("threefry2x32", 8e6)
    text = page({"threefry2x32": slow, "rbg": quick})
    assert f"| {NAME} | 32 | rbg | 9.0M | 4.0M | 2.0M | 0.51 | 0.05M |" in text
    not_compiled = "rbg, fusions not compiled, rbg, shared masks not compiled, "
    assert f"512 tokens threefry2x32 8.0, rbg 4.0, {not_compiled}" in text


def test_a_setting_that_fits_is_shown_before_one_that_does_not():
    text = page({"threefry2x32": report("threefry2x32", 8e6), "rbg": TOO_LARGE})
    assert "| threefry2x32 | 9.0M | 8.0M | 2.0M | 0.25 |" in text
    assert "rbg 20.00 GiB" in text


def test_a_step_that_does_not_fit_is_shown_with_its_memory():
    text = page({"rbg": TOO_LARGE})
    assert "| rbg | 9.0M | does not fit | 2.0M |  |" in text
    assert "| 1.00 | 20.00 | 1.00 |" in text


@pytest.mark.parametrize(
    ("setting", "asked"),
    [
        ("rbg", ""),
        ("rbg, fusions", jax_peers.backend.FUSIONS),
        ("rbg, vmem", "--xla_tpu_scoped_vmem_limit_kib=32768"),
    ],
)
def test_libtpu_is_asked_for_what_the_setting_says(setting, asked, monkeypatch):
    seen = []

    def lowered(*arguments):
        seen.append(arguments)
        return b""

    def figures(*_):
        seen.append(os.environ["LIBTPU_INIT_ARGS"])
        return {}

    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setattr(jax_peers, "lowered", lowered)
    monkeypatch.setattr(jax_peers, "libtpu", MagicMock(OutOfMemory=MemoryError))
    monkeypatch.setattr(jax_peers, "bundles", MagicMock())
    monkeypatch.setattr(jax_peers.report, "figures", figures)

    assert jax_peers.compile_one("bert", 2, setting)["fits"]
    assert seen == [("bert", 2, setting), asked]


@pytest.mark.skipif(not jax_peers.JAX.exists(), reason="needs JAX's environment: make jax")
@pytest.mark.parametrize("setting, draws", [("threefry2x32", False), ("rbg", True)])
def test_a_step_of_jax_donates_its_state_and_draws_as_asked(setting, draws):
    content = jax_peers.lowered("bert-glue", 2, setting)

    module = HloModuleProto.FromString(content)
    donated = {entry.parameter_number for entry in module.input_output_alias.entries}
    donated |= {entry.parameter_number for entry in module.buffer_donor.entries}
    assert len(donated) > 3 * 190  # 200 parameters and two moments of each
    assert (analysis.random_bytes(hlo.parse(content)) > 0) == draws
