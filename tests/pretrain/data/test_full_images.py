"""`crop=full`: evaluation and random crops use the original shape of the stored squares, like timm
on the original files."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import create_transform

from data_prep.images import ImageSpec, convert
from data_prep.images.jpeg import aspects_of
from data_prep.manifest import load_manifest
from finetune.predict.predict import Predictor
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.config import AugmentSettings, PixelOrder
from pretrain.data.datasets import Part
from pretrain.data.loader import evaluation_batches
from pretrain.data.reader import ShardReader
from pretrain.ranks.world import read_alone
from tests.conftest import Capture
from tests.data_prep.samples import build, encoded, write_files
from tests.errors import printed_errors
from tests.finetune.tiny import write_folder
from tests.pretrain.augment.pictures import make

SHAPES = [(240, 180), (180, 240), (300, 120), (200, 200), (90, 320)]
TURNED = 0x0112, 6


def smooth(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image files, the third rotated by EXIF."""
    pictures = {}
    for number, (width, height) in enumerate(SHAPES):
        exif = Image.Exif()
        if number == 2:
            exif[TURNED[0]] = TURNED[1]
        image = encoded(smooth(width, height), quality=98, exif=exif)
        pictures[f"{'ab'[number % 2]}/{number}.jpg"] = image
    return write_files(tmp_path_factory.mktemp("files"), pictures)


def upright(path: Path) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(path))


@pytest.fixture(scope="module")
def dataset(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "full"
    assert build(files, out, "image_size=320", "crop=full", "encoding=jpeg") == 0
    return out


@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_evaluation_sees_what_timm_sees_of_the_files(
    files: Path, dataset: Path, crop_pct: float
) -> None:
    paths = sorted(files.rglob("*.jpg"), key=lambda path: str(path.relative_to(files)))
    timms = create_transform(56, is_training=False, crop_pct=crop_pct, interpolation="bicubic")
    expected = torch.stack([timms(upright(path)) for path in paths])
    normalization = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    augmentation = Augmentation(
        AugmentSettings(crop_interpolation="bicubic", eval_crop=crop_pct),
        seed=0,
        image_size=56,
        normalization=normalization,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    reader = ShardReader([Part(dataset, load_manifest(dataset), "train")])
    with evaluation_batches(reader, local_batch_size=5, world=read_alone()) as batches:
        (batch,) = batches
    keys = [key for _, key in reader.names(np.arange(5))]
    order = [keys.index(str(path.relative_to(files))) for path in paths]
    found = augmentation.plain(batch).images_BCHW[order]
    assert (found - expected).abs().mean() < 0.02  # in standard deviations
    without = augmentation.plain(
        type(batch)(batch.images_BHWC, batch.labels_B, *[batch.epochs] * 3)
    ).images_BCHW[order]
    assert (without - expected).abs().mean() > 0.2


@pytest.mark.parametrize("eval_crop", [None, 0.5])
def test_images_are_cropped_once_before_their_pixels_are_permuted(
    dataset: Path, eval_crop: float | None
) -> None:
    settings = AugmentSettings(flip_probability=0, eval_crop=eval_crop)
    reader = ShardReader([Part(dataset, load_manifest(dataset), "train")])
    with evaluation_batches(reader, local_batch_size=5, world=read_alone()) as batches:
        (batch,) = batches
    order = PixelOrder(pixel_permutation=0, permute="before")
    trained = make(settings, size=56, pixels=order).prepare(batch).images_BCHW
    complete = settings.model_copy(update={"eval_crop": None})
    evaluated = make(complete, size=56, pixels=order).plain(batch).images_BCHW
    assert (trained - evaluated).abs().max() <= 1  # of 255 levels


def test_predictions_on_files_and_on_shards_agree(
    files: Path, dataset: Path, shapes: Path, tmp_path: Path
) -> None:
    weights = write_folder(
        tmp_path / "weights", shapes, stored_crop="full", stored_size=320, eval_crop=0.5
    )
    predictor = Predictor.open(weights)
    reader = ShardReader([Part(dataset, load_manifest(dataset), "train")])
    with evaluation_batches(reader, local_batch_size=5, world=read_alone()) as batches:
        (batch,) = batches
    names = [key for _, key in reader.names(np.arange(5))]
    opened = predictor.batch(upright(files / name) for name in names)
    ours, theirs = (predictor.augmentation.plain(each).images_BCHW for each in (batch, opened))
    assert (ours - theirs).abs().mean() < 0.02


@pytest.mark.parametrize(("width", "height"), [*SHAPES, (3000, 400), (7, 5)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_the_shape_survives_drafts_and_turns(width: int, height: int, orientation: int) -> None:
    exif = Image.Exif()
    exif[TURNED[0]] = orientation
    data = encoded(smooth(width, height), exif=exif)
    spec = ImageSpec(image_size=24, crop="full", encoding="jpeg")
    stored = np.frombuffer(convert(data, spec).data, np.uint8)
    (aspect,) = aspects_of(stored, np.zeros(1, np.int64))
    expected = width / height if orientation == 1 else height / width
    assert aspect == pytest.approx(expected, rel=1e-3)
    assert Image.open(io.BytesIO(stored.tobytes())).size == (24, 24)


@pytest.mark.parametrize("encoding", ["raw", "keep"])
def test_other_encodings_have_no_place_for_the_shape(
    encoding: str, files: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert build(files, tmp_path / "out", "crop=full", f"encoding={encoding}") == 2
    assert printed_errors(capsys.readouterr().err) == [("crop", "conflict")]
