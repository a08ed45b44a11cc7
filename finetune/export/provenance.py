"""What the disk knows of a checkpoint: the run that made it, its recipe, and every result of these weights. No torch, no MLflow.

A run is a directory with config.yaml (which names what it started from as `pretrained`) and, once it is finished, result.json. What
cannot be read is not known: nothing here raises because of a stranger's files, and nothing is made up.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.manifest import DatasetError, Manifest, load_manifest
from data_prep.settings import UserError, read_yaml
from pretrain.checkpoints.card import ModelCard, read_card, resolve
from pretrain.checkpoints.run import CONFIG_FILE, finished_result
from pretrain.data.datasets import Part

DEEPEST = 2
"""Folders between a run and a run that is looked for below it."""
RECIPE = ("optimizer", "schedule", "train", "augment", "engine")
"""Sections of a training's config, without its paths."""
PROBE = ("lrs", "lr", "weight_decay", "weight_decays", "epochs", "optimizer", "batch_size", "seed")
METRICS = {
    r"(test_)?top1": "top-1",
    r"(test_)?top5": "top-5",
    r"(test_)?real": "top-1, ReaL labels",
    r"top1_mean": "top-1, mean over seeds",
    r"top1_std": "top-1, deviation over seeds",
    r"(top1_)?k(\d+)": r"top-1, k = \2",
    r"top1_k(\d+)": r"top-1, k = \1",
}


@dataclass(frozen=True)
class Result:
    task: str
    dataset: str
    split: str
    metric: str
    value: float
    run: str
    is_of_these_weights: bool
    """As they are, with their own classifier; else of what was trained on top of them, or of another step."""


@dataclass(frozen=True)
class Provenance:
    run: str = ""
    task: str = ""
    recipe: dict[str, Any] | None = None
    commit: str = ""
    num_images: int | None = None
    started_from: str = ""
    results: tuple[Result, ...] = ()


def provenance_of(checkpoint: Path, card: ModelCard, *, results_from: Path | None) -> Provenance:
    """`checkpoint`: a resolved directory."""
    run_dir = run_of(checkpoint)
    config = config_at(run_dir) if run_dir else {}
    if run_dir is None or not config:
        beside = (results_from or checkpoint.parent,)
        return Provenance(results=tuple(_results_on(checkpoint, None, beside)))
    directory = base_of(config, run_dir) / dataset_of(config)
    manifest = _manifest(dataset_of(config), base_of(config, run_dir))
    is_same = manifest is not None and manifest.content_hash == card.content_hash
    task = task_of(config)
    sections = RECIPE if "train" in config else PROBE
    own = list(_own_results(run_dir, config, card, manifest))
    others = _results_on(checkpoint, run_dir, (results_from or run_dir.parent, run_dir))
    return Provenance(
        run=run_dir.name,
        task=task,
        recipe={name: config[name] for name in sections if name in config},
        commit=commit_of(run_dir),
        num_images=_num_images(manifest, directory, config) if is_same and manifest else None,
        started_from=_start(config, run_dir),
        results=(*own, *others),
    )


def run_of(checkpoint: Path) -> Path | None:
    """RUN/checkpoints/step-N, RUN/NAME or RUN itself."""
    path = checkpoint.resolve()
    return next((each for each in (path, path.parent, path.parent.parent) if (each / CONFIG_FILE).is_file()), None)


def config_at(run_dir: Path) -> dict[str, Any]:
    try:
        return read_yaml(run_dir / CONFIG_FILE)
    except UserError:
        return {}


def task_of(config: dict[str, Any]) -> str:
    if "train" in config:
        return "tune" if "pretrained" in config else "pretrain"
    if "train_split" in config:
        return "probe" if "lrs" in config else "knn"
    return "evaluate"


def base_of(config: dict[str, Any], run_dir: Path) -> Path:
    """What relative paths of a config are relative to: the directory where its command was typed, as far as `run_dir` tells."""
    words, place = Path(str(config.get("run_dir", ""))), run_dir.resolve()
    if not words.is_absolute() and words.parts and place.parts[-len(words.parts) :] == words.parts:
        return place.parents[len(words.parts) - 1]
    return Path.cwd()


def dataset_of(config: dict[str, Any]) -> str:
    return str(_data_of(config).get("dataset", ""))


def _data_of(config: dict[str, Any]) -> dict[str, Any]:
    """What a training says in its section `data`, and all others beside theirs."""
    data = config.get("data")
    return config | (data if isinstance(data, dict) else {})


def commit_of(run_dir: Path) -> str:
    """Of the code that began the run, from its journal."""
    try:
        with open(run_dir / "tracking" / "journal.jsonl", encoding="utf-8") as journal:
            first = json.loads(journal.readline())
        return str(first["tags"]["mlflow.source.git.commit"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _manifest(dataset: str, base: Path) -> Manifest | None:
    try:
        return load_manifest(base / dataset)
    except (DatasetError, OSError, ValueError):
        return None


def _num_images(manifest: Manifest, directory: Path, config: dict[str, Any]) -> int | None:
    """That were trained on, of one split or of its fold; of a mixture the parts are not told apart here."""
    data = _data_of(config)
    split, fold = str(data.get("train_split", "")), data.get("fold")
    if split not in manifest.splits or data.get("also"):
        return None
    try:
        return Part(directory, manifest, split, fold=fold).num_samples
    except (DatasetError, KeyError, IndexError):  # there are no such folds any more
        return None


def _start(config: dict[str, Any], run_dir: Path) -> str:
    if config.get("init") == "scratch":
        return "random weights"
    if not config.get("pretrained"):
        return ""
    path = base_of(config, run_dir) / str(config["pretrained"])
    try:
        card = read_card(path)
    except (UserError, OSError):
        return path.name
    return f"{card.model.label} trained on {card.dataset}" + (f", {card.origin}" if card.origin else "")


def _own_results(run_dir: Path, config: dict[str, Any], card: ModelCard, manifest: Manifest | None) -> Iterator[Result]:
    result = finished_result(run_dir) or {}
    data = _data_of(config)
    split = data.get("eval_split") or data.get("test_split") or data.get("split") or "not stated"
    name = manifest.name if manifest else card.dataset
    is_same = result.get("step", card.step) == card.step
    for metric, value in metrics_of(result):
        yield Result(task_of(config), name, str(split), metric, value, run_dir.name, is_same)


def _results_on(checkpoint: Path, run_dir: Path | None, places: tuple[Path, ...]) -> Iterator[Result]:
    """Of finished runs whose `pretrained` is this run or this checkpoint, sorted."""
    meant = {checkpoint.resolve()} | ({run_dir.resolve()} if run_dir else set())
    found = {config.parent.resolve() for place in places for config in _configs(place)}
    for directory in sorted(found - meant):
        config = config_at(directory)
        given, result = config.get("pretrained"), finished_result(directory)
        if not isinstance(given, str) or not result or (base_of(config, directory) / given).resolve() not in meant:
            continue
        task = task_of(config)
        manifest = _manifest(dataset_of(config), base_of(config, directory))
        data = _data_of(config)
        split = str(data.get("test_split") or data.get("eval_split") or data.get("split") or "not stated")
        name = manifest.name if manifest else Path(dataset_of(config)).name
        views = f", {config['views']} views" if config.get("views") else ""
        # a run that is named as a whole was read at its newest checkpoint
        is_same = task == "evaluate" and _is_newest(given, base_of(config, directory), checkpoint)
        for metric, value in metrics_of(result):
            yield Result(task, name, split, metric + views, value, directory.name, is_same)


def _is_newest(given: str, base: Path, checkpoint: Path) -> bool:
    try:
        return resolve(base / given).resolve() == checkpoint.resolve()
    except UserError:
        return False


def _configs(place: Path) -> list[Path]:
    return [each for depth in range(DEEPEST + 1) for each in sorted(place.glob("*/" * depth + CONFIG_FILE))]


def metrics_of(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(words, value) of those figures of a result.json that are accuracies."""
    for key, value in result.items():
        name = key.rsplit("/", 1)[-1]
        if isinstance(value, int | float) and not isinstance(value, bool):
            for pattern, words in METRICS.items():
                if re.fullmatch(pattern, name):
                    yield re.sub(pattern, words, name), float(value)
                    break
