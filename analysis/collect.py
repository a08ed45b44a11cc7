"""Finds runs on disk and reads what they recorded: settings, result, curves. No store and no torch needed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_prep.manifest import DatasetError, load_manifest
from data_prep.settings import read_yaml
from pretrain.checkpoints.card import CheckpointError, read_card, resolve
from pretrain.checkpoints.run import CONFIG_FILE, finished_result

Task = Literal["pretrain", "probe", "knn", "tune", "scratch", "evaluate"]


@dataclass(frozen=True)
class Run:
    directory: Path
    task: Task
    settings: dict[str, Any]
    result: dict[str, Any]
    """Empty while the run is unfinished."""

    @property
    def dataset(self) -> str:
        return str(self.settings["dataset"] if "dataset" in self.settings else self.settings["data"]["dataset"])

    @property
    def pretrained(self) -> Path | None:
        """The run or checkpoint that this one started from."""
        path = self.settings.get("pretrained")
        return Path(path) if path else None

    @property
    def top1(self) -> float | None:
        return self.result.get("test_top1", self.result.get("eval/top1"))

    @property
    def top1_std(self) -> float | None:
        """Of a run that is the mean of several."""
        return self.result.get("eval/top1_std")

    @property
    def is_group(self) -> bool:
        """Whether its figures are those of repetitions, which are runs below it."""
        return self.settings.get("seeds") is not None or bool(self.settings.get("folds"))

    @property
    def chance(self) -> float | None:
        try:
            return 1 / len(load_manifest(self.dataset).classes)
        except DatasetError:
            return None

    @property
    def model_name(self) -> str:
        """A short name such as B-4/Wi-256, or `pixels` for the linear baseline."""
        from_source = self.task in ("probe", "knn", "evaluate") or self.is_group
        source = self.pretrained if from_source else self.directory
        if source is None:
            return "pixels"
        try:
            return read_card(source).model.label
        except CheckpointError:
            return "?"

    def checkpoint(self) -> Path | None:
        try:
            return resolve(self.directory)
        except CheckpointError:
            return None

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, from the run's journal."""
        path = self.directory / "tracking" / "journal.jsonl"
        whole = path.read_bytes() if path.exists() else b""
        steps, values = [], []
        for line in whole[: whole.rfind(b"\n") + 1].splitlines():  # a kill may have cut the last line
            event = json.loads(line)
            if event["event"] == "metrics" and metric in event["values"]:
                steps.append(event["step"])
                values.append(event["values"][metric])
        return steps, values


def collect(root: Path) -> list[Run]:
    """Every run below `root`, sorted by task and name; repetitions are in the figures of their group."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such directory of runs; give the folder that holds them, such as runs/demo")
    # the store keeps copies of config files among its artifacts; a run also has a journal
    runs = [read_run(path.parent) for path in sorted(root.rglob(CONFIG_FILE)) if (path.parent / "tracking").is_dir()]
    if not runs:
        raise ValueError(f"{root}: holds no runs (no {CONFIG_FILE} below it)")
    groups = {run.directory for run in runs if run.is_group}
    runs = [run for run in runs if run.directory.parent not in groups]
    order: list[Task] = ["pretrain", "probe", "knn", "tune", "scratch", "evaluate"]
    return sorted(runs, key=lambda run: (order.index(run.task), run.directory.name))


def read_run(directory: Path) -> Run:
    settings = read_yaml(directory / CONFIG_FILE)
    task: Task = "pretrain"
    if "lrs" in settings:
        task = "probe"
    elif "include_plain" in settings:
        task = "evaluate"
    elif "neighbours" in settings:
        task = "knn"
    elif "init" in settings:
        task = "tune" if settings["init"] == "pretrained" else "scratch"
    return Run(directory, task, settings, finished_result(directory) or {})
