"""Which runs belong into which cell of a paper's table, and what the cell then holds. Pure: runs
in, numbers out.

Only finished runs count. A run's recipe is its settings without its seed, its fold and what does
not change what is learned, together with the recipe of what it started from; runs of one recipe are
repetitions, which differ in their seeds and folds at most. A cell holds the recipe that was run
last, in a paper's table first of its own plan (other plans train the same models with other batches
or data): the mean over its repetitions, each at its last run, with the sample deviation. It counts
the runs that it leaves
out: nothing is chosen by its result.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from analysis.tables.published import COLUMNS, JUDGED_ON, REAL, Method, Table, Wanted
from finetune.runs import NOT_STATED, Run
from pretrain.checkpoints.run import MAY_CHANGE, run_and_length
from pretrain.models.spec import AnySpec, ModelSpec

REPEATED = ("seed", "train.seed", "data.fold")
"""In what the repetitions of one recipe differ."""
APART = (
    *(key for key in MAY_CHANGE if key != "train.duration"),
    *("run_dir", "pretrained", "data.dataset", "features_dir", "seeds", "folds"),
    *("tracking", "ranks", "peak_teraflops", "num_ranks", "local_batch_size", "feature_batch_size"),
)
"""Not of the recipe: for paths stand the recipe of the run before and the hash of the manifest;
ranks change nothing."""
PRETRAINED_ON = "imagenet21k"
PUBLIC = re.compile(r"imagenet21_epochs_(\d+)")
"""In the names of the authors' checkpoints, which are of augmented pictures."""
NONE = ("", "None", "null")
OFF = (*NONE, "0", "0.0", "False", "false")
SPEC = TypeAdapter[AnySpec](ModelSpec)
AUGMENTATIONS = (
    *("crop_scale", "crop_padding", "flip_probability", "auto_augment", "erase_probability"),
    *("mixup_alpha", "cutmix_alpha"),
)
METHODS: dict[Method, str] = {
    "scratch": "from scratch",
    "tune": "fine-tune",
    "probe": "linear probe",
    "knn": "k-NN",
    "tta": "fine-tune, TTA",
}
REAL_WORDS = "top-1, ReaL labels"
USUAL_SPLIT = "val"
"""Of a dataset that the papers do not have."""


@dataclass(frozen=True)
class Cell:
    """In per cent."""

    paper: float | None = None
    mean: float | None = None
    std: float | None = None
    """Sample deviation over the repetitions; None with one."""
    num_repetitions: int = 0
    num_left_out: int = 0
    """Finished runs of other recipes, or of a repetition that was run again."""
    paper_std: float | None = None
    is_cited: bool = False
    """The paper has its number from another: no run is meant to be here."""

    @property
    def gap(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


class Line(NamedTuple):
    name: str
    cells: tuple[Cell, ...]


class Filled(NamedTuple):
    """A table with our numbers."""

    title: str
    source: str
    """"" of the table of what no paper has."""
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    decimals: int = 1


@dataclass(frozen=True)
class Entry:
    """One accuracy of one run, as the tables see it."""

    method: Method
    model: str
    column: str
    """The canonical name of its target, or the name of its dataset where the papers have no
    column."""
    split: str
    is_fold: bool
    """Trained on one fold of the split alone."""
    augmented: bool
    epochs: int | None
    """Of the training itself; None where it was not given in epochs."""
    pretrained_on: str
    """"" from scratch; what the weights were trained on just before, then of what those came, ...,
    at last for how long and, if so, that it was without augmentation."""
    is_public: bool
    """Of the authors' 800-epoch weights."""
    recipe: tuple[object, ...]
    repetition: tuple[str, ...]
    """Its seeds and folds."""
    top1: float
    place: Path

    @property
    def name(self) -> str:
        """Of its line in the table of what no paper has."""
        augmented = "" if self.method == "knn" else " + DA" if self.augmented else ", no DA"
        length = f", {self.epochs} epochs" if self.method == "scratch" and self.epochs else ""
        folds = ", per fold" if self.is_fold else ""
        start = (
            f", of {self.pretrained_on}" if self.pretrained_on and self.model != "pixels" else ""
        )
        usual = (NOT_STATED, JUDGED_ON.get(self.column, USUAL_SPLIT))
        judged = "" if self.split in usual else f", on {self.split}"
        return f"{METHODS[self.method]} {self.model}{augmented}{length}{folds}{start}{judged}"

    def belongs(self, wanted: Wanted) -> bool:
        if wanted.model is None:
            return False
        ours = (
            self.column,
            self.split,
            self.is_fold,
            self.method,
            self.model,
            self.augmented,
            self.is_public,
        )
        model = words_of_model(wanted.model)
        theirs = (
            wanted.target,
            JUDGED_ON[wanted.target],
            False,
            wanted.method,
            model,
            wanted.augmented,
            wanted.public,
        )
        start = _start(
            PRETRAINED_ON,
            "800 epochs" if wanted.public else "400 epochs",
            augmented=wanted.augmented,
        )
        is_from_there = self.pretrained_on == ("" if wanted.method == "scratch" else start)
        return ours == theirs and is_from_there and wanted.epochs in (None, self.epochs)


def fill(tables: Sequence[Table], runs: Sequence[Run]) -> list[Filled]:
    """Each paper's table, and one more of what no paper has."""
    runs = sorted(runs, key=lambda run: (run.began_ms, run.directory))
    known = {run.key: run for run in runs if run.key}
    entries = [entry for run in runs if run.result for entry in _entries(run, known)]
    others, filled = list(entries), []
    for table in tables:
        lines = []
        for row in table.rows:
            found = [
                sorted(
                    (each for each in entries if each.belongs(wanted)),
                    key=lambda each: table.plan in each.place.parts,
                )
                for wanted in row.cells
            ]
            others = [each for each in others if not any(each in cell for cell in found)]
            lines.append(Line(row.name, tuple(map(cell_of, found, row.cells))))
        filled.append(
            Filled(table.title, table.source, table.columns, tuple(lines), table.decimals)
        )
    return [*filled, _ours(others)] if others else filled


def cell_of(entries: Sequence[Entry], wanted: Wanted | None = None) -> Cell:
    """`entries`: those that count most are last."""
    empty = (
        Cell(wanted.top1, paper_std=wanted.std, is_cited=wanted.method is None)
        if wanted
        else Cell()
    )
    if not entries:
        return empty
    last = entries[-1].recipe
    found = {
        entry.repetition: entry.top1 * 100 for entry in entries if entry.recipe == last
    }  # the last of each
    values = list(found.values())
    std = statistics.stdev(values) if len(values) > 1 else None
    num_left_out = len(entries) - len(values)
    return replace(
        empty,
        mean=statistics.fmean(values),
        std=std,
        num_repetitions=len(values),
        num_left_out=num_left_out,
    )


def _ours(entries: Sequence[Entry]) -> Filled:
    met = {entry.column for entry in entries}
    columns = [*(name for name in COLUMNS if name in met), *sorted(met - COLUMNS.keys())]
    lines = []
    for name in sorted(
        {entry.name for entry in entries},
        key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(9), name),
    ):
        cells = [
            [each for each in entries if (each.name, each.column) == (name, column)]
            for column in columns
        ]
        lines.append(Line(name, tuple(map(cell_of, cells))))
    return Filled(
        "Ours", "", tuple(COLUMNS.get(column, column) for column in columns), tuple(lines)
    )


# ---- a run as the tables see it
# ----------------------------------------------------------------------------------------


def _entries(run: Run, known: Mapping[str, Run]) -> list[Entry]:
    above = _ancestors(run, known)
    method = _method(run, above)
    if method is None:
        return []
    training = above[0] if method == "tta" else run
    pretrained_on, is_public = (
        ("", False) if method == "scratch" else _pretraining(run, method, above)
    )
    length = re.fullmatch(r"(\d+) epochs?", _length(training.params.get("train.duration", "")))
    prefix = "top-1, k = " if method == "knn" else "top-1"
    return [
        Entry(
            method=method,
            model=_model(run, above) + ("" if words == REAL_WORDS else words.removeprefix("top-1")),
            column=_column(run) + (REAL if words == REAL_WORDS else ""),
            split=run.split,
            is_fold=training.params.get("data.fold", "") not in NONE,
            augmented=is_augmented(training),
            epochs=int(length[1]) if length else None,
            pretrained_on=pretrained_on,
            is_public=is_public,
            recipe=(words, *(_recipe(each) for each in (run, *above))),
            repetition=tuple(
                each.params.get(key, "") for each in (run, *above) for key in REPEATED
            ),
            top1=value,
            place=run.directory,
        )
        for words, value in sorted(run.accuracies.items())
        if words in (prefix, REAL_WORDS) or (method == "knn" and words.startswith(prefix))
    ]


def _ancestors(run: Run, known: Mapping[str, Run]) -> tuple[Run, ...]:
    """What the weights come from, the nearest first; the group of several repetitions is no
    training of its own."""
    chain = [run]
    while (parent := known.get(chain[-1].parent_key)) is not None and parent not in chain:
        chain.append(parent)
    return tuple(each for each in chain[1:] if not each.is_group)


def _method(run: Run, above: Sequence[Run] = ()) -> Method | None:
    if run.is_group:  # its repetitions are runs of their own
        return None
    if run.task == "evaluate":  # a plain evaluation repeats what its training ended with
        return (
            "tta"
            if run.params.get("views", "") not in OFF and above and above[0].task == "tune"
            else None
        )
    if run.task == "pretrain":
        return None if run.pretrained else "scratch"  # one that takes other weights is neither
    return run.task


def _model(run: Run, above: Sequence[Run]) -> str:
    for each in (run, *above):
        with suppress(ValueError):  # it has none of its own, or one of another version
            return words_of_model(SPEC.validate_python(each.settings.get("model")))
    return run.model_name


@cache
def words_of_model(spec: AnySpec) -> str:
    """Its label, and in what it differs from the usual model of that label."""
    fields = {
        name: field.default
        for name, field in type(spec).model_fields.items()
        if not field.is_required()
    }
    hidden = [
        name
        for name, default in fields.items()
        if spec.model_copy(update={name: default}).label == spec.label
    ]
    return ", ".join(
        [
            spec.label,
            *(
                f"{name} {getattr(spec, name)}"
                for name in hidden
                if getattr(spec, name) != fields[name]
            ),
        ]
    )


def _pretraining(run: Run, method: Method, above: Sequence[Run]) -> tuple[str, bool]:
    """(what on, whether these are the authors' weights). A training between the pretraining and
    this one is named before it: what was tuned on another dataset first stands beside no number of
    the papers."""
    is_own = method == "tta" and _column(above[0]) == _column(
        run
    )  # the tuning that is judged, not one before it
    between = [_column(each) for each in above[int(is_own) :] if _method(each) != "scratch"]
    trained = [
        (each, after)
        for each, after in zip(above, (run, *above), strict=False)
        if _method(each) == "scratch"
    ]
    origin = next((each.tags["origin"] for each in (run, *above) if each.tags.get("origin")), "")
    public = PUBLIC.search(origin)
    is_whole = not (
        above[-1] if above else run
    ).parent_key  # or a run between may be one that is not here
    if trained:
        source, after = trained[0]
        length = _taken_at(after, source) or source.params.get("train.duration", "")
        start = _start(_column(source), length, augmented=is_augmented(source))
    elif public and is_whole:
        start = _start(PRETRAINED_ON, f"{public[1]} epochs", augmented=True)
    else:
        start = origin if origin and is_whole else "unknown"
    return ", of ".join([*between, start]), not trained and start == _start(
        PRETRAINED_ON, "800 epochs", augmented=True
    )


def _start(target: str, length: str, *, augmented: bool) -> str:
    return (
        target
        + (f" for {_length(length)}" if length else "")
        + ("" if augmented else " without DA")
    )


def _taken_at(run: Run, source: Run) -> str:
    """The length of `source` at the checkpoint that `run` began with, however long `source` is now;
    "" if no record has it."""
    place, length = run_and_length(
        str(run.settings.get("pretrained") or run.settings.get("start_from") or "")
    )
    named, step = re.fullmatch(r"step-(\d+)", Path(place).name), run.weights_step
    if step is None and named:
        step = int(named[1])
    return length or (source.length_at(step) if step is not None else "")


def _length(words: str) -> str:
    """50epochs and 1_000 epochs as 50 epochs and 1000 epochs, so that they can be compared."""
    return re.sub(r"^(\d+) ?(epochs?)$", r"\1 \2", words.strip().replace("_", ""))


def is_augmented(run: Run) -> bool:
    """A probe has augmented views or none."""
    if run.task in ("probe", "knn"):
        return run.params.get("views", "") not in OFF
    return any(run.params.get(f"augment.{name}", "") not in OFF for name in AUGMENTATIONS)


def _column(run: Run) -> str:
    target = run.tags.get("target", "")
    return target if target in (*COLUMNS, PRETRAINED_ON) else run.dataset_name


def _recipe(run: Run) -> tuple[object, ...]:
    apart = (*REPEATED, *APART)
    kept = {
        key: value
        for key, value in run.params.items()
        if not any(key == free or key.startswith(f"{free}.") for free in apart)
    }
    kept["is_fold"] = str(run.params.get("data.fold", "") not in NONE)
    return (run.model_name, run.dataset_name, run.tags.get("origin", ""), *sorted(kept.items()))
