"""A finished run as others read it: what it did, on what, from which weights, and what it reached.
No torch, no MLflow, no store.

    RUN/record.json              task, plan, labels, seed, and the run whose weights it began with
    RUN/config.yaml              the resolved settings
    RUN/result.json              once it is finished
    RUN/tracking/identity.json   the keys of the run and of the one whose weights it started from
    RUN/tracking/journal.jsonl   parameters and tags of its start, then its curves

The report, the tables beside the papers' and the model card read runs here alone. What cannot be
read is not known: nothing is made up.
"""

import json
import re
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
from pretrain.checkpoints.run import CONFIG_FILE, begun_with, finished_result, list_checkpoints
from pretrain.config import Length
from pretrain.data.datasets import Part
from pretrain.record import RECORD, RunRecord, read_record
from pretrain.tracking.tracker import readable_events

Curve = tuple[list[int], list[float]]
"""Steps, and the values of a metric."""
Task = Literal["pretrain", "probe", "knn", "tune", "scratch", "evaluate"]
TASKS: dict[Task, str] = {
    "pretrain": "pretrained",
    "probe": "linear probe",
    "knn": "k-NN",
    "tune": "fine-tuned",
    "scratch": "from scratch",
    "evaluate": "evaluated",
}
"""In words, the first that are done first."""
NOT_STATED = "not stated"
CLASS_MEAN = "top-1, class mean"
SPREAD = ", deviation over repetitions"
ACCURACIES = {
    r"(test_)?top1": "top-1",
    r"(test_)?top5": "top-5",
    r"(test_)?real": "top-1, ReaL labels",
    r"(test_)?class_(top1|mean)": CLASS_MEAN,
    r"top1_std": f"top-1{SPREAD}",
    r"top1_k(\d+)": r"top-1, k = \1",
}
"""Names in a result.json, after the last slash, and their words."""


@dataclass(frozen=True)
class Run:
    directory: Path
    record: RunRecord
    settings: Mapping[str, Any]
    result: Mapping[str, Any] = field(default_factory=dict)
    """Empty while the run is unfinished."""
    params: Mapping[str, str] = field(default_factory=dict)
    """The flattened settings ({"train.duration": "50 epochs"}), and what the run found out at its
    start, such as the hash of its data and the model that its weights are of."""
    tags: Mapping[str, str] = field(default_factory=dict)
    began_ms: int = 0
    key: str = ""
    parent_key: str = ""
    """Of the run that the weights come from, or of the group that this run is a repetition of."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def task(self) -> Task:
        """The recorded task; `scratch` for a tuning that began with no weights."""
        task = self.record.task
        assert task != "export"  # an export has no settings in CONFIG_FILE
        return "scratch" if task == "tune" and not self.record.parents else task

    @property
    def is_group(self) -> bool:
        """Whether its figures are those of repetitions, which are runs below it."""
        return self.settings.get("seeds") is not None or bool(self.settings.get("folds"))

    @property
    def data(self) -> Mapping[str, Any]:
        """The section of that name."""
        return self.settings.get("data") or {}

    @property
    def dataset(self) -> Path:
        return self.path_of(str(self.data.get("eval_dataset") or self.data.get("dataset", "")))

    @property
    def split(self) -> str:
        """That its accuracies are of."""
        return str(
            self.data.get("eval_split")
            or self.data.get("test_split")
            or self.data.get("split")
            or NOT_STATED
        )

    @property
    def pretrained(self) -> Path | None:
        """The run, or the folder of weights, that this one started from."""
        return Path(self.record.parents[0].run) if self.record.parents else None

    def path_of(self, words: str) -> Path:
        """A path of the settings. A relative one is relative to where the command was typed, as far
        as `run_dir` shows it."""
        typed, place = Path(str(self.settings.get("run_dir") or "")), self.directory.resolve()
        if (
            typed.is_absolute()
            or not typed.parts
            or place.parts[-len(typed.parts) :] != typed.parts
        ):
            return Path(words)
        return place.parents[len(typed.parts) - 1] / words

    @cached_property
    def manifest(self) -> Manifest | None:
        try:
            return load_manifest(self.dataset)
        except (DatasetError, OSError, ValueError):
            return None

    @property
    def dataset_name(self) -> str:
        return self.tags.get("dataset") or (
            self.manifest.name if self.manifest else self.dataset.name
        )

    @property
    def chance(self) -> float | None:
        return 1 / len(self.manifest.classes) if self.manifest else None

    @property
    def largest_class(self) -> float | None:
        """The accuracy of always predicting the largest class; None if classes are equally large,
        or if nobody knows."""
        split = self.manifest.splits.get(self.split) if self.manifest else None
        return split.largest_class if split else None

    @cached_property
    def model_name(self) -> str:
        """Such as B-4/Wi-256, or `pixels` for the linear baseline. What a training is of, and what
        all others look at."""
        source = (
            self.pretrained
            if self.is_group or self.task in ("probe", "knn", "evaluate")
            else self.directory
        )
        if source is None:
            return "pixels"
        card = None if "model" in self.tags else card_of(source)
        return card.model.label if card else self.tags.get("model", "?")

    @property
    def started_from(self) -> str:
        """In words; "" where nobody knows."""
        if self.task == "scratch" or (self.task == "pretrain" and self.pretrained is None):
            return "random weights"
        if self.pretrained is None:
            return ""
        card = card_of(self.pretrained)
        origin = f", {card.origin}" if card and card.origin else ""
        if card is None:
            return str(self.result.get("weights_from") or self.pretrained.name)
        return f"{card.model.label} trained on {card.dataset}{origin}"

    @property
    def num_images(self) -> int | None:
        """That were trained on, of one split or of its fold; of a mixture the parts are not told
        apart here."""
        split, manifest = str(self.data.get("train_split", "")), self.manifest
        if (
            manifest is None
            or split not in manifest.splits
            or self.data.get("also")
            or self.data.get("stream")
        ):
            return None
        try:
            return Part(self.dataset, manifest, split, fold=self.data.get("fold")).num_samples
        except (DatasetError, KeyError, IndexError):  # there are no such folds any more
            return None

    @property
    def weights_step(self) -> int | None:
        """The step of the checkpoint whose weights this run began with; None if no record has
        it."""
        return (self.result or begun_with(self.directory)).get("weights_step")

    def length_at(self, step: int) -> str:
        """The length of this training at one of its steps: `2 epochs`, or `13 steps` if no epoch
        ends with that step."""
        if step == self.result.get("step"):
            return self.params.get("train.duration", "")
        samples, epochs = (values for _, values in self.curves("train/samples", "train/epoch"))
        if samples and epochs[-1]:
            size, batch = (
                round(samples[-1] / epochs[-1]),
                self.settings["train"]["global_batch_size"],
            )
            count = step * batch // size
            if (
                count
                and Length(count, "epochs").steps(global_batch_size=batch, num_samples=size) == step
            ):
                return f"{count} epoch{'s' * (count > 1)}"
        return f"{step} step{'s' * (step > 1)}"

    @property
    def top1(self) -> float | None:
        """Of k-NN the first k that was asked for."""
        return self.accuracies.get("top-1")

    @property
    def last_top1(self) -> tuple[int, float] | None:
        """The step and the accuracy of the last evaluation in the event log; None if it has
        none."""
        ((steps, values),) = self.curves("eval/top1")
        return (steps[-1], values[-1]) if steps else None

    @property
    def top1_std(self) -> float | None:
        """Of a run that is the mean of several."""
        return self.accuracies.get(f"top-1{SPREAD}")

    @property
    def accuracies(self) -> dict[str, float]:
        """By their words: {"top-1": 0.75, "top-1, k = 20": 0.6}."""
        figures = {
            key.rsplit("/", 1)[-1]: value
            for key, value in self.result.items()
            if isinstance(value, int | float)
        }
        found = (
            (name, pattern)
            for name in figures
            for pattern in ACCURACIES
            if re.fullmatch(pattern, name)
        )
        return {
            re.sub(pattern, ACCURACIES[pattern], name): float(figures[name])
            for name, pattern in found
        }

    def curves(self, *metrics: str) -> list[Curve]:
        """Of each metric, by one reading of the journal."""
        logged = [
            (event["step"], event["values"])
            for event in _events(self.directory)
            if event["event"] == "metrics"
        ]
        found = (
            [(step, values[metric]) for step, values in logged if metric in values]
            for metric in metrics
        )
        return [([step for step, _ in pairs], [value for _, value in pairs]) for pairs in found]


class Result(NamedTuple):
    """One accuracy of some weights."""

    task: Task
    dataset: str
    split: str
    metric: str
    value: float
    run: str
    is_of_these_weights: bool
    """As they are, with their own classifier; else of what was trained on top of them, or of
    another step."""


def read_run(directory: Path) -> Run:
    """Raises where its settings cannot be read."""
    record, settings = read_record(directory), read_yaml(directory / CONFIG_FILE)
    if record is None:
        raise UserError(str(directory / RECORD), "does not exist", code="missing-path")
    start = next(iter(_events(directory, limit=1)), {})
    try:
        identity = json.loads((directory / "tracking" / "identity.json").read_text())
    except (OSError, ValueError):
        identity = {}
    present = flatten(settings)
    params = (
        present
        | start.get("params", {})
        | {key: present[key] for key in ("train.duration",) if key in present}
    )  # it may grow
    return Run(
        directory,
        record,
        settings,
        result=finished_result(directory) or {},
        params={name: str(value) for name, value in params.items()},
        tags=start.get("tags", {}),
        began_ms=start.get("time_ms", 0),
        key=identity.get("run_key") or "",
        parent_key=identity.get("parent_key") or "",
    )


def runs_below(root: Path, *, deepest: int | None = None) -> list[Run]:
    """Every run in `root` and in the folders below it, sorted by path; `deepest`: so many folders
    down at most. One that cannot be read is left out, with a line on stderr. (A store keeps copies
    of config files among its artifacts: these are no runs.)
    """
    places = root.rglob(CONFIG_FILE)
    if deepest is not None:
        places = (
            path for depth in range(deepest + 1) for path in root.glob("*/" * depth + CONFIG_FILE)
        )
    found = []
    for directory in sorted({path.parent for path in places}):
        try:
            if (directory / "tracking").is_dir() or finished_result(directory) is not None:
                found.append(read_run(directory))
        except (ValueError, OSError) as error:
            print(f"{directory}: {error}; the run is left out", file=sys.stderr)
    return found


def run_of(checkpoint: Path) -> Run | None:
    """Whose weights these are: of RUN/checkpoints/step-N, RUN/NAME or RUN itself."""
    path = checkpoint.resolve()
    for place in (path, path.parent, path.parent.parent):
        if (place / CONFIG_FILE).is_file():
            with suppress(ValueError, OSError):
                return read_run(place)
            return None  # a folder above it holds another run
    return None


def results_of(
    checkpoint: Path, run: Run | None, *, step: int, places: Sequence[Path]
) -> list[Result]:
    """What is known of these weights (of `run`, at `step`): what their training ended with, then
    what finished runs in `places` found that started from them."""
    own = (
        _results(run, is_of_these_weights=run.result.get("step", step) == step)
        if run is not None
        else []
    )
    checkpoint = checkpoint.resolve()
    meant = {checkpoint} | ({run.directory.resolve()} if run is not None else set())
    others = {
        each.directory.resolve(): each for place in places for each in runs_below(place, deepest=2)
    }
    for directory, each in sorted(others.items()):
        start = each.pretrained.resolve() if each.pretrained is not None else None
        if directory not in meant and start in meant:
            is_same = each.result.get("weights_step") == step and each.task == "evaluate"
            own += _results(each, is_of_these_weights=is_same)
    return own


def _results(run: Run, *, is_of_these_weights: bool) -> list[Result]:
    views = (
        f", {run.settings['views']} views"
        if run.task == "evaluate" and run.settings.get("views")
        else ""
    )
    return [
        Result(
            run.task,
            run.dataset_name,
            run.split,
            metric + views,
            value,
            run.name,
            is_of_these_weights,
        )
        for metric, value in run.accuracies.items()
    ]


def card_of(weights: Path) -> ModelCard | None:
    """Of a folder of weights, or of the newest checkpoint of a run."""
    try:
        return read_card((list_checkpoints(weights) or [weights])[-1])
    except CheckpointError:
        return None


def _events(directory: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Of the journal; a kill may have cut its last line."""
    try:
        with open(directory / "tracking" / "journal.jsonl", "rb") as journal:
            return readable_events(
                [line for line in islice(journal, limit) if line.endswith(b"\n")]
            )
    except OSError:
        return []
