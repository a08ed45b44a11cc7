"""Which runs belong into which cell of a paper's table, and what the cell then holds. Pure: runs in, numbers out.

Only finished runs count. A run's recipe is its settings without its seed, its fold and what does not change what is learned,
together with the recipe of what it started from; runs of one recipe are repetitions, which differ in their seeds and folds at most.
A cell holds the recipe that was run last: the mean over its repetitions, each at its last run, with the sample deviation. It counts
the earlier runs that it leaves out: nothing is chosen by its result.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.published import COLUMNS, JUDGED_ON, Method, Row, Table
from finetune.runs import Run
from pretrain.checkpoints.run import MAY_CHANGE

REPEATED = ("seed", "train.seed", "data.fold")
"""In what the repetitions of one recipe differ."""
APART = (
    *MAY_CHANGE,
    *("run_dir", "pretrained", "data.dataset", "features_dir", "seeds", "folds"),
    *("tracking", "ranks", "peak_teraflops", "num_ranks", "local_batch_size", "feature_batch_size"),
)
"""Not of the recipe: for paths stand the recipe of the run before and the hash of the manifest; ranks change nothing."""
USUAL = {"model.norm": "layer", "model.activation": "gelu", "model.expansion": "4.0", "model.dropout": "0.0"}
"""Of paper B's models, whose labels do not contain it."""
PRETRAINED_ON, PUBLIC_DATA, PUBLIC_LENGTH = "imagenet21k", "imagenet21", "epochs_800"
OFF = ("", "None", "null", "0", "0.0", "False", "false")
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


@dataclass(frozen=True)
class Entry:
    """One accuracy of one run, as the tables see it."""

    method: Method
    model: str
    column: str
    """The canonical name of its target, or the name of its dataset where the papers have no column."""
    split: str
    is_fold: bool
    """Trained on one fold of the split alone."""
    augmented: bool
    epochs: int | None
    """Of the training itself; None where it was not given in epochs."""
    pretrained_on: str
    """"" from scratch; what the weights were trained on just before, then of what those came, ..."""
    is_public: bool
    """Of the authors' 800-epoch weights."""
    recipe: tuple[object, ...]
    repetition: tuple[str, ...]
    """Its seeds and folds."""
    top1: float

    @property
    def name(self) -> str:
        """Of its line in the table of what no paper has."""
        augmented = "" if self.method == "knn" else " + DA" if self.augmented else ", no DA"
        length = f", {self.epochs} epochs" if self.method == "scratch" and self.epochs else ""
        folds = ", per fold" if self.is_fold else ""
        start = f", of {self.pretrained_on}" if self.pretrained_on and self.model != "pixels" else ""
        usual = ("not stated", JUDGED_ON.get(self.column, USUAL_SPLIT))
        judged = "" if self.split in usual else f", on {self.split}"
        return f"{METHODS[self.method]} {self.model}{augmented}{length}{folds}{start}{judged}"

    def belongs(self, row: Row, column: str) -> bool:
        ours = (self.column, self.split, self.is_fold, self.method, self.model, self.augmented, self.is_public)
        theirs = (column, JUDGED_ON[column], False, row.method, row.model, row.augmented, row.public)
        start = "" if row.method == "scratch" else PRETRAINED_ON
        return ours == theirs and self.pretrained_on == start and row.epochs in (None, self.epochs)


def fill(tables: Sequence[Table], runs: Sequence[Run]) -> list[Filled]:
    """Each paper's table, and one more of what no paper has."""
    runs = sorted(runs, key=lambda run: (run.began_ms, run.directory))
    known = {run.key: run for run in runs if run.key}
    entries = [entry for run in runs if run.result for entry in _entries(run, known)]
    others, filled = list(entries), []
    for table in tables:
        lines = []
        for row in table.rows:
            found = [[each for each in entries if each.belongs(row, column)] for column in table.columns]
            others = [each for each in others if not any(each in cell for cell in found)]
            cells = (cell_of(cell, paper=paper) for cell, paper in zip(found, row.top1, strict=True))
            lines.append(Line(row.name, tuple(cells)))
        filled.append(Filled(table.title, table.source, tuple(COLUMNS[each] for each in table.columns), tuple(lines)))
    return [*filled, _ours(others)] if others else filled


def cell_of(entries: Sequence[Entry], *, paper: float | None = None) -> Cell:
    """`entries`: the oldest first."""
    if not entries:
        return Cell(paper)
    last = entries[-1].recipe
    found = {entry.repetition: entry.top1 * 100 for entry in entries if entry.recipe == last}  # the last of each
    values = list(found.values())
    std = statistics.stdev(values) if len(values) > 1 else None
    return Cell(paper, statistics.fmean(values), std, len(values), len(entries) - len(values))


def _ours(entries: Sequence[Entry]) -> Filled:
    met = {entry.column for entry in entries}
    columns = [*(name for name in COLUMNS if name in met), *sorted(met - COLUMNS.keys())]
    lines = []
    for name in sorted({entry.name for entry in entries}, key=_numerically):
        cells = [[each for each in entries if (each.name, each.column) == (name, column)] for column in columns]
        lines.append(Line(name, tuple(map(cell_of, cells))))
    return Filled("Ours", "", tuple(COLUMNS.get(column, column) for column in columns), tuple(lines))


def _numerically(name: str) -> list[str]:
    """k = 20 before k = 100."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# ---- a run as the tables see it ----------------------------------------------------------------------------------------


def _entries(run: Run, known: Mapping[str, Run]) -> list[Entry]:
    above = _ancestors(run, known)
    method = _method(run, above)
    if method is None:
        return []
    training = above[0] if method == "tta" else run
    pretrained_on, is_public = ("", False) if method == "scratch" else _pretraining(run, method, above)
    augmentations = [training.params.get(f"augment.{name}", "") for name in AUGMENTATIONS]
    if method in ("probe", "knn"):  # a probe has augmented views or none
        augmentations = [run.params.get("views", "")]
    length = re.fullmatch(r"(\d[\d_]*) epochs?", training.params.get("train.duration", "").strip())
    prefix = "top-1, k = " if method == "knn" else "top-1"
    return [
        Entry(
            method=method,
            model=_model(run, above) + words.removeprefix("top-1"),
            column=_column(run),
            split=run.split,
            is_fold=_is_fold(training),
            augmented=any(value not in OFF for value in augmentations),
            epochs=int(length[1]) if length else None,
            pretrained_on=pretrained_on,
            is_public=is_public,
            recipe=(words, *(_recipe(each) for each in (run, *above))),
            repetition=tuple(each.params.get(key, "") for each in (run, *above) for key in REPEATED),
            top1=value,
        )
        for words, value in sorted(run.accuracies.items())
        if words == prefix or (method == "knn" and words.startswith(prefix))
    ]


def _ancestors(run: Run, known: Mapping[str, Run]) -> tuple[Run, ...]:
    """What the weights come from, the nearest first; the group of several repetitions is no training of its own."""
    chain = [run]
    while (parent := known.get(chain[-1].parent_key)) is not None and parent not in chain:
        chain.append(parent)
    return tuple(each for each in chain[1:] if not each.is_group)


def _method(run: Run, above: Sequence[Run] = ()) -> Method | None:
    if run.is_group:  # its repetitions are runs of their own
        return None
    if run.task == "evaluate":  # a plain evaluation repeats what its training ended with
        return "tta" if run.params.get("views", "") not in OFF and above and above[0].task == "tune" else None
    if run.task == "pretrain":
        return None if run.pretrained else "scratch"  # one that takes other weights is neither
    return run.task


def _model(run: Run, above: Sequence[Run]) -> str:
    """Its label, and in what an MLP differs from the papers' of that label."""
    params = next((each.params for each in (run, *above) if each.params.get("model.kind") == "mlp"), {})
    unusual = [f"{key.removeprefix('model.')} {params[key]}" for key in USUAL if params.get(key, USUAL[key]) != USUAL[key]]
    return ", ".join([run.model_name, *unusual])


def _pretraining(run: Run, method: Method, above: Sequence[Run]) -> tuple[str, bool]:
    """(what on, whether these are the authors' weights). A training between the pretraining and this one is named before it: what
    was tuned on another dataset first stands beside no number of the papers."""
    is_own = method == "tta" and _column(above[0]) == _column(run)  # the tuning that is judged, not one before it
    between = [_column(each) for each in above[int(is_own) :] if _method(each) != "scratch"]
    source = next((each for each in above if _method(each) == "scratch"), None)
    origin = next((each.tags["origin"] for each in (run, *above) if each.tags.get("origin")), "")
    is_whole = not (above[-1] if above else run).parent_key  # or a run between may be one that is not here
    known = PRETRAINED_ON if PUBLIC_DATA in origin else origin or "unknown"
    start = _column(source) if source is not None else known if is_whole else "unknown"
    is_public = source is None and start == PRETRAINED_ON and PUBLIC_LENGTH in origin
    return ", of ".join([*between, start]), is_public


def _column(run: Run) -> str:
    target = run.tags.get("target", "")
    return target if target in (*COLUMNS, PRETRAINED_ON) else run.dataset_name


def _is_fold(run: Run) -> bool:
    return run.params.get("data.fold", "") not in ("", "None", "null")


def _recipe(run: Run) -> tuple[object, ...]:
    apart = (*REPEATED, *APART)
    kept = {key: value for key, value in run.params.items() if not any(key == free or key.startswith(f"{free}.") for free in apart)}
    kept["is_fold"] = str(_is_fold(run))
    return (run.model_name, run.dataset_name, run.tags.get("origin", ""), *sorted(kept.items()))
