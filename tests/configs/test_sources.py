"""The `source` and `chosen` rows of each plan equal the settings of its runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.papers.sources import differences, origins_of, paper_of
from cluster.plan_file import Plan, load_plan
from tests.conftest import Patch
from tests.papers_page import PLANS
from tests.ranks import REPOSITORY


@pytest.fixture
def plan(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Patch) -> Plan:
    """Return the plan of this name, loaded in a directory without runs."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    return load_plan(f"configs/plan/{getattr(request, 'param', 'scaling_batch_size')}.yaml")


@pytest.mark.parametrize("plan", PLANS, indirect=True)
def test_each_setting_is_printed_or_chosen(plan: Plan) -> None:
    assert differences(plan) == []
    assert paper_of(plan) is not None
    assert any(each.row.section for each in origins_of(plan)), "a paper prints something"


def without(rows: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    return tuple(
        dict(row, settings={key: row["settings"][key] for key in row["settings"] if key != name})
        for row in rows
    )


def test_a_wrong_row_is_found(plan: Plan) -> None:
    """A wrong value, a value that no run has, and a setting that is missing or does not exist: each
    gives one difference."""

    def found(name: str, value: Any) -> list[str]:
        section = {"section": "D.1", "settings": {name: value}}
        return differences(replace(plan, source=(*without(plan.source, name), section)))

    for name, value in (
        ("train.duration", "300 epochs"),
        ("optimizer.name", ["lion", "adamw"]),
        ("optimizer.speed", 1),
    ):
        (difference,) = found(name, value)
        assert name in difference
    dead = {"section": "4.3", "where": {"model.kind": "mixer"}, "settings": {"model.depth": 99}}
    (difference,) = differences(replace(plan, source=(*plan.source, dead)))
    assert "model.depth" in difference
    source, chosen = (without(rows, "model.depth") for rows in (plan.source, plan.chosen))
    (difference,) = differences(replace(plan, source=source, chosen=chosen))
    assert "model.depth" in difference
