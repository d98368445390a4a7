"""A bench that nothing else runs still works: on a few small pictures, once."""

import json

import pytest
from image_files import save

from bench import input_pipeline


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

    contenders = ["ours, host", "ours, device", "reference"]
    contenders += ["limit, our decode and resize", "limit, Pillow"]
    assert list(rates) == contenders
    assert all(rate > 0 for (rate,) in rates.values())
    assert json.loads(out.read_text())["images_per_second"] == rates
