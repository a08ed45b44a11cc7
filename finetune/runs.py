"""Read a run directory, for reports, tables, figures and model cards.

    RUN/record.json              task, plan, labels, seed, and the run that trained the weights
    RUN/config.yaml              resolved settings
    RUN/result.json              scores; exists once the run has finished
    RUN/tracking/journal.jsonl   event log: parameters and tags, then metrics

A fact that cannot be read stays unknown.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest, load_manifest
from data_prep.settings import flatten, read_yaml
from pretrain.checkpoints.card import CheckpointError, ModelCard, read_card
from pretrain.checkpoints.run import CONFIG_FILE, finished_result, list_checkpoints
from pretrain.config import parse_length
from pretrain.data.datasets import Part
from pretrain.record import RECORD, RunRecord, read_record
from pretrain.tracking.tracker import readable_events

Curve = tuple[list[int], list[float]]
"""Steps and values of a metric."""
Task = Literal["pretrain", "probe", "knn", "tune", "scratch", "evaluate"]
TASKS: dict[Task, str] = {
    "pretrain": "pretrained",
    "probe": "linear probe",
    "knn": "k-NN",
    "tune": "fine-tuned",
    "scratch": "from scratch",
    "evaluate": "evaluated",
}
"""Names of the tasks in reports, in display order."""
NOT_STATED = "not stated"
CLASS_MEAN, TOP1_STD = "top-1, class mean", "top-1, deviation over repetitions"
ACCURACIES = {
    "top1": "top-1",
    "top5": "top-5",
    "real": "top-1, ReaL labels",
    "class_top1": CLASS_MEAN,
    "class_mean": CLASS_MEAN,
    "top1_std": TOP1_STD,
}
"""Names of accuracies in reports, by key in result.json without `eval/`, `probe/` or `test_`."""


@dataclass(frozen=True)
class Run:
    directory: Path
    record: RunRecord
    settings: Mapping[str, Any]
    result: Mapping[str, Any] = field(default_factory=dict)
    """Content of result.json; empty while the run is unfinished."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Flattened settings ("train.duration": "50 epochs"), and parameters from the event log."""
    tags: Mapping[str, str] = field(default_factory=dict)
    began_ms: int = 0

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def task(self) -> Task:
        """Recorded task; `scratch` for a fine-tuning run without pretrained weights."""
        task = self.record.task
        assert task != "export"  # an export has no config.yaml
        return "scratch" if task == "tune" and not self.record.parents else task

    @property
    def is_group(self) -> bool:
        """True if this run averages repetitions (the runs in its subdirectories)."""
        return self.settings.get("seeds") is not None or bool(self.settings.get("folds"))

    @property
    def data(self) -> Mapping[str, Any]:
        return self.settings.get("data") or {}

    @property
    def dataset(self) -> Path:
        return self.path_of(str(self.data.get("eval_dataset") or self.data.get("dataset", "")))

    @property
    def split(self) -> str:
        """Split on which the accuracies were measured."""
        names = (self.data.get(key) for key in ("eval_split", "test_split", "split"))
        return str(next(filter(None, names), NOT_STATED))

    @property
    def pretrained(self) -> Path | None:
        """Run or folder of the pretrained weights, if any."""
        return Path(self.record.parents[0].run) if self.record.parents else None

    def path_of(self, path: str) -> Path:
        """Resolve a path of the settings against the directory in which the command ran."""
        run_dir, place = Path(self.settings.get("run_dir") or ""), self.directory.resolve()
        depth = len(run_dir.parts)
        if run_dir.is_absolute() or not depth or place.parts[-depth:] != run_dir.parts:
            return Path(path)
        return place.parents[depth - 1] / path

    @cached_property
    def manifest(self) -> Manifest | None:
        try:
            return load_manifest(self.dataset)
        except (DatasetError, OSError, ValueError):
            return None

    @property
    def dataset_name(self) -> str:
        name = self.manifest.name if self.manifest else self.dataset.name
        return self.tags.get("dataset") or name

    @property
    def chance(self) -> float | None:
        return 1 / len(self.manifest.classes) if self.manifest else None

    @property
    def largest_class(self) -> float | None:
        """Accuracy of predicting only the largest class; None if unknown, or if all classes have
        the same size."""
        split = self.manifest.splits.get(self.split) if self.manifest else None
        return split.largest_class if split else None

    @cached_property
    def model_name(self) -> str:
        """Name of the model, for example B-4/Wi-256; `pixels` without a model."""
        is_frozen = self.is_group or self.task in ("probe", "knn", "evaluate")
        source = self.pretrained if is_frozen else self.directory
        if source is None:
            return "pixels"
        card = None if "model" in self.tags else card_of(source)
        return card.model.label if card else self.tags.get("model", "?")

    @property
    def started_from(self) -> str:
        """Description of the weights that the run started from; empty if unknown."""
        if self.pretrained is None:
            return "random weights" if self.task in ("pretrain", "scratch") else ""
        card = card_of(self.pretrained)
        if card is None:
            return str(self.result.get("weights_from") or self.pretrained.name)
        origin = f", {card.origin}" if card.origin else ""
        return f"{card.model.label} trained on {card.dataset}{origin}"

    @property
    def num_images(self) -> int | None:
        """Number of images in the training split or fold; None with extra_datasets or stream."""
        split, manifest = str(self.data.get("train_split", "")), self.manifest
        if manifest is None or self.data.get("extra_datasets") or self.data.get("stream"):
            return None
        with suppress(DatasetError, KeyError, IndexError):  # the split or fold no longer exists
            return Part(self.dataset, manifest, split, fold=self.data.get("fold")).num_samples
        return None

    @property
    def epoch_size(self) -> int:
        """Number of samples in an epoch of the training; 0 if the event log does not have it."""
        samples, epochs = (values for _, values in self.curves("train/samples", "train/epoch"))
        return round(samples[-1] / epochs[-1]) if samples and epochs[-1] else 0

    def step_at(self, length: str) -> int:
        """Return the step at which the training reaches a length, for example `2 epochs`."""
        batch = self.settings["train"]["global_batch_size"]
        return parse_length(length).steps(global_batch_size=batch, num_samples=self.epoch_size)

    def length_at(self, step: int) -> str:
        """Return the length of the training up to a step, for example `2 epochs` or `13 steps`."""
        if step == self.result.get("step"):
            return self.params.get("train.duration", "")
        if size := self.epoch_size:
            count = step * self.settings["train"]["global_batch_size"] // size
            if count and self.step_at(f"{count} epochs") == step:
                return f"{count} epoch{'s' * (count > 1)}"
        return f"{step} step{'s' * (step > 1)}"

    @property
    def top1(self) -> float | None:
        """Top-1 accuracy. For k-NN: for the first entry of `neighbors`."""
        return self.accuracies.get("top-1")

    @property
    def last_top1(self) -> tuple[int, float] | None:
        """Step and top-1 accuracy of the last evaluation in the event log."""
        ((steps, values),) = self.curves("eval/top1")
        return (steps[-1], values[-1]) if steps else None

    @property
    def top1_std(self) -> float | None:
        return self.accuracies.get(TOP1_STD)

    @property
    def accuracies(self) -> dict[str, float]:
        """Accuracies by name: {"top-1": 0.75, "top-1, k = 20": 0.6}."""
        found = {}
        for key, value in self.result.items():
            name = key.rpartition("/")[2].removeprefix("test_")
            k = name.removeprefix("top1_k")
            is_accuracy = name in ACCURACIES or (k != name and k.isdigit())
            if is_accuracy and isinstance(value, int | float):
                found[ACCURACIES.get(name, f"top-1, k = {k}")] = float(value)
        return found

    def curves(self, *metrics: str) -> list[Curve]:
        """Return one curve for each of `metrics`, from the event log."""
        curves: dict[str, Curve] = {metric: ([], []) for metric in metrics}
        for event in _events(self.directory):
            for metric in curves if event["event"] == "metrics" else ():
                if metric in event["values"]:
                    curves[metric][0].append(event["step"])
                    curves[metric][1].append(event["values"][metric])
        return list(curves.values())


class Result(NamedTuple):
    """One accuracy of a checkpoint, or of a run that started from the checkpoint."""

    task: Task
    dataset: str
    split: str
    metric: str
    value: float
    run: str
    is_of_these_weights: bool
    """False if the accuracy is from another step, or from a probe, k-NN or fine-tuning run on the
    checkpoint."""


def read_run(directory: Path) -> Run:
    """Read a run. Fail if it has no record or no readable settings."""
    record, settings = read_record(directory), read_yaml(directory / CONFIG_FILE)
    if record is None:
        fix = "give the directory of a run, or repeat the run"
        raise UserError(str(directory / RECORD), "does not exist", fix, code="missing-path")
    start = next(iter(_events(directory, limit=1)), {})
    present = flatten(settings)
    params = present | start.get("params", {})
    if "train.duration" in present:  # a resume can extend a training
        params["train.duration"] = present["train.duration"]
    return Run(
        directory,
        record,
        settings,
        result=finished_result(directory) or {},
        params={name: str(value) for name, value in params.items()},
        tags=start.get("tags", {}),
        began_ms=start.get("time_ms", 0),
    )


def runs_below(root: Path, *, deepest: int | None = None) -> list[Run]:
    """Read every run in a directory and its subdirectories, sorted by path.

    A run that cannot be read is skipped with a line on stderr. `deepest`: number of directory
    levels below `root` to search (default: all).
    """
    places = root.rglob(CONFIG_FILE)
    if deepest is not None:
        depths = range(deepest + 1)
        places = (path for depth in depths for path in root.glob("*/" * depth + CONFIG_FILE))
    found = []
    for directory in sorted({path.parent for path in places}):
        try:
            # skip the copies of configs in a tracking database
            if (directory / "tracking").is_dir() or finished_result(directory) is not None:
                found.append(read_run(directory))
        except (ValueError, OSError) as error:
            print(f"{directory}: {error}; the run is skipped", file=sys.stderr)
    return found


def run_of(checkpoint: Path) -> Run | None:
    """Return the run of `checkpoint` (RUN/checkpoints/step-N, RUN/NAME or RUN), or None."""
    path = checkpoint.resolve()
    for place in (path, path.parent, path.parent.parent):
        if (place / CONFIG_FILE).is_file():
            with suppress(ValueError, OSError):
                return read_run(place)
            return None  # a parent directory may be another run
    return None


def results_of(
    checkpoint: Path, run: Run | None, *, step: int, places: Sequence[Path]
) -> list[Result]:
    """Return the accuracies of a checkpoint: from its training, then from runs in `places` that
    started from it."""
    found = []
    if run is not None:
        found = _results(run, is_of_these_weights=run.result.get("step", step) == step)
    sources = {checkpoint.resolve()} | ({run.directory.resolve()} if run else set())
    others = {
        each.directory.resolve(): each for place in places for each in runs_below(place, deepest=2)
    }
    for directory, each in sorted(others.items()):
        if directory not in sources and each.pretrained and each.pretrained.resolve() in sources:
            is_same = each.result.get("weights_step") == step and each.task == "evaluate"
            found += _results(each, is_of_these_weights=is_same)
    return found


def _results(run: Run, *, is_of_these_weights: bool) -> list[Result]:
    has_views = run.task == "evaluate" and run.settings.get("num_views")
    views = f", {run.settings['num_views']} views" if has_views else ""
    facts = (run.task, run.dataset_name, run.split)
    return [
        Result(*facts, metric + views, value, run.name, is_of_these_weights)
        for metric, value in run.accuracies.items()
    ]


def card_of(weights: Path) -> ModelCard | None:
    """Return the metadata of a folder of weights or of a run's newest checkpoint, if any."""
    try:
        return read_card((list_checkpoints(weights) or [weights])[-1])
    except CheckpointError:
        return None


def _events(directory: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first `limit` events of the event log, without an incomplete last line."""
    try:
        with open(directory / "tracking" / "journal.jsonl", "rb") as log:
            return readable_events([line for line in islice(log, limit) if line.endswith(b"\n")])
    except OSError:
        return []
