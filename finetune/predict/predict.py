"""Any pictures in, a row for each out, in their order: the most probable classes, or why there is
none; the features, too.

A picture goes the way of those that the weights were trained on: it becomes the square that
`data_prep build` would have stored (`Predictor.squares`), and is fed as `finetune evaluate` feeds
it. Pictures of a dataset are squares already. Whatever they lie in, the loader's threads read and
decode them, and no more is held than one group of rows. The files appear whole or not at all. B
batch, T top classes.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from data_prep.images import MAX_PIXELS, ImageSpec, Rejection, convert, square
from data_prep.manifest import accuracy, baselines
from data_prep.pictures import Picture
from data_prep.progress import ProgressLine, progress
from data_prep.publish import atomic_file, make_directory
from data_prep.settings import printable
from finetune.predict.command import Input, pictures_in
from pretrain.augment.augmentation import Augmentation, Normalisation
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
    """A checkpoint that answers for pictures: in Python what `finetune predict` is in the shell."""

    checkpoint: Checkpoint
    model: ImageModel
    augmentation: Augmentation

    @classmethod
    def open(cls, place: Checkpoint | Path | str) -> "Predictor":
        checkpoint = place if isinstance(place, Checkpoint) else Checkpoint.open(place)
        card, device = checkpoint.card, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        augmentation = Augmentation(
            AugmentSettings().fed_as(card.fed_interpolation),
            seed=0,
            image_size=card.image_size,
            normalisation=Normalisation(card.channel_mean, card.channel_std),
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
        """What becomes of a picture first; where nobody knows how it was, the square in its
        centre."""
        card, size = self.card, self.card.stored_size or self.card.image_size
        crop, interpolation = (
            card.stored_crop or "center",
            card.stored_interpolation or card.fed_interpolation,
        )
        return ImageSpec(
            image_size=size, crop=crop, interpolation=interpolation, max_pixels=MAX_PIXELS
        )

    def batch(self, pictures: Iterable[Image.Image]) -> Batch:
        """Of pictures that are open already. (The command may decode a large JPEG at a fraction of
        its size, as `build` does.)"""
        squares = [square(each, self.squares) for each in pictures]
        ids = np.arange(len(squares))
        return Batch(
            torch.from_numpy(np.stack(squares)),
            torch.zeros(len(ids), dtype=torch.long),
            ids,
            ids,
            ids,
        )

    @torch.no_grad()
    def answer(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(logits, features): the features are what a linear probe sees."""
        with working_in("fp32"):
            found = self.model.forward_features(self.augmentation.plain(batch).images_BCHW)
            return self.model.forward_head(found), self.model.forward_head(found, pre_logits=True)


class PictureReader:
    """Pictures as the loader reads samples: by number, into a batch of squares."""

    is_remote, decodes = False, True

    def __init__(self, pictures: Sequence[Picture], spec: ImageSpec):
        self._pictures, self._spec, self._ended = pictures, spec, False
        self.num_samples, self.stored_size = len(pictures), spec.image_size

    def locate(self, ids: Ids) -> Places:
        nothing = np.zeros_like(ids)
        return Places(ids, nothing, nothing, nothing, nothing - 1)

    def read(self, places: Places, batch_BHWC: Tensor) -> list[Unreadable]:
        bad, batch = [], batch_BHWC.numpy()
        for place, number in enumerate([] if self._ended else places.ids.tolist()):
            picture = self._pictures[number]
            try:
                batch[place] = convert(picture.read(), self._spec).pixels
            except (Rejection, MemoryError) as error:
                bad.append(
                    Unreadable(
                        place,
                        number,
                        "",
                        picture.name,
                        str(error) or "memory ran out while it was decoded",
                    )
                )
            if self._ended:
                break
        return bad

    def names(self, ids: Ids) -> list[tuple[str, str]]:
        return [("", self._pictures[number].name) for number in ids.tolist()]

    def fetch_ahead(self, ids: Ids) -> None:
        """Nothing lies behind a network."""

    def end_waits(self) -> None:
        """Ctrl-C does not wait for the rest of a batch."""
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
    """The lines to print. `counts`: of the pictures in each input."""
    predictor, num_bad, labeled = Predictor.open(checkpoint), 0, Labeled(checkpoint.card.classes)
    with ExitStack() as opened:
        writers = [(path, opened.enter_context(_table(path))) for path in (out, features) if path]
        for each, count in zip(inputs, counts, strict=True):
            title = (
                f"{each.directory} {each.split}"
                if isinstance(each, Part)
                else f"{each[0]}{', ...' * (len(each) > 1)}"
            )
            with progress(title, total=count, unit="images") as line:
                for reader, folder in _readers(each, predictor):
                    number = 0
                    for rows in _rows(
                        reader,
                        folder,
                        predictor,
                        top=top,
                        with_features=features is not None,
                        line=line,
                    ):
                        labeled.add(
                            labels_of(reader, np.arange(number, number := number + len(rows))),
                            rows["class"].to_pylist(),
                        )
                        for path, write in writers:
                            write(
                                rows.drop_columns("features")
                                if path is out
                                else rows.select(["picture", "features", "error"])
                            )
                        num_bad += len(rows) - rows["error"].null_count
    bad = f"; {num_bad:,} of them do not decode, see the column error" if num_bad else ""
    return [*(f"{path}: {sum(counts):,} pictures{bad}" for path, _ in writers), *labeled.in_words()]


class Labeled:
    """The accuracy on the images whose class is known. K classes of the model."""

    def __init__(self, classes: Sequence[str]):
        self._numbers = {name: number for number, name in enumerate(classes)}
        self._right_K, self._count_K = np.zeros((2, len(classes)), np.int64)
        self._num_unlabeled = 0

    def add(self, labels: Iterable[str], predictions: Iterable[str | None]) -> None:
        """A prediction is None if its image does not decode."""
        for label, prediction in zip(labels, predictions, strict=True):
            number = self._numbers.get(label)
            if number is None:
                self._num_unlabeled += 1
            elif prediction is not None:
                self._count_K[number] += 1
                self._right_K[number] += label == prediction

    def in_words(self) -> list[str]:
        """Return one line, or no line for fewer than two labeled images."""
        right_K, count_K, total = self._right_K, self._count_K, int(self._count_K.sum())
        if total < 2:
            return []
        is_there_K, are_unequal = count_K > 0, len(set(count_K.tolist())) > 1
        class_mean = (
            float((right_K[is_there_K] / count_K[is_there_K]).mean()) if are_unequal else None
        )
        guessed = baselines(len(count_K), count_K.max() / total if are_unequal else None)
        others = (
            f"; {self._num_unlabeled:,} more have no class of the model as their folder"
            if self._num_unlabeled
            else ""
        )
        return [
            f"{accuracy(right_K.sum() / total, class_mean)} of {total:,} labeled images"
            f" ({guessed}){others}"
        ]


def labels_of(reader: Reader, ids: Ids) -> list[str]:
    """Return the class names of images: the labels of a dataset, otherwise the names of the images'
    folders."""
    if isinstance(reader, ShardReader):
        classes = (*reader.parts[0].manifest.classes, "")  # -1: without a label
        return [classes[label] for label in reader.locate(ids).labels.tolist()]
    return [Path(name).parent.name for _, name in reader.names(ids)]


def _readers(each: Input, predictor: Predictor) -> Iterator[tuple[Reader, str]]:
    """With what stands before the names of their pictures. A folder may hold any number, so they
    come in groups."""
    if isinstance(each, Part):
        with reading(
            [each],
            ReadingSettings(dataset=str(each.directory)),
            image_size=predictor.card.image_size,
        ) as reader:
            yield reader, f"{each.directory}/"
        return
    found = chain.from_iterable(map(pictures_in, each))
    while group := list(islice(found, ROWS_PER_GROUP)):
        yield PictureReader(group, predictor.squares), ""


def _rows(
    reader: Reader,
    folder: str,
    predictor: Predictor,
    *,
    top: int,
    with_features: bool,
    line: ProgressLine,
) -> Iterator[pa.Table]:
    """Of all that the reader has."""
    reasons: dict[int, str] = {}

    def note(bad: Sequence[Unreadable], ids: Ids, images_BHWC: Tensor) -> Ids:
        reasons.update((each.sample, each.reason) for each in bad)
        return masked(bad, ids, images_BHWC)

    count, held, first, end = reader.num_samples, list[tuple[Tensor, ...]](), 0, 0
    size = -(
        -count // -(-count // BATCH_SIZE)
    )  # batches alike, for the last one would be filled up
    alone = read_alone()
    device = predictor.augmentation.device
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
            tops_BT = logits_BK.topk(
                top, dim=1
            ).indices  # by logits, as `finetune evaluate` ranks them
            chances_BT = logits_BK.float().softmax(dim=1).gather(1, tops_BT)
            held.append(
                (tops_BT, chances_BT, features_BD if with_features else features_BD[:, :0].clone())
            )
            before, end = end, min(end + size, count)
            line.advance(end - before)
            if end == count or end - first >= ROWS_PER_GROUP:
                ids, columns = (
                    np.arange(first, end),
                    [torch.cat(column)[: end - first].cpu() for column in zip(*held, strict=True)],
                )
                names = [printable(folder + name) for _, name in reader.names(ids)]
                yield _as_table(
                    names,
                    [reasons.pop(number, None) for number in ids.tolist()],
                    columns,
                    predictor.card.classes,
                )
                held, first = [], end


def _as_table(
    names: list[str], reasons: list[str | None], answers: Sequence[Tensor], classes: Sequence[str]
) -> pa.Table:
    tops_BT, chances_BT, features_BD = answers
    bad, words = (
        np.array([reason is not None for reason in reasons]),
        pa.array(classes, pa.string()),
    )
    columns = {"picture": pa.array(names, pa.string())}
    for place, (tops_B, chances_B) in enumerate(
        zip(tops_BT.T.numpy(), chances_BT.T.double().numpy(), strict=True), 1
    ):
        ending = f"_{place}" if place > 1 else ""
        columns[f"class{ending}"] = words.take(pa.array(tops_B, mask=bad))
        columns[f"probability{ending}"] = pa.array(chances_B.round(6), mask=bad)
    ends = np.cumsum([0, *np.where(bad, 0, features_BD.shape[1])])
    values = features_BD.float().numpy()[~bad].ravel()
    columns["features"] = pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()), values, mask=pa.array(bad)
    )
    return pa.table(columns | {"error": pa.array(reasons, pa.string())})


@contextmanager
def _table(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """What appends rows to a table; the file is there once the block ends well."""
    make_directory(path.parent)
    with atomic_file(path) as file, ExitStack() as opened:
        writers: list[Any] = []

        def write(rows: pa.Table) -> None:
            if not writers and path.suffix == ".parquet":
                writers.append(opened.enter_context(pq.ParquetWriter(file, rows.schema)))
            elif not writers:
                text = io.TextIOWrapper(file, "utf-8", newline="")
                opened.callback(text.detach)
                writers.append(csv.writer(text, lineterminator="\n"))
                writers[0].writerow(rows.column_names)
            if path.suffix == ".parquet":
                writers[0].write_table(rows)
            else:
                writers[0].writerows(
                    zip(*(column.to_pylist() for column in rows.columns), strict=True)
                )

        yield write
