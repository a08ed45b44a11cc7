"""Records of runs that tests write themselves."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.publish import write_json
from pretrain.checkpoints.run import run_and_length
from pretrain.record import RECORD, Parent, RecordedTask, RunRecord


def record_of(settings: Mapping[str, Any], *, root: Path = Path()) -> RunRecord:
    """Return the record that a run with these settings begins with, as far as a test needs it.
    Paths of the settings are relative to `root`."""
    signs: dict[str, RecordedTask] = {"init": "tune", "lrs": "probe", "neighbors": "knn"}
    task = next((task for sign, task in signs.items() if sign in settings), None)
    is_evaluation = "split" in (settings.get("data") or {})
    source = settings.get("pretrained") or settings.get("start_from")
    is_tuned = settings.get("init") == "pretrained"
    has_parent = is_tuned or (source and settings.get("init") != "scratch")
    place = root / run_and_length(str(source or "gone"))[0]
    parents = (Parent(str(place), 0),) if has_parent else ()
    return RunRecord(task or ("evaluate" if is_evaluation else "pretrain"), parents=parents)


def write_record_of(
    run_dir: Path, settings: Mapping[str, Any], *, root: Path | None = None
) -> None:
    write_json(
        run_dir / RECORD, asdict(record_of(settings, root=root or run_dir.absolute().parents[1]))
    )
