"""The record of a run: written once, readable after a move, and set by plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.plan_file import load_plan
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.spec import MlpSpec
from pretrain.record import RECORD, Parent, RecordSettings, RunRecord, read_record, write_record
from tests.errors import fails
from tests.ranks import REPOSITORY

PLACE = RecordSettings(plan="widths", stage="probe", member="3", labels={"model.width": "64"})


def checkpoint_in(run_dir: Path, *, origin: str = "") -> Checkpoint:
    (run_dir / "checkpoints" / "step-00000120").mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    card = ModelCard(
        model=MlpSpec(kind="mlp", depth=1, width=4, expansion=2),
        image_size=8,
        classes=("a", "b"),
        channel_mean=(0.5, 0.5, 0.5),
        channel_std=(0.2, 0.2, 0.2),
        dataset="shapes",
        step=120,
    )
    place = run_dir / "checkpoints" / "step-00000120"
    return Checkpoint(place, card, {"model.safetensors": "f00d"}, origin)


def test_a_record_names_its_parents_and_survives_a_move_and_a_second_start(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    trained, tuned, probed = (runs / name for name in ("trained", "tuned", "probed"))
    checkpoints = [checkpoint_in(trained), checkpoint_in(tuned)]
    probed.mkdir()
    first = RecordSettings(plan="widths", labels={"model.width": "64"})
    write_record(trained, "pretrain", first, seed=1, weights=None)
    write_record(tuned, "tune", RecordSettings(), seed=2, weights=checkpoints[0])
    write_record(probed, "probe", PLACE, seed=None, weights=checkpoints[1])
    write_record(probed, "probe", first, seed=9, weights=None)  # like a resume
    runs.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert read_record(moved / "trained") == RunRecord(
        "pretrain", "widths", labels={"model.width": "64"}, seed=1
    )
    record = read_record(moved / "probed")
    parent = RunRecord("tune", seed=2)  # without its own parents
    assert record == RunRecord(
        "probe",
        "widths",
        "probe",
        "3",
        {"model.width": "64"},
        parents=(Parent(str(moved / "tuned"), 120, "f00d", parent),),
    )
    with_parents = read_record(moved / "tuned")
    assert with_parents is not None and replace(with_parents, parents=()) == parent
    assert [each.run for each in with_parents.parents] == [str(moved / "trained")]


def test_weights_of_others_have_a_name_and_no_record(tmp_path: Path) -> None:
    origin = "hf-hub:user/name@0123"
    write_record(
        tmp_path, "probe", PLACE, seed=0, weights=checkpoint_in(tmp_path / "hub", origin=origin)
    )
    record = read_record(tmp_path)
    assert record is not None and record.parents == (Parent(origin, 120, "f00d"),)


@pytest.mark.parametrize("text", ["{", "[]", '{"task": "cook"}', '{"task": "tune", "seed": "x"}'])
def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / RECORD).write_text(text)
    with fails("damaged", str(tmp_path / RECORD)):
        read_record(tmp_path)


def test_a_plan_states_the_place_and_labels_of_each_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = REPOSITORY / "configs/pretrain/demo_mlp.yaml"
    grid = {"optimizer.lr": [1e-4, 1e-3], "shape": {"one": {"train.local_batch_size": 8}}}
    run_dir = "runs/{optimizer.lr}-{shape}"
    pretrain = {"config": str(config), "grid": grid, "run_dir": run_dir}
    Path("widths.yaml").write_text(json.dumps({"pretrain": pretrain}))
    records = [work.settings.record for work in load_plan("widths.yaml").stages[0].works]  # type: ignore[attr-defined]
    assert records == [
        RecordSettings(
            plan="widths",
            stage="pretrain",
            member=str(member),
            labels={"config": "demo_mlp", "optimizer.lr": lr, "shape": "one"},
        )
        for member, lr in enumerate(("0.0001", "0.001"))
    ]
