"""The record of a run: its task, plan, labels, seed and parents.

A run writes RUN/record.json when it begins, and keeps the file when it resumes. Reports, tables,
figures and model cards read these facts from the record, never from settings.

    {"task": "probe", "plan": "widths", "stage": "probe", "member": "3",
     "labels": {"model.width": "64"}, "seed": 0,
     "parents": [{"run": "../mlp-64", "checkpoint": 120, "sha256": "...",
                  "record": {"task": "pretrain", ...}}]}

A parent is the run whose weights this run began with. Its path is relative to the run, so you can
move both together. A model name on the Hugging Face hub is stored unchanged. `record` is the
parent's record without the parent's own parents, or null for weights without a record.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, TypeAdapter

from data_prep.errors import UserError
from data_prep.publish import write_json
from data_prep.settings import Settings

if TYPE_CHECKING:
    from pretrain.checkpoints.checkpoint import Checkpoint

RECORD = "record.json"
RecordedTask = Literal["pretrain", "probe", "tune", "knn", "evaluate", "export"]


class RecordSettings(Settings):
    """Position of a run in a plan. The plan sets these values."""

    plan: str | None = Field(None, examples=["widths"])
    """Name of the plan that the run belongs to."""
    stage: str | None = Field(None, examples=["probe"])
    """Name of the run's stage in the plan."""
    member: str | None = Field(None, examples=["3"])
    """Name of the run in its stage."""
    labels: dict[str, str] = Field(default_factory=dict, examples=[{"model.width": "64"}])
    """Settings that distinguish this run from the other runs of its plan, for tables and figures.
    """


@dataclass(frozen=True)
class Parent:
    run: str
    """Path of a run or of a folder of weights, or a name on the Hugging Face hub."""
    checkpoint: int
    """Training step at which the weights were saved."""
    sha256: str = ""
    """Hash of the weights; "" in older records."""
    record: "RunRecord | None" = None


@dataclass(frozen=True)
class RunRecord:
    task: RecordedTask
    plan: str | None = None
    stage: str | None = None
    member: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    parents: tuple[Parent, ...] = ()
    code_sha256: str = ""
    """Hash of the code that `model.import` names; "" for other models."""


def write_record(
    run_dir: Path,
    task: RecordedTask,
    settings: RecordSettings,
    *,
    seed: int | None,
    weights: "Checkpoint | None",
    code: str = "",
) -> None:
    """Write the record of a new run. A resumed run keeps its record."""
    if (run_dir / RECORD).exists():
        return
    parents: tuple[Parent, ...] = ()
    if weights is not None:
        place = weights.run_dir or weights.directory
        above = None if weights.origin else read_record(place)
        run = weights.origin or os.path.relpath(place.resolve(), run_dir.resolve())
        above = replace(above, parents=()) if above else None
        parents = (Parent(run, weights.card.step, weights.sha256, above),)
    place_in_plan = (settings.plan, settings.stage, settings.member, settings.labels)
    write_json(run_dir / RECORD, asdict(RunRecord(task, *place_in_plan, seed, parents, code)))


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run, with absolute paths of the parents. Return None if the run has no
    record."""
    path = run_dir / RECORD
    try:
        record = TypeAdapter(RunRecord).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = f"the record cannot be read ({str(error).splitlines()[0]})"
        fix = "remove the file and run the same command again"
        raise UserError(str(path), problem, fix, code="damaged") from None
    parents = [
        each
        if each.run.startswith("hf-hub:")
        else replace(each, run=os.path.normpath(run_dir.resolve() / each.run))
        for each in record.parents
    ]
    return replace(record, parents=tuple(parents))
