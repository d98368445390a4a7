"""What nothing else runs of the benches still works: one of them whole, on a few small pictures."""

import json

import pytest
from image_files import save
from model_helpers import GOLDEN

from bench import input_pipeline, transformer_fairseq
from errors import InputError
from train import translate


@pytest.mark.slow
def test_input_pipeline_measures_every_contender(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for number in range(4):
                save(tmp_path / split / name / f"{number}.jpg")
    out = tmp_path / "figures.json"

    options = input_pipeline.Options(
        data=str(tmp_path),
        image_size=32,
        batch_size=4,
        batches=2,
        rounds=1,
        workers=1,
        out=str(out),
    )
    rates = input_pipeline.main(options)

    contenders = ["ours, host", "ours, strong", "ours, device", "reference"]
    contenders += ["limit, our decode and resize", "limit, Pillow"]
    assert list(rates) == contenders
    assert all(rate > 0 for (rate,) in rates.values())
    assert json.loads(out.read_text())["images_per_second"] == rates


def test_a_kept_checkpoint_of_fairseq_is_one_to_translate_with(tmp_path):
    data = str(GOLDEN / "joint")
    options = transformer_fairseq.Options(data=data, keep=str(tmp_path / "kept"))

    transformer_fairseq.keep_checkpoint(GOLDEN / "trained.pt", options, seed=1)

    folder = tmp_path / "kept/seed-1"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["dict.de.txt", "dict.en.txt", "model.pt"]
    assert translate.read_export(str(folder)).settings["encoder_embed_dim"] == 32
    # Which the checkpoint then says; make translate needs it.
    command = " ".join(transformer_fairseq.fairseq(options, "folder", 1, data))
    assert "--source-lang en --target-lang de" in command


def test_without_fairseqs_side_no_checkpoint_can_be_kept():
    options = transformer_fairseq.Options(data="/nowhere", sides=("ours",), keep="kept")
    with pytest.raises(InputError, match="--keep is kept.*--sides has no fairseq; leave one out"):
        transformer_fairseq.main(options)
