"""The files of an evaluation that hold a row for each picture, class or pair of classes; each appears whole.

predictions.parquet   a row per picture that decodes, in the split's order
per_class.csv         a row per class of the dataset, the worst first
confusion.parquet     (label, answer, count), where the count is not 0
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.publish import atomic_file, write_atomic
from finetune.evaluate.answers import Answers, Floats
from finetune.evaluate.scoring import Confusion, PerClass
from pretrain.data.order import Ids
from pretrain.data.reader import ShardReader
from pretrain.ranks.hangs import PROGRESS

PREDICTIONS, PER_CLASS, CONFUSION = "predictions.parquet", "per_class.csv", "confusion.parquet"
ROWS_PER_GROUP = 65_536

_SCHEMA = pa.schema(
    [
        ("sample", pa.int64()),
        ("shard", pa.dictionary(pa.int32(), pa.string())),
        ("key", pa.string()),
        ("label", pa.int32()),
        ("label_name", pa.string()),
        ("answers", pa.list_(pa.int32())),
        ("answer_names", pa.list_(pa.string())),
        ("probabilities", pa.list_(pa.float32())),
        ("loss", pa.float64()),
        ("entropy", pa.float64()),
        ("right", pa.bool_()),
    ]
)
"""`label` and `answers` are the model's numbers of the classes; their names are the dataset's and the model's alike."""


def write_predictions(
    path: Path, answers: Answers, reader: ShardReader, *, classes: Sequence[str], facts: Mapping[str, str]
) -> None:
    """`classes`: the model's. `facts` become the file's metadata."""
    schema, names = _SCHEMA.with_metadata(dict(facts)), pa.array(classes, pa.string())
    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for start in range(0, max(1, len(answers)), ROWS_PER_GROUP):
            PROGRESS.touch()
            rows = slice(start, start + ROWS_PER_GROUP)
            writer.write_table(_table(answers, rows, reader, schema=schema, names=names))


def _table(answers: Answers, rows: slice, reader: ShardReader, *, schema: pa.Schema, names: pa.Array) -> pa.Table:
    samples, labels, tops_NA = answers.samples_N[rows], answers.labels_N[rows], answers.answers_NA[rows]
    places = reader.names(samples)
    columns = [
        pa.array(samples),
        pa.array([shard for shard, _ in places], pa.string()).dictionary_encode(),
        pa.array([key for _, key in places], pa.string()),
        pa.array(labels, pa.int32()),
        names.take(pa.array(labels)),
        _lists(pa.array(tops_NA.ravel(), pa.int32()), tops_NA),
        _lists(names.take(pa.array(tops_NA.ravel())), tops_NA),
        _lists(pa.array(answers.probabilities_NA[rows].ravel().astype(np.float32)), tops_NA),
        pa.array(answers.losses_N[rows]),
        pa.array(answers.entropies_N[rows]),
        pa.array(tops_NA[:, 0] == labels),
    ]
    return pa.table(columns, schema=schema)


def _lists(values: pa.Array, shape_NA: Ids) -> pa.Array:
    count, width = shape_NA.shape
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * width, pa.int32()), values)


def write_per_class(path: Path, found: PerClass, confusion: Confusion, *, numbers: Sequence[int]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", "name", "images", "top1", "top5", "precision", "loss", "most_taken_for"])
    absent = np.flatnonzero(found.counts_K == 0)
    for row in [*found.order().tolist(), *absent.tolist()]:
        figures = [_shown(column, row) for column in (found.top1_K, found.top5_K, found.precision_K, found.loss_K)]
        taken_for = int(found.taken_for_K[row])
        other = confusion.name(taken_for) if taken_for >= 0 else ""
        writer.writerow([numbers[row], confusion.names[row], int(found.counts_K[row]), *figures, other])
    write_atomic(path, text.getvalue().encode())


def _shown(column: Floats, row: int) -> str:
    """Empty where there is nothing to show."""
    value = float(column[row])
    return "" if math.isnan(value) else f"{value:.6f}"


def write_confusion(path: Path, confusion: Confusion) -> None:
    table = pa.table(
        {
            "label": [confusion.name(number) for number in confusion.labels.tolist()],
            "answer": [confusion.name(number) for number in confusion.answers.tolist()],
            "count": pa.array(confusion.counts),
        }
    )
    with atomic_file(path) as file:
        pq.write_table(table, file, compression="zstd")
