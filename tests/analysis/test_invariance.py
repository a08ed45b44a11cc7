"""Changed images match the names of the changes; the measures agree with plain computations."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from analysis.cli import main
from analysis.features.invariance import changes
from analysis.output import hash_of
from pretrain.augment.augmentation import pixel_order
from pretrain.models.spec import MixerSpec
from tests.analysis.test_features import opened, plain_cka
from tests.conftest import Capture, Patch
from tests.errors import printed_errors
from tests.finetune.tiny import judge, model_of, normalized, write_folder

MIXER = MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=1, expansion=2)


def changed(kind: str, amount: float, direction: str, images: Tensor) -> Tensor:
    """Return the changed images, pixel by pixel."""
    size, out = images.shape[2], torch.zeros_like(images)
    if kind == "none":
        return images
    if kind == "permutation":
        return ordered(images, 0)
    if kind == "flip":
        back = list(range(size))[::-1]
        return images[..., back] if direction == "left to right" else images[:, :, back]
    down, right = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}[direction]
    for row, column in np.ndindex(size, size):
        source = row - down * int(amount), column - right * int(amount)
        if min(source) >= 0 and max(source) < size:
            out[:, :, row, column] = images[:, :, source[0], source[1]]
    return out


def ordered(images: Tensor, seed: int) -> Tensor:
    order = pixel_order(seed, size=images.shape[2])
    return images.flatten(2)[:, :, order].reshape(images.shape)


@pytest.mark.slow
def test_measures_are_those_of_a_plain_computation(
    tmp_path: Path, shapes: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr("finetune.evaluate.report.draw", lambda *words, **also: [])
    place, out = write_folder(tmp_path / "mixer", shapes, spec=MIXER), tmp_path / "out" / "found"
    permuted = write_folder(tmp_path / "ordered", shapes, spec=MIXER, pixel_permutation=4)
    words = ["--batch", "24", "--quick", "--views", "3", "--seeds", "2", "--device", "cpu", "--out"]
    assert main(["invariance", str(place), str(permuted), str(shapes), *words, str(out)]) == 0
    assert "shift by 8 px" in capsys.readouterr().out
    rows = pd.read_parquet(f"{out}.parquet")
    images, labels = normalized(place, shapes)
    batches = torch.from_numpy(np.random.default_rng(0).permutation(72)).split(24)
    for run in (place, permuted):
        model, own = model_of(run), rows[rows.run == str(run)]
        plain = ordered(images, 4) if run == permuted else images
        with torch.no_grad():
            usual = model(plain).argmax(1).numpy()
        first = own.iloc[0]
        assert (first.kind, first.agreement) == ("none", 1)
        assert first.cka.tolist() == pytest.approx([1, 1], abs=1e-12)
        # a shift by 16 would leave nothing of 16 pixels
        assert set(own.amount[own.kind == "shift"]) == {1, 2, 4, 8}
        for row in own[~own.kind.isin(["crop", "views"])].itertuples():
            inputs = changed(row.kind, row.amount, row.direction, images)
            inputs = ordered(inputs, 4) if run == permuted else inputs
            with torch.no_grad():
                predicted = model(inputs).argmax(1).numpy()
            expected = (predicted == labels).mean(), (predicted == usual).mean()
            # rounding may change one prediction
            assert (row.top1, row.agreement) == pytest.approx(expected, abs=1.5 / 72), row
            error = (row.top1 * (1 - row.top1) / 72) ** 0.5
            assert row.standard_error == pytest.approx(error)
            if row.direction in ("left", "upside down"):
                subject = opened(run, shapes)
                features = [
                    [subject.run(x[ids].double(), torch.clone)[1] for ids in batches]
                    for x in (plain, inputs)
                ]
                np.testing.assert_allclose(row.cka, plain_cka(*features).diagonal(), rtol=1e-3)
    views = rows[(rows.kind == "views") & (rows.run == str(place))]
    views = views.set_index(["amount", "seed"]).top1
    assert sorted(views.index) == [(amount, seed) for amount in (1, 2, 3) for seed in (0, 1)]
    for seed in (0, 1):
        result = judge(place, shapes, tmp_path / f"judged-{seed}", num_views=3, seed=seed)
        assert views[3, seed] == pytest.approx(result["eval/top1"], abs=1e-9)
    facts = json.loads((tmp_path / "out" / "found.json").read_text())
    assert set(facts["inputs"]) == {str(place), str(permuted), str(shapes)}
    assert facts["inputs"][str(shapes)] == hash_of(f"file://{shapes}")
    ends = (".json", ".parquet", ".png", ".svg", "-mixings.png", "-mixings.svg")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"found{end}" for end in ends}


def test_a_crop_is_the_middle_at_the_size_of_the_whole() -> None:
    whole = torch.linspace(0, 1, 20).expand(1, 3, 20, 20)  # a slope along the columns
    found = {each.amount: each.of(whole)[0, 0, 0] for each in changes(20) if each.kind == "crop"}
    assert sorted(found) == [0.5, 0.6, 0.7, 0.8, 0.9]
    for share, row in found.items():
        assert float(row.mean()) == pytest.approx(0.5, abs=1e-6)
        # the slope is flatter by this factor
        assert float(row[10] - row[9]) == pytest.approx(share / 19, rel=1e-4)
    assert {each.amount for each in changes(20) if each.kind == "shift"} == {*range(1, 17)}


def test_a_run_of_other_classes_fails(
    tmp_path: Path, shapes: Path, other_shapes: Path, capsys: Capture
) -> None:
    place = write_folder(tmp_path / "mixer", shapes, spec=MIXER)
    assert main(["invariance", str(place), str(other_shapes)]) == 2
    assert printed_errors(capsys.readouterr().err) == [("dataset", "mismatch")]
