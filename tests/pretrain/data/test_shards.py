"""Reading by number: equal to an independent decode of the tar, for every encoding; damage is one clear error."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli import main as data_prep
from data_prep.manifest import DatasetError, load_manifest
from pretrain.data.reader import open_split
from tests.data_prep.samples import replace_index


def decoded(directory: Path, split: str) -> tuple[np.ndarray, list[int]]:
    """Every sample in file order, by tarfile and PIL alone."""
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
def test_random_access_equals_an_independent_decode(shapes: Path, tmp_path: Path, encoding: str) -> None:
    directory = tmp_path / encoding
    source = ["--source", "folder", f"source.path={shapes}-images"]
    assert data_prep(["build", *source, f"out={directory}", "image_size=16", f"encoding={encoding}", "samples_per_shard=50"]) == 0
    images, labels = decoded(directory, "train")
    assert len(images) == 240
    reader = open_split(directory, load_manifest(directory), "train")
    assert reader.labels.tolist() == labels
    for ids in (np.arange(240), np.random.Generator(np.random.Philox(1)).permutation(240)[:77], np.array([3, 3, 239, 0])):
        assert torch.equal(reader.images(ids), torch.from_numpy(images[ids]))


def test_a_keep_dataset_is_resized_while_reading(shapes: Path, tmp_path: Path) -> None:
    directory = tmp_path / "keep"
    assert data_prep(["build", "--source", "folder", f"source.path={shapes}-images", f"out={directory}", "encoding=keep"]) == 0
    reader = open_split(directory, load_manifest(directory), "val", image_size=24)
    assert reader.images(np.arange(5)).shape == (5, 24, 24, 3)


def test_a_cut_shard_is_refused_before_training(shapes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shapes, copy)
    shard = sorted(copy.glob("train-*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:-512])
    with pytest.raises(DatasetError, match="was cut or changed"):
        open_split(copy, load_manifest(copy), "train")


def test_an_unfinished_dataset_says_so(shapes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shapes, copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(DatasetError, match="is unfinished; run its data_prep build again"):
        load_manifest(copy)


@pytest.mark.parametrize("label", [-1, 8, 1 << 40])
def test_a_label_beyond_the_classes_is_refused(shapes: Path, tmp_path: Path, label: int) -> None:
    """In a mixture it would be a class of the next dataset, and on a GPU the end of the process."""
    directory = tmp_path / "copy"
    shutil.copytree(shapes, directory)
    index = np.load(directory / "train-000000.npy")
    index[5, 2] = label
    replace_index(directory, index)
    manifest = load_manifest(directory)
    with pytest.raises(DatasetError, match="has labels beyond the 8 classes of the manifest; run data_prep verify"):
        open_split(directory, manifest, "train").images(np.arange(1))


def test_an_index_stored_by_columns_is_refused(shapes: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(shapes, directory)
    replace_index(directory, np.asfortranarray(np.load(directory / "train-000000.npy")))
    manifest = load_manifest(directory)
    with pytest.raises(DatasetError, match="row by row; run data_prep verify"):
        open_split(directory, manifest, "train").images(np.arange(1))


@pytest.mark.parametrize("offset", [-512, 1 << 30])
def test_an_index_that_leads_out_of_its_shard_is_refused(shapes: Path, tmp_path: Path, offset: int) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(shapes, directory)
    index = np.load(directory / "train-000000.npy")
    index[-1, 0] = offset
    replace_index(directory, index)
    manifest = load_manifest(directory)
    reader = open_split(directory, manifest, "train")
    with pytest.raises(DatasetError, match="its index leads out of the shard"):
        reader.images(np.arange(1))
