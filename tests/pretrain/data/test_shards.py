"""Reading by number equals an independent decode of the tar for every encoding. Damage is a
one-line error."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.manifest import DatasetError, load_manifest
from tests.data_prep.samples import replace_index
from tests.errors import fails
from tests.pretrain.data.tiny import opened, packed


def decoded(directory: Path, split: str) -> tuple[np.ndarray, list[int]]:
    """Return every sample in file order, read by tarfile and PIL only."""
    images, labels = [], []
    for path in sorted(directory.glob(f"{split}-*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                body = archive.extractfile(member)
                assert body is not None
                if member.name.endswith(".cls"):
                    labels.append(int(body.read()))
                elif not member.name.endswith(".json"):
                    images.append(np.asarray(Image.open(io.BytesIO(body.read())).convert("RGB")))
    return np.stack(images), labels


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_random_access_equals_an_independent_decode(
    shapes: Path, tmp_path: Path, encoding: str
) -> None:
    directory = packed(
        f"{shapes}-images", tmp_path / encoding, f"encoding={encoding}", "samples_per_shard=50"
    )
    images, labels = decoded(directory, "train")
    assert len(images) == 240
    reader = opened(directory)
    assert reader.labels.tolist() == labels
    for ids in (
        np.arange(240),
        np.random.Generator(np.random.Philox(1)).permutation(240)[:77],
        np.array([3, 3, 239, 0]),
    ):
        assert torch.equal(reader.images(ids), torch.from_numpy(images[ids]))


def test_a_keep_dataset_is_resized_while_reading(shapes: Path, tmp_path: Path) -> None:
    reader = opened(
        packed(f"{shapes}-images", tmp_path / "keep", "encoding=keep"), "val", image_size=24
    )
    assert reader.images(np.arange(5)).shape == (5, 24, 24, 3)


@pytest.fixture
def copy(shapes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shapes, tmp_path / "copy"))


def test_a_cut_shard_is_refused_before_training_and_an_unfinished_dataset_says_so(
    copy: Path,
) -> None:
    shard = sorted(copy.glob("train-*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:-512])
    with fails("damaged", str(shard)):
        opened(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(DatasetError):
        load_manifest(copy)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        # in a mixture the label would be a class of the next dataset; on a GPU it would end the
        # process
        *(((5, 2), label) for label in (-1, 8, 1 << 40)),
        *(((-1, 0), offset) for offset in (-512, 1 << 30)),
        (None, 0),  # the columns are stored one after the other
    ],
)
def test_an_index_that_would_lead_astray_is_refused(
    copy: Path, place: tuple[int, int] | None, value: int
) -> None:
    index = np.load(copy / "train-000000.npy")
    if place is None:
        index = np.asfortranarray(index)
    else:
        index[place] = value
    replace_index(copy, index)
    with pytest.raises(DatasetError, match=r"train-000000\.npy"):
        opened(copy).images(np.arange(1))
