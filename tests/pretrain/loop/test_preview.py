"""The preview shows a run's actual input images and labels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.images.sheet import CELL, HEAD, MARGIN
from data_prep.manifest import load_manifest
from pretrain.augment.augmentation import Prepared
from pretrain.cli import main
from pretrain.config import DataSettings
from pretrain.data.datasets import load_training_data
from pretrain.data.reader import open_split
from pretrain.tracking.pictures import labels_of
from tests.training import write_config

PLAIN = ("augment={flip_probability: 0}", "run_dir=runs/tiny")


def test_without_augmentation_it_shows_the_stored_pictures_in_the_order_of_the_epoch(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = write_config(tmp_path, dataset=shapes), tmp_path / "sheet.png"
    assert (
        main(["preview", str(config), *PLAIN, "--count", "4", "--epoch", "2", "--out", str(out)])
        == 0
    )
    assert f"{out}: 4 images" in capsys.readouterr().out
    sheet = np.asarray(Image.open(out))
    side = 16 * -(-CELL // 16)
    cell = sheet[MARGIN + HEAD : MARGIN + HEAD + side, MARGIN : MARGIN + side]
    shown = torch.from_numpy(cell[:: side // 16, :: side // 16].copy())

    data = load_training_data(DataSettings(dataset=str(shapes)))
    _, samples = data.order(seed=0, global_batch_size=16).locate(np.array([2 * 240]))
    stored = open_split(shapes, load_manifest(shapes), "train").images(samples)[0]
    assert torch.equal(shown, stored)


def test_mixed_labels_stand_with_their_shares() -> None:
    labels, others = torch.tensor([0, 1]), torch.tensor([1, 0])
    prepared = Prepared(torch.zeros(2, 3, 4, 4), labels, others, torch.tensor([0.7, 0.25]))
    assert labels_of(prepared, ("cat", "dog")) == ["70% cat\n30% dog", "25% dog\n75% cat"]
    assert labels_of(Prepared(torch.zeros(2, 3, 4, 4), labels), ("cat", "dog")) == ["cat", "dog"]
