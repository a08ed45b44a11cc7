"""A run of the store as the tables see it: what was done, with which model, from which weights, judged on what. Pure.

Only FINISHED runs count. A run's recipe is its config without its seed, its fold and what does not change what is learned, together
with the recipe of what it started from; runs of one recipe are repetitions, which differ in their seeds and folds at most.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.tables.published import COLUMNS, Method
from pretrain.checkpoints.run import MAY_CHANGE
from pretrain.tracking.stored_run import StoredRun

REPEATED = ("seed", "train.seed", "data.fold")
"""In what the repetitions of one recipe differ."""
APART = (
    *MAY_CHANGE,
    *("run_dir", "pretrained", "data.dataset", "dataset", "features_dir", "seeds"),
    *("tracking", "ranks", "peak_teraflops", "num_ranks", "local_batch_size", "feature_batch_size"),
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
SPLIT: Mapping[Method, str] = {
    "scratch": "data.eval_split",
    "tune": "data.eval_split",
    "tta": "split",
    "probe": "test_split",
    "knn": "test_split",
}
"""The parameter that says what the metric is of."""
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
    split: str
    """That the figure is of; "" where nobody says."""
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
    pretrained_on, is_public = ("", False) if method == "scratch" else _pretraining(run, method, above)
    return [
        Entry(
            run=run,
            method=method,
            model=_model(run, above) + name.removeprefix(METRIC[method]).replace("_k", ", k = "),
            column=_column(run),
            split=run.params.get(SPLIT[method], ""),
            is_fold=_is_fold(training),
            augmented=_is_augmented(training, method),
            epochs=_epochs(training.params.get("train.duration", "")),
            pretrained_on=pretrained_on,
            is_public=is_public,
            recipe=(name, *(_recipe(each) for each in (run, *above))),
            repetition=tuple(each.params.get(key, "") for each in (run, *above) for key in REPEATED),
            top1=value,
        )
        for name, value in sorted(figures.items())
    ]


def _is_figure(name: str, metric: str, method: Method) -> bool:
    return name == metric or (method == "knn" and re.fullmatch(rf"{metric}_k\d+", name) is not None)


def ancestors(run: StoredRun, known: Mapping[str, StoredRun]) -> tuple[StoredRun, ...]:
    """What the weights come from, the nearest first; the parent of several repetitions is no training of its own."""
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


def _pretraining(run: StoredRun, method: Method, above: Sequence[StoredRun]) -> tuple[str, bool]:
    """(what on, whether these are the authors' weights). A training between the pretraining and this one is named before it: what
    was tuned on another dataset first stands beside no number of the papers."""
    is_own = method == "tta" and _column(above[0]) == _column(run)  # the tuning that is judged, not one before it
    between = [_column(each) for each in above[int(is_own) :] if _method(each, ()) != "scratch"]
    source = next((each for each in above if _method(each, ()) == "scratch"), None)
    origin = next((each.tags["origin"] for each in (run, *above) if each.tags.get("origin")), "")
    is_whole = not (above[-1] if above else run).parent_key  # or a run between may be one that the store does not know
    if source is not None:
        start = _column(source)
    elif PUBLIC_DATA in origin and is_whole:
        start = PRETRAINED_ON
    else:
        start = origin if origin and is_whole else "unknown"
    is_public = source is None and start == PRETRAINED_ON and PUBLIC_LENGTH in origin
    return ", of ".join([*between, start]), is_public


def _column(run: StoredRun) -> str:
    target = run.tags.get("target", "")
    return target if target in (*COLUMNS, PRETRAINED_ON) else run.tags.get("dataset", "unknown")


def _is_augmented(run: StoredRun, method: Method) -> bool:
    if method in ("probe", "knn"):  # a probe has augmented views or none
        return _is_on(run.params.get("views", "0"))
    return any(_is_on(run.params.get(f"augment.{name}", "")) for name in AUGMENTATIONS)


def _is_fold(run: StoredRun) -> bool:
    return run.params.get("data.fold", "") not in ("", "None", "null")


def _is_on(text: str) -> bool:
    return text not in OFF


def _epochs(duration: str) -> int | None:
    match = re.fullmatch(r"(\d[\d_]*) epochs?", duration.strip())
    return int(match[1]) if match else None


def _recipe(run: StoredRun) -> tuple[object, ...]:
    apart = (*REPEATED, *APART)
    kept = {
        key: value
        for key, value in run.params.items()
        if not any(key == free or key.startswith(f"{free}.") for free in apart)
    }
    kept["is_fold"] = str(_is_fold(run))
    return (run.tags.get("model"), run.tags.get("dataset"), run.tags.get("origin", ""), *sorted(kept.items()))
