"""Weights trained on permuted pixels are always used with this permutation. An MLP with equally
permuted first-layer columns gives the same outputs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.manifest import load_manifest
from data_prep.settings import load_settings
from finetune.cli import main
from finetune.predict.predict import Predictor
from finetune.tune.config import TuneSettings
from pretrain.augment.augmentation import pixel_order
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.data.loader import Batch
from pretrain.data.reader import open_split
from pretrain.models.build import build_model
from pretrain.models.presets import spec_of
from tests.conftest import Capture
from tests.errors import fails
from tests.finetune.tiny import CPU, feature_settings, judge, maker_of, predictions, write_folder

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def ordered(folder: Path, shapes: Path, tmp_path: Path) -> Path:
    """Return `folder` with permuted pixels and columns."""
    spec = Checkpoint.open(folder).card.model
    out = write_folder(tmp_path / "ordered", shapes, spec=spec, pixel_permutation=7)
    weights = load_file(out / "model.safetensors")
    columns = weights["stem.weight"].view(len(weights["stem.weight"]), 3, 256)
    weights["stem.weight"] = columns[:, :, pixel_order(7, size=16)].flatten(1).contiguous()
    save_file(weights, out / "model.safetensors")
    (out / "sha256.json").unlink(missing_ok=True)
    return out


def test_an_evaluation_a_prediction_and_features_are_those_of_the_weights_in_the_usual_order(
    folder: Path, ordered: Path, shapes: Path, tmp_path: Path
) -> None:
    for views in ({}, {"num_views": 3, "augment": {"crop_scale": (0.5, 1.0)}}):
        for name, place in (("usual", folder), ("ordered", ordered)):
            judge(place, shapes, tmp_path / f"{name}-{len(views)}", **views)
        usual, own = (
            predictions(tmp_path / f"{name}-{len(views)}") for name in ("usual", "ordered")
        )
        np.testing.assert_allclose(own["probabilities"], usual["probabilities"], rtol=1e-4)
    reader = open_split(shapes, load_manifest(shapes), "val")
    ids = np.arange(20)
    batch = Batch(reader.images(ids), torch.zeros(20, dtype=torch.long), ids, ids, ids)
    makers = [
        maker_of(feature_settings(shapes, tmp_path / place.name, place))
        for place in (folder, ordered)
    ]
    found = []
    for place, backbone in zip(
        (folder, ordered), (maker.backbone for maker in makers), strict=True
    ):
        images = backbone.augmentation(device=CPU).plain(batch).images_BCHW
        found.append([*Predictor.open(place).answer(batch), backbone.extract(images).detach()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    keys = [maker.cache.key("val", None) for maker in makers]
    assert keys[1] == keys[0] | {"model_sha256": keys[1]["model_sha256"]} != keys[0]


def test_tuning_goes_on_in_that_order_and_an_export_is_refused(
    ordered: Path, tmp_path: Path, capsys: Capture
) -> None:
    card = Checkpoint.open(ordered).card
    words = [
        f"pretrained={ordered}",
        "run_dir=x",
        "data.dataset=y",
        "train={duration: 1 step, global_batch_size: 2}",
    ]
    for more in ([], ["data.pixel_permutation=7"]):
        assert (
            load_settings(TuneSettings, path=None, overrides=[*words, *more])
            .as_training(card)
            .data.pixel_permutation
            == 7
        )
    with fails("mismatch", "data.pixel_permutation"):
        load_settings(
            TuneSettings, path=None, overrides=[*words, "data.pixel_permutation=8"]
        ).as_training(card)
    assert main(["export", str(ordered), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("finetune: pretrained: ")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_an_mlp_whose_first_columns_are_in_the_order_of_the_pixels_has_the_same_logits(
    dtype: torch.dtype, tolerance: float
) -> None:
    model = build_model(
        spec_of("mlp_b6_wi1024", width=32), num_classes=5, image_size=16, seed=0
    ).to(dtype)
    model.head.reset_parameters()  # type: ignore[operator]
    images, order = torch.randn(8, 3, 16, 16, dtype=dtype), pixel_order(3, size=16)
    with torch.no_grad():
        expected = model(images)
        stem = model.get_submodule("stem")
        stem.weight.copy_(stem.weight.view(32, 3, 256)[:, :, order].flatten(1))  # type: ignore[operator,union-attr]
        found = model(images.flatten(2)[:, :, order].view_as(images))
    assert float(expected.std()) > 0.01
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance
