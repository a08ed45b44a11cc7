"""Origin of every setting of a plan: printed in a paper, or chosen by us.

A plan has two lists of rows: `source` (with a section of the paper) and `chosen` (with a reason).
`shared.yaml` has the rows for all plans of a paper. A row applies to some members (runs) of a plan,
and lists settings with all values that these members have:

    source:
      - section: C.1
        where: {model.kind: mixer}              # only these members
        settings:
          optimizer.lr: 0.01                    # each member has this value
          model.patch_size: [4, 8]              # each member has one of them, and both occur
          model.num_channels, model.num_tokens: [[4, 360], [8, 252]]      # pairs

If several rows list a setting, a row of the plan wins over a row of shared.yaml, and then the row
with most conditions wins. Two names are not settings: `trials` is the number of seeds, `command` is
pretrain, tune, probe or evaluate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import Field

from analysis.papers.experiments import EXPERIMENTS
from cluster.plan_file import Plan
from data_prep.errors import SettingsError
from data_prep.settings import Settings, flatten, in_yaml, read_yaml, validate

SHARED = Path(__file__).with_name("shared.yaml")
EXECUTION = (
    *("run_dir", "resume", "pretrained", "record.*", "checkpoint.*", "tracking.*", "ranks.*"),
    *(
        "data.cache_*",
        "data.stage_dir",
        "data.verify_hashes",
        "data.max_bad_fraction",
        "data.stream",
    ),
    *("data.label", "data.image_member", "data.shuffle_buffer", "data.block_size"),
    *("data.window_blocks", "data.num_classes", "data.train_split", "data.test_split"),
    *("data.split", "data.eval_split", "data.eval_dataset", "data.samples_per_epoch"),
    *("train.local_batch_size", "train.seed", "train.eval_every", "train.log_every_steps"),
    *("train.max_skipped_steps", "train.loader_threads", "train.prefetch_batches"),
    *("engine.*timeout_s", "engine.lock_wait_s", "engine.activation_checkpointing"),
    *("engine.compile", "engine.zero_stage", "engine.offload"),
    *("command", "seed", "seeds", "local_batch_size", "include_plain", "model.storage"),
    *("feature_*", "features", "features_dir", "cache_gb", "tolerance"),
)
"""Patterns of settings that need no row, because they affect only the execution of a run."""


class Row(Settings):
    section: str | None = Field(None, examples=["C.4"])
    """Section of the paper; null for our choices."""
    reason: str | None = Field(None, examples=["not printed; the default of torch.optim.AdamW"])
    """Reason of our choice; null for printed values."""
    settings: dict[str, Any]
    """Setting -> value, or list of all values. A key can be several settings, separated by commas.
    """
    where: dict[str, Any] = Field(default_factory=dict)
    """Members to which the row applies: setting -> value, or list of possible values."""
    note: str = ""
    """Remark about other readings of the paper."""

    @property
    def origin(self) -> str:
        return self.section or f"chosen: {self.reason}"

    @property
    def condition(self) -> str:
        return ", ".join(f"{key}: {in_yaml(value)}" for key, value in self.where.items())


Member = Mapping[str, Any]
"""Settings of one run, by dotted name."""


@dataclass(frozen=True)
class Origin:
    """One key of a row, and the runs whose values the row explains."""

    row: Row
    key: str
    members: list[Member]

    @property
    def names(self) -> list[str]:
        return self.key.split(", ")

    @property
    def values(self) -> list[Any]:
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
    """Return the key of the plan's paper in shared.yaml."""
    name = Path(plan.path).stem
    found = (key for key, all_ in EXPERIMENTS.items() if any(name in each.plans for each in all_))
    return next(found, None)


def rows_of_plan(plan: Plan) -> tuple[list[Row], list[Row]]:
    """Return the plan's own rows, and the rows of shared.yaml for its paper."""
    shared = read_yaml(SHARED)
    parts = [shared[key] for key in (paper_of(plan), "both") if key]
    own = _rows({"source": plan.source, "chosen": plan.chosen}, plan.path)
    return own, [row for part in parts for row in _rows(part, str(SHARED))]


def _rows(lists: Mapping[str, Any], path: str) -> list[Row]:
    found = []
    for key, needed in (("source", "section"), ("chosen", "reason")):
        for number, each in enumerate(lists.get(key, ())):
            row = validate(Row, dict(each))
            if getattr(row, needed) is None or (row.section and row.reason):
                field, fix = f"{path}: {key}[{number}]", f"give only a {needed}"
                raise SettingsError(field, f"`{key}` needs a {needed}", fix, code="missing-value")
            found.append(row)
    return found


def members_of(plan: Plan) -> list[Member]:
    """Return the settings of the plan's runs, with `trials` and `command`."""
    found: list[Member] = []
    for stage in plan.stages:
        if stage.kind == "build":
            continue
        members = [flatten(work.settings.model_dump(mode="json")) for work in stage.works]
        seeds = {each.get("train.seed", each.get("seed")) for each in members}
        for each in members:
            trials = len(each.get("seeds") or seeds)
            found.append(each | {"trials": trials, "command": stage.kind})
    return found


def origins_of(plan: Plan) -> list[Origin]:
    (own, shared), members = rows_of_plan(plan), members_of(plan)
    decisions = [_decisions(member, own, shared) for member in members]
    return _origins([*own, *shared], members, decisions)


def _origins(
    rows: list[Row], members: list[Member], decisions: list[dict[str, Row]]
) -> list[Origin]:
    found = []
    for row in rows:
        for key in row.settings:
            decided = [
                member
                for member, by_name in zip(members, decisions, strict=True)
                if all(by_name.get(name) is row for name in key.split(", "))
            ]
            if decided:
                found.append(Origin(row, key, decided))
    return found


def _decisions(member: Member, own: list[Row], shared: list[Row]) -> dict[str, Row]:
    """Return the row that explains each setting of a member."""
    found = dict[str, Row]()
    for rows in (shared, own):
        applying = [row for row in rows if all(_has(member, *each) for each in row.where.items())]
        for row in sorted(applying, key=lambda row: len(row.where)):
            names = (name for key in row.settings for name in key.split(", "))
            found |= {name: row for name in names if name in member}
    return found


def _has(member: Member, name: str, wanted: Any) -> bool:
    value = member.get(name)
    return bool(value == wanted or (isinstance(wanted, list) and value in wanted))


def differences(plan: Plan) -> list[str]:
    """Return a message for each setting that no row explains, each value that differs from its
    row, and each row of the plan without effect."""
    (own, shared), members = rows_of_plan(plan), members_of(plan)
    decisions = [_decisions(member, own, shared) for member in members]
    origins = _origins([*own, *shared], members, decisions)
    found = [
        f"{each.key} is {in_yaml(each.values)} in the plan but"
        f" {in_yaml(each.row.settings[each.key])} in {each.row.origin}"
        for each in origins
        if not each.is_true
    ]
    unnamed = dict[str, list[Any]]()
    for member, by_name in zip(members, decisions, strict=True):
        for name in member.keys() - by_name:
            is_execution = any(fnmatch(name, pattern) for pattern in EXECUTION)
            if not is_execution and member[name] not in unnamed.setdefault(name, []):
                unnamed[name].append(member[name])
    found += [f"no row names {name} ({in_yaml(each)})" for name, each in unnamed.items()]
    used = {(id(each.row), each.key) for each in origins}
    found += [
        f"{key} in {row.origin} applies to no run"
        for row in own
        for key in row.settings
        if (id(row), key) not in used
    ]
    return found
