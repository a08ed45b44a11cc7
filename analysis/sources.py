"""Origin of every setting of a plan: printed in a paper, or chosen by us.

The rows of a plan are its lists `source` (a section of the paper) and `chosen` (a reason).
`papers.yaml` has the rows for all plans of a paper. A row names settings and all values that they
have in the members to which the row applies:

    source:
      - section: C.1
        where: {model.kind: mixer}              # only these members
        settings:
          optimizer.lr: 0.01                    # each member has this value
          model.patch_size: [4, 8]              # each member has one of them, and both occur
          model.num_channels, model.num_tokens: [[4, 360], [8, 252]]      # pairs

For each member and setting, a row of the plan wins over a row of papers.yaml, and a row with more
conditions wins over one with fewer. `trials` is the number of seeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import Field

from analysis.experiments import EXPERIMENTS
from cluster.plan_file import Plan, Stage
from data_prep.errors import SettingsError
from data_prep.settings import Settings, flatten, in_yaml, read_yaml, validate

SHARED = Path(__file__).with_name("papers.yaml")
EXECUTION = (
    *("run_dir", "resume", "pretrained", "record.*", "checkpoint.*", "tracking.*", "ranks.*"),
    *("data.cache_*", "data.stage_dir", "data.check", "data.max_bad_share", "data.stream"),
    *("data.label", "data.image_member", "data.shuffle_buffer", "data.block_size"),
    *("data.window_blocks", "data.num_classes", "data.train_split", "data.test_split"),
    *("data.split", "data.eval_split", "data.eval_dataset", "data.samples_per_epoch"),
    *("train.local_batch_size", "train.seed", "train.eval_every", "train.log_every_steps"),
    *("train.max_skipped_steps", "train.loader_threads", "train.prefetch_batches"),
    *("engine.*timeout_s", "engine.lock_wait_s", "engine.activation_checkpointing"),
    *("engine.compile", "engine.zero_stage", "engine.cuda_graphs", "engine.offload"),
    *("seed", "seeds", "local_batch_size", "include_plain", "feature_dtype", "model.storage"),
)
"""Patterns of settings that no row must name: they decide how and where a run is executed."""


class Row(Settings):
    section: str | None = Field(None, examples=["C.4"])
    """Place in the paper; null for a chosen value."""
    reason: str | None = Field(None, examples=["not printed; the default of torch.optim.AdamW"])
    """Reason of a choice; null for a printed value."""
    settings: dict[str, Any]
    """Values by setting, or by several settings that are separated by commas."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Settings that a member must have: a value, or a list of possible values."""
    note: str = ""
    """Other readings of the paper."""

    @property
    def origin(self) -> str:
        return self.section or f"chosen: {self.reason}"


Member = Mapping[str, Any]
"""Settings of one run by dotted name."""


@dataclass(frozen=True)
class Origin:
    """A row's settings under one key, and the runs of a stage for which the row decides them."""

    stage: str
    row: Row
    key: str
    members: list[Member]

    @property
    def names(self) -> list[str]:
        return self.key.split(", ")

    @property
    def values(self) -> list[Any]:
        """Distinct values, in the order of the members."""
        found = []
        for member in self.members:
            values = [member[name] for name in self.names]
            value = values if len(values) > 1 else values[0]
            if value not in found:
                found.append(value)
        return found

    @property
    def is_true(self) -> bool:
        wanted, found = self.row.settings[self.key], self.values
        if found == [wanted]:
            return True
        is_list = isinstance(wanted, list) and len(wanted) == len(found)
        return is_list and all(each in wanted for each in found)


def paper_of(plan: Plan) -> str | None:
    """Return the key of the plan's paper in papers.yaml."""
    papers = {"A": "mixer", "B": "scaling-mlps"}
    found = (papers[each.paper] for each in EXPERIMENTS if Path(plan.path).stem in each.plans)
    return next(found, None)


def rows_of_plan(plan: Plan) -> tuple[list[Row], list[Row]]:
    """Return the plan's own rows and the rows of its paper."""
    shared = read_yaml(SHARED)
    own = _rows(plan.source, plan.chosen, plan.path)
    parts = [shared[key] for key in (paper_of(plan), "both") if key]
    return own, [
        row
        for part in parts
        for row in _rows(part.get("source", ()), part.get("chosen", ()), str(SHARED))
    ]


def _rows(source: Iterable[Any], chosen: Iterable[Any], path: str) -> list[Row]:
    found = []
    for key, given in (("source", source), ("chosen", chosen)):
        for number, each in enumerate(given):
            row = validate(Row, dict(each))
            needed = "section" if key == "source" else "reason"
            if getattr(row, needed) is None or (row.section and row.reason):
                field, fix = f"{path}: {key}[{number}]", f"give a {needed} only"
                raise SettingsError(field, f"it has no {needed}", fix, code="missing-value")
            found.append(row)
    return found


def members_of(stage: Stage) -> list[Member]:
    """Return the settings of a stage's runs, with the number of their seeds as `trials`."""
    members = [flatten(work.settings.model_dump(mode="json")) for work in stage.works]
    seeds = {each.get("train.seed", each.get("seed")) for each in members}
    return [each | {"trials": len(each.get("seeds") or seeds)} for each in members]


def origins_of(plan: Plan) -> list[Origin]:
    """Return the origin of each setting, in the order of the rows."""
    own, shared = rows_of_plan(plan)
    found = []
    for stage in plan.stages:
        if stage.kind == "build":
            continue
        members = members_of(stage)
        winners = [_winners(member, shared) | _winners(member, own) for member in members]
        for row in (*own, *shared):
            for key in row.settings:
                names = key.split(", ")
                decided = [
                    member
                    for member, rows in zip(members, winners, strict=True)
                    if all(rows.get(name) is row for name in names)
                ]
                if decided:
                    found.append(Origin(stage.name, row, key, decided))
    return found


def _winners(member: Member, rows: Iterable[Row]) -> dict[str, Row]:
    """Return the row that decides each setting of a member."""
    applying = [row for row in rows if all(_has(member, *each) for each in row.where.items())]
    return {
        name: row
        for row in sorted(applying, key=lambda row: len(row.where))
        for key in row.settings
        for name in key.split(", ")
        if name in member
    }


def _has(member: Member, name: str, wanted: Any) -> bool:
    value = member.get(name)
    return bool(value == wanted or (isinstance(wanted, list) and value in wanted))


def differences(plan: Plan) -> list[str]:
    """Return each setting that no row names, and each row whose values are not the plan's."""
    origins = origins_of(plan)
    found = [
        f"{each.stage}: {each.key} is {in_yaml(each.values)} in the plan, but"
        f" {in_yaml(each.row.settings[each.key])} in {each.row.origin}"
        for each in origins
        if not each.is_true
    ]
    for stage in plan.stages:
        for name, values in _unnamed(stage, origins).items():
            found.append(f"{stage.name}: no row names {name}, which is {in_yaml(values)}")
    used = {(each.row.origin, each.key) for each in origins}
    found += [
        f"{key} in {row.origin} decides nothing"
        for row in rows_of_plan(plan)[0]
        for key in row.settings
        if (row.origin, key) not in used
    ]
    return found


def _unnamed(stage: Stage, origins: Sequence[Origin]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    if stage.kind == "build":
        return found
    mine = [each for each in origins if each.stage == stage.name]
    for member in members_of(stage):
        named = {name for each in mine if member in each.members for name in each.names}
        for name, value in member.items():
            is_execution = any(fnmatch(name, pattern) for pattern in EXECUTION)
            if name not in named and not is_execution and value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: values for name, values in found.items() if values}
