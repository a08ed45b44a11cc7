"""Which run belongs into which cell of a paper's table, and what the cell then says. Pure: runs in, numbers out.

Only FINISHED runs count. A run's recipe is its config without its seed and without what does not change what is learned, together
with the recipe of what it started from; runs of one recipe differ in their seeds at most. A cell holds the recipe that was run
last: the mean over its seeds, each at its last run, with the sample deviation. Where the numbers come from several recipes, the
earlier ones are left out, and the cell says how many: nothing is chosen by its result.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.tables.published import COLUMNS, Method, Row, Table
from pretrain.run import MAY_CHANGE
from pretrain.stored_run import StoredRun

SEEDS = ("seed", "train.seed")
APART = (
    *MAY_CHANGE,
    *("run_dir", "pretrained", "data.dataset", "dataset", "features_dir", "seeds"),
    *("tracking", "peak_teraflops", "num_ranks", "local_batch_size", "feature_batch_size"),
)
"""Not of the recipe: for paths stand the recipe of the run before and the hash of the manifest; ranks change nothing."""
USUAL = {"model.norm": "layer", "model.activation": "gelu", "model.expansion": "4.0", "model.dropout": "0.0"}
"""Of paper B's models, whose labels do not say it."""
PRETRAINED_ON, PUBLIC_DATA, PUBLIC_LENGTH = "imagenet21k", "imagenet21", "epochs_800"
METRIC: Mapping[Method, str] = {
    "scratch": "eval/top1",
    "tune": "eval/top1",
    "tta": "eval/top1",
    "probe": "probe/test_top1",
    "knn": "knn/top1",
}
OFF = ("", "None", "null", "0", "0.0", "False", "false")
AUGMENTATIONS = (
    "crop_scale",
    "crop_padding",
    "flip_probability",
    "auto_augment",
    "erase_probability",
    "mixup_alpha",
    "cutmix_alpha",
)


@dataclass(frozen=True)
class Entry:
    """One run as the tables see it."""

    run: StoredRun
    method: Method
    model: str
    column: str
    """The canonical name of its target, or the name of its dataset where the papers have no column."""
    augmented: bool
    epochs: int | None
    """Of the training itself; None where it was not given in epochs."""
    pretrained_on: str
    """"" from scratch."""
    is_public: bool
    """Of the authors' 800-epoch weights."""
    recipe: tuple[object, ...]
    seed: tuple[str, ...]
    top1: float


@dataclass(frozen=True)
class Cell:
    """In per cent."""

    paper: float | None = None
    mean: float | None = None
    std: float | None = None
    """Sample deviation over seeds; None with one."""
    num_seeds: int = 0
    num_left_out: int = 0
    """Finished runs of other recipes, or of a seed that was run again."""

    @property
    def gap(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Line:
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Filled:
    """A table with our numbers."""

    title: str
    source: str
    """"" of the table that has none."""
    columns: tuple[str, ...]
    lines: tuple[Line, ...]


def fill(tables: Sequence[Table], runs: Sequence[StoredRun]) -> list[Filled]:
    """Each paper's table, and one more of what no paper has. `runs`: the oldest first."""
    entries = entries_of(runs)
    taken: set[int] = set()
    filled = []
    for table in tables:
        lines = []
        for row in table.rows:
            cells = []
            for column, paper in zip(table.columns, row.top1, strict=True):
                found = [number for number, entry in enumerate(entries) if belongs(entry, row, column)]
                taken.update(found)
                cells.append(cell_of([entries[number] for number in found], paper=paper))
            lines.append(Line(row.name, tuple(cells)))
        titles = tuple(COLUMNS[column] for column in table.columns)
        filled.append(Filled(table.title, table.source, titles, tuple(lines)))
    others = [entry for number, entry in enumerate(entries) if number not in taken]
    return [*filled, _ours(others)] if others else filled


def belongs(entry: Entry, row: Row, column: str) -> bool:
    return (
        entry.column == column
        and entry.method == row.method
        and entry.model == row.model
        and entry.augmented == row.augmented
        and row.epochs in (None, entry.epochs)
        and entry.is_public == row.public_checkpoint
        and entry.pretrained_on == ("" if row.method == "scratch" else PRETRAINED_ON)
    )


def cell_of(entries: Sequence[Entry], *, paper: float | None = None) -> Cell:
    if not entries:
        return Cell(paper)
    last = entries[-1].recipe
    by_seed = {entry.seed: entry.top1 * 100 for entry in entries if entry.recipe == last}  # the last of each
    values = list(by_seed.values())
    std = statistics.stdev(values) if len(values) > 1 else None
    return Cell(paper, statistics.fmean(values), std, len(values), len(entries) - len(values))


def entries_of(runs: Sequence[StoredRun]) -> list[Entry]:
    known = {run.run_key: run for run in runs}
    return [entry for run in runs if run.status == "FINISHED" for entry in _entries(run, known)]


def _entries(run: StoredRun, known: Mapping[str, StoredRun]) -> list[Entry]:
    above = ancestors(run, known)
    method = _method(run, above)
    if method is None:
        return []
    training = above[0] if method == "tta" else run
    figures = {name: value for name, value in run.metrics.items() if _is_figure(name, METRIC[method], method)}
    pretrained_on, is_public = ("", False) if method == "scratch" else _pretraining(run, above)
    return [
        Entry(
            run=run,
            method=method,
            model=_model(run, above) + name.removeprefix(METRIC[method]).replace("_k", ", k = "),
            column=_column(run),
            augmented=_is_augmented(training, method),
            epochs=_epochs(training.params.get("train.duration", "")),
            pretrained_on=pretrained_on,
            is_public=is_public,
            recipe=(name, *(_recipe(each) for each in (run, *above))),
            seed=tuple(each.params.get(key, "") for each in (run, *above) for key in SEEDS),
            top1=value,
        )
        for name, value in sorted(figures.items())
    ]


def _is_figure(name: str, metric: str, method: Method) -> bool:
    return name == metric or (method == "knn" and re.fullmatch(rf"{metric}_k\d+", name) is not None)


def ancestors(run: StoredRun, known: Mapping[str, StoredRun]) -> tuple[StoredRun, ...]:
    """What the weights come from, the nearest first; the parent of several seeds is no training of its own."""
    found: list[StoredRun] = []
    seen = {run.run_key}
    parent = known.get(run.parent_key or "")
    while parent is not None and parent.run_key not in seen:
        seen.add(parent.run_key)
        if parent.tags.get("task") != "tune_seeds":
            found.append(parent)
        parent = known.get(parent.parent_key or "")
    return tuple(found)


def _model(run: StoredRun, above: Sequence[StoredRun]) -> str:
    """Its label, and in what an MLP differs from the papers' of that label."""
    params = next((each.params for each in (run, *above) if each.params.get("model.kind") == "mlp"), {})
    unusual = [
        f"{key.removeprefix('model.')} {params[key]}" for key, usual in USUAL.items() if params.get(key, usual) != usual
    ]
    return ", ".join([run.tags.get("model", "?"), *unusual])


def _method(run: StoredRun, above: Sequence[StoredRun]) -> Method | None:
    task = run.tags.get("task")
    if task == "evaluate":  # a plain evaluation says what its training's end has said
        return "tta" if _is_on(run.params.get("views", "0")) and above and above[0].tags.get("task") == "tune" else None
    if task == "pretrain" or (task == "tune" and run.tags.get("init") == "scratch"):
        return "scratch"
    methods: dict[str | None, Method] = {"tune": "tune", "probe": "probe", "knn": "knn"}
    return methods.get(task)


def _pretraining(run: StoredRun, above: Sequence[StoredRun]) -> tuple[str, bool]:
    """(what on, whether these are the authors' weights) by the run that trained from scratch, or by the imported file's name."""
    source = next((each for each in above if _method(each, ()) == "scratch"), None)
    if source is not None:
        return _column(source), False
    origin = next((each.tags["origin"] for each in (run, *above) if each.tags.get("origin")), "")
    if PUBLIC_DATA in origin:
        return PRETRAINED_ON, PUBLIC_LENGTH in origin
    return origin or "unknown", False


def _column(run: StoredRun) -> str:
    target = run.tags.get("target", "")
    return target if target in (*COLUMNS, PRETRAINED_ON) else run.tags.get("dataset", "unknown")


def _is_augmented(run: StoredRun, method: Method) -> bool:
    if method in ("probe", "knn"):  # a probe has augmented views or none
        return _is_on(run.params.get("views", "0"))
    return any(_is_on(run.params.get(f"augment.{name}", "")) for name in AUGMENTATIONS)


def _is_on(text: str) -> bool:
    return text not in OFF


def _epochs(duration: str) -> int | None:
    match = re.fullmatch(r"(\d[\d_]*) epochs?", duration.strip())
    return int(match[1]) if match else None


def _recipe(run: StoredRun) -> tuple[object, ...]:
    apart = (*SEEDS, *APART)
    kept = {
        key: value
        for key, value in run.params.items()
        if not any(key == free or key.startswith(f"{free}.") for free in apart)
    }
    return (run.tags.get("model"), run.tags.get("dataset"), run.tags.get("origin", ""), *sorted(kept.items()))


# ---- what the papers have no place for ----------------------------------------------------------------------------------


def _ours(entries: Sequence[Entry]) -> Filled:
    met = {entry.column for entry in entries}
    columns = [*(name for name in COLUMNS if name in met), *sorted(met - COLUMNS.keys())]
    names = sorted({_name(entry) for entry in entries}, key=_numerically)
    lines = tuple(
        Line(
            name,
            tuple(
                cell_of([entry for entry in entries if _name(entry) == name and entry.column == column])
                for column in columns
            ),
        )
        for name in names
    )
    return Filled("Ours", "", tuple(COLUMNS.get(column, column) for column in columns), lines)


def _numerically(name: str) -> list[str]:
    """k = 20 before k = 100."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _name(entry: Entry) -> str:
    words = {
        "scratch": "from scratch",
        "tune": "fine-tune",
        "probe": "linear probe",
        "knn": "k-NN",
        "tta": "fine-tune, TTA",
    }
    augmented = "" if entry.method == "knn" else " + DA" if entry.augmented else ", no DA"
    length = f", {entry.epochs} epochs" if entry.method == "scratch" and entry.epochs else ""
    start = f", of {entry.pretrained_on}" if entry.pretrained_on and entry.model != "pixels" else ""
    return f"{words[entry.method]} {entry.model}{augmented}{length}{start}"
