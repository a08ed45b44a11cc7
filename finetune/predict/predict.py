"""Predict images and write one row for each image, in order. A row has the most probable classes,
or the reason why the image does not decode. On request, a second file has the features.

An image becomes the square that `data_prep build` would have stored, and is resized as in `finetune
evaluate`. Files are written atomically. Memory holds one group of rows. Shapes: B batch, K
classes, T top classes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from data_prep.images import MAX_PIXELS, ImageSpec, Rejection, convert, square
from data_prep.manifest import accuracy, baselines
from data_prep.pictures import Picture
from data_prep.progress import ProgressLine
from data_prep.publish import atomic_file, make_directory
from data_prep.settings import printable
from finetune.predict.command import Input, pictures_in
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.augment.feed import on_device
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.config import AugmentSettings, ReadingSettings
from pretrain.data.bad_samples import masked
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch, Reader, evaluation_batches
from pretrain.data.order import Ids
from pretrain.data.reader import Places, ShardReader, Unreadable, reading
from pretrain.engine.step import working_in
from pretrain.models.image_model import ImageModel
from pretrain.ranks.world import read_alone

BATCH_SIZE, ROWS_PER_GROUP = 256, 8192


@dataclass(frozen=True)
class Predictor:
    """Predict images from Python with a checkpoint, as `finetune predict` does in a shell."""

    checkpoint: Checkpoint
    model: ImageModel
    augmentation: Augmentation

    @classmethod
    def open(cls, place: Checkpoint | Path | str) -> "Predictor":
        checkpoint = place if isinstance(place, Checkpoint) else Checkpoint.open(place)
        card, device = checkpoint.card, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        augmentation = Augmentation(
            AugmentSettings().fed_as(card.fed_interpolation, card.eval_crop),
            seed=0,
            image_size=card.image_size,
            normalization=Normalization(card.channel_mean, card.channel_std),
            device=device,
            dtype=torch.float32,
            pixels=card,
        )
        return cls(checkpoint, load_model(checkpoint).to(device).eval(), augmentation)

    @property
    def card(self) -> ModelCard:
        return self.checkpoint.card

    @property
    def squares(self) -> ImageSpec:
        """Crop, size and filter that make an image square. `center` replaces an unknown crop and
        `full`, because evaluation uses only the center of such images."""
        card = self.card
        return ImageSpec(
            image_size=card.stored_size or card.image_size,
            crop="center" if card.stored_crop in (None, "full") else card.stored_crop,
            interpolation=card.stored_interpolation or card.fed_interpolation,
            max_pixels=MAX_PIXELS,
        )

    def batch(self, pictures: Iterable[Image.Image]) -> Batch:
        """Return a batch of PIL images. Pixels can differ from `finetune predict`, which may decode
        a JPEG at a smaller size."""
        squares = [square(each, self.squares) for each in pictures]
        ids = np.arange(len(squares))
        labels = torch.zeros(len(ids), dtype=torch.long)
        return Batch(torch.from_numpy(np.stack(squares)), labels, ids, ids, ids)

    @torch.no_grad()
    def answer(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (logits, features). The features are the input of a linear probe."""
        with working_in("fp32"):
            found = self.model.forward_features(self.augmentation.plain(batch).images_BCHW)
            return self.model.forward_head(found), self.model.forward_head(found, pre_logits=True)


class PictureReader:
    """Reader of image files with the interface of ShardReader. It reads images by number into a
    batch of squares."""

    is_remote, decodes = False, True

    def __init__(self, pictures: Sequence[Picture], spec: ImageSpec):
        self._pictures, self._spec, self._ended = pictures, spec, False
        self.num_samples, self.stored_size = len(pictures), spec.image_size

    def locate(self, ids: Ids) -> Places:
        nothing = np.zeros_like(ids)
        return Places(ids, nothing, nothing, nothing, nothing - 1)

    def read(self, places: Places, batch_BHWC: Tensor) -> list[Unreadable]:
        bad, batch = [], batch_BHWC.numpy()
        for place, number in enumerate(places.ids.tolist()):
            if self._ended:
                break
            picture = self._pictures[number]
            try:
                batch[place] = convert(picture.read(), self._spec).pixels
            except (Rejection, MemoryError) as error:
                reason = str(error) or "memory ran out during decoding"
                bad.append(Unreadable(place, number, "", picture.name, reason))
        return bad

    def aspects(self, places: Places) -> None:
        """Do nothing, because all images are squares."""

    def names(self, ids: Ids) -> list[tuple[str, str]]:
        return [("", self._pictures[number].name) for number in ids.tolist()]

    def fetch_ahead(self, ids: Ids) -> None:
        """Do nothing, because all images are local."""

    def end_waits(self) -> None:
        """Stop reading, so that Ctrl-C does not wait for the rest of a batch."""
        self._ended = True


def predict(
    checkpoint: Checkpoint,
    inputs: Sequence[Input],
    counts: Sequence[int],
    *,
    top: int,
    out: Path | None,
    features: Path | None,
) -> list[str]:
    """Predict all images, write `out` and `features`, and return the lines to print. `counts`:
    number of images of each input."""
    predictor, pairs, num_bad = Predictor.open(checkpoint), Counter[tuple[str, str | None]](), 0
    with ExitStack() as opened:
        writers: list[tuple[Path, pa.Schema, Any]] = []
        for path in filter(None, (out, features)):
            schema = _schema(top, features=path is features)
            make_directory(path.parent)
            file = opened.enter_context(atomic_file(path))
            kind = pc.CSVWriter if path.suffix == ".csv" else pq.ParquetWriter
            writers.append((path, schema, opened.enter_context(kind(file, schema))))
        for each, count in zip(inputs, counts, strict=True):
            title = f"{each.directory} {each.split}" if isinstance(each, Part) else str(each[0])
            with ProgressLine(title, total=count, unit="images") as line:
                for reader, folder in _readers(each, predictor):
                    for rows in _rows(
                        reader,
                        folder,
                        predictor,
                        top,
                        with_features=features is not None,
                        line=line,
                    ):
                        columns = (rows["label"].to_pylist(), rows["class"].to_pylist())
                        pairs.update(zip(*columns, strict=True))
                        num_bad += len(rows) - rows["error"].null_count
                        for _, schema, writer in writers:
                            writer.write_table(rows.select(schema.names))
    bad = f"; {num_bad:,} of them do not decode, see the column error" if num_bad else ""
    lines = [f"{path}: {sum(counts):,} images{bad}" for path, *_ in writers]
    return [*lines, *accuracy_of(pairs, checkpoint.card.classes)]


def _schema(top: int, *, features: bool) -> pa.Schema:
    columns = [("image", pa.string())]
    for place in range(0 if features else top):
        ending = f"_{place + 1}" if place else ""
        columns += [(f"class{ending}", pa.string()), (f"probability{ending}", pa.float64())]
    columns += [("features", pa.list_(pa.float32()))] if features else []
    return pa.schema([*columns, ("error", pa.string())])


def accuracy_of(pairs: Counter[tuple[str, str | None]], classes: Sequence[str]) -> list[str]:
    """Return a line with the accuracy on labeled images, or no line if there are fewer than two.

    `pairs`: counts of (label, prediction). The prediction is None if an image does not decode.
    """
    known, right, count = set(classes), Counter[str](), Counter[str]()
    for (label, prediction), number in pairs.items():
        if label in known and prediction is not None:
            count[label] += number
            right[label] += number * (label == prediction)
    total = count.total()
    if total < 2:
        return []
    largest = class_mean = None
    if len({count[name] for name in classes}) > 1:
        largest = max(count.values()) / total
        class_mean = sum(right[name] / count[name] for name in count) / len(count)
    num_others = sum(number for (label, _), number in pairs.items() if label not in known)
    others = f"; {num_others:,} more are of other classes than the model's" * bool(num_others)
    guessed = baselines(len(classes), largest)
    return [
        f"{accuracy(right.total() / total, class_mean)} of {total:,} labeled images"
        f" ({guessed}){others}"
    ]


def _labels_of(reader: Reader, ids: Ids) -> list[str]:
    """Return the labels of a dataset's images, or the folder names of other images."""
    if isinstance(reader, ShardReader):
        classes = (*reader.parts[0].manifest.classes, "")  # -1: without a label
        return [classes[label] for label in reader.locate(ids).labels.tolist()]
    return [Path(name).parent.name for _, name in reader.names(ids)]


def _readers(each: Input, predictor: Predictor) -> Iterator[tuple[Reader, str]]:
    """Yield (reader, prefix of the image names) for an input. Image files are read in groups."""
    if isinstance(each, Part):
        settings = ReadingSettings(dataset=str(each.directory))
        with reading([each], settings, image_size=predictor.card.image_size) as reader:
            yield reader, f"{each.directory}/"
        return
    found = chain.from_iterable(map(pictures_in, each))
    while group := list(islice(found, ROWS_PER_GROUP)):
        yield PictureReader(group, predictor.squares), ""


def _rows(
    reader: Reader,
    folder: str,
    predictor: Predictor,
    top: int,
    *,
    with_features: bool,
    line: ProgressLine,
) -> Iterator[pa.Table]:
    """Yield the rows of all images of the reader, in groups."""
    reasons: dict[int, str] = {}

    def note(bad: Sequence[Unreadable], ids: Ids, images_BHWC: Tensor) -> Ids:
        reasons.update((each.sample, each.reason) for each in bad)
        return masked(bad, ids, images_BHWC)

    count, device, alone = reader.num_samples, predictor.augmentation.device, read_alone()
    size = -(-count // -(-count // BATCH_SIZE))  # equal batches need little padding
    held, first, end = list[tuple[Tensor, ...]](), 0, 0
    with (
        evaluation_batches(
            reader,
            local_batch_size=size,
            world=alone,
            num_threads=alone.num_cores,
            pin=device.type == "cuda",
            on_bad=note,
        ) as stored,
        on_device(stored, device) as batches,
    ):
        for batch in batches:
            logits_BK, features_BD = predictor.answer(batch)
            tops_BT = logits_BK.topk(top, dim=1).indices  # as `finetune evaluate` ranks them
            chances_BT = logits_BK.float().softmax(dim=1).gather(1, tops_BT)
            held.append(
                (tops_BT, chances_BT, features_BD[:, : None if with_features else 0].clone())
            )
            line.advance(min(end + size, count) - end)
            end = min(end + size, count)
            if end < count and end - first < ROWS_PER_GROUP:
                continue
            ids = np.arange(first, end)
            tops, chances, features = (
                torch.cat(column)[: len(ids)].cpu() for column in zip(*held, strict=True)
            )
            errors = [reasons.pop(number, None) for number in ids.tolist()]
            is_bad = np.array([each is not None for each in errors])
            words = pa.array(predictor.card.classes)
            ends = np.cumsum([0, *np.where(is_bad, 0, features.shape[1])])
            columns = {
                "image": [printable(folder + name) for _, name in reader.names(ids)],
                "label": _labels_of(reader, ids),
                "features": pa.ListArray.from_arrays(
                    pa.array(ends, pa.int32()),
                    features.float().numpy()[~is_bad].ravel(),
                    mask=pa.array(is_bad),
                ),
                "error": pa.array(errors, pa.string()),
            }
            for place in range(top):
                ending = f"_{place + 1}" if place else ""
                columns[f"class{ending}"] = words.take(
                    pa.array(tops[:, place].numpy(), mask=is_bad)
                )
                probabilities = chances[:, place].double().numpy().round(6)
                columns[f"probability{ending}"] = pa.array(probabilities, mask=is_bad)
            yield pa.table(columns)
            held, first = [], end
