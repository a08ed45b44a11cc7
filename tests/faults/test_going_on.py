"""A training run that is extended, before or after its end, resumes and ends like a run with this
length from the start."""

import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import take_weights
from pretrain.checkpoints.run import finished_result, list_checkpoints
from pretrain.cli import main
from pretrain.engine.deepspeed import DeepSpeedEngine
from pretrain.engine.step import StepResult
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from tests import training as trainings
from tests.conftest import Capture
from tests.errors import printed_errors
from tests.faults.test_interrupted_training import contents
from tests.finetune.tiny import write_folder
from tests.moments import Strike
from tests.training import final_state, finish, start, write_config

pytestmark = pytest.mark.processes

CONSTANT = (
    "schedule={name: constant, warmup: 3 steps}",
    "train.ema_decay=0.9",
    "train.eval_every=5 steps",
)
STEP_S = 0.1


@pytest.fixture(scope="module")
def config(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), dataset=shapes)


def slowly(program: str, words: list[str], strike: Strike | None) -> int:
    """Train with steps that take at least STEP_S."""
    plain = DeepSpeedEngine.train_step

    def slow(*given: Any, **also: Any) -> StepResult:
        time.sleep(STEP_S)
        return plain(*given, **also)

    DeepSpeedEngine.train_step = slow  # type: ignore[method-assign]
    return trainings.main(program, words, strike)


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_dir / "tracking" / "journal.jsonl").read_text().splitlines()
    ]


def test_with_a_constant_rate_it_ends_at_the_bits_of_a_run_begun_longer(
    config: Path, tmp_path: Path
) -> None:
    """The length is raised after the end, which is within an epoch (240 images, batches of 16), and
    lowered after a stop."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    said = finish(start(config, whole, *CONSTANT, "train.duration=2 epochs", ranks=1))
    best = json.loads((whole / "checkpoints" / "best.json").read_text())
    named = re.findall(r"  (?:last|best) .*: (\S+)\n", said)
    assert [int(path[-8:]) for path in named] == [30, best["step"]], said
    finish(start(config, run_dir, *CONSTANT, "train.duration=11 steps", ranks=1))
    assert (finished_result(run_dir) or {})["step"] == 11
    strike = Strike(run_dir, 1, step=17, signal=15)
    said = finish(
        start(config, run_dir, *CONSTANT, "train.duration=40 steps", ranks=1, strikes={0: strike})
    )
    assert "run: new length: 11 -> 40 steps, at step 11\n" in said and "jumps" not in said
    assert finished_result(run_dir) is None
    words = (*CONSTANT, "tracking={enabled: true}", "train.duration=2 epochs")
    said = finish(start(config, run_dir, *words, ranks=1, journal_only=True))
    assert "new length: 11 -> 40 -> 30 steps, at step 1" in said
    tags = [
        event["tags"]
        for event in events_of(run_dir)
        if event["event"] == "params" and event.get("tags")
    ]
    assert [list(each) for each in tags] == [["extended"], ["shortened"]]
    assert tags[1]["shortened"].startswith("11 -> 40 -> 30 steps, at step 1")
    mine, theirs = final_state(run_dir), final_state(whole)
    assert mine.keys() == theirs.keys() and any(
        name.startswith("weight.") for name in mine
    )  # including averaged weights
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert finished_result(run_dir) == (finished_result(whole) or {}) | {
        "lengths": [11, 40, 30],
        "images_per_s": (finished_result(run_dir) or {})["images_per_s"],
    }


def test_a_cosine_follows_the_new_length_and_a_shorter_one_is_refused(
    config: Path, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = tmp_path / "run"
    words = (
        f"tracking={{enabled: true, uri: sqlite:///{tmp_path}/mlflow.db}}",
        "train.log_every_steps=1",
        "schedule.warmup=0 steps",
    )
    finish(start(config, run_dir, *words, "train.duration=6 steps", ranks=1))
    before = contents(run_dir)
    assert main(["train", str(config), f"run_dir={run_dir}", *words, "train.duration=5 steps"]) == 2
    assert printed_errors(capsys.readouterr().err) == [("train.duration", "conflict")]
    assert contents(run_dir) == before
    said = finish(
        start(
            config,
            run_dir,
            *words,
            "train.duration=8 steps",
            ranks=1,
            target="tests.faults.test_going_on:slowly",
        )
    )
    note = "6 -> 8 steps, at step 6; the learning rate jumps from 0 to 0.000146"
    assert f"run: new length: {note}\n" in said
    events = events_of(run_dir)
    rates = {
        event["step"]: event["values"]["train/lr"]
        for event in events
        if "train/lr" in event.get("values", {})
    }
    expected = [
        1e-3 * (1 + math.cos(math.pi * step / length)) / 2
        for length, steps in ((6, range(6)), (8, (6, 7)))
        for step in steps
    ]
    assert list(rates) == [1, 2, 3, 4, 5, 6, 7, 8] and list(rates.values()) == pytest.approx(
        expected
    )
    assert [event["tags"]["duration"] for event in events if event["event"] == "start"] == [
        "6 steps",
        "8 steps",
    ]
    assert [
        event["tags"] for event in events if event["event"] == "params" and event.get("tags")
    ] == [{"extended": note}]
    speeds = [
        event["values"]["usage/images_per_s"]
        for event in events
        if event.get("values", {}).get("train/lr") and event["step"] > 6
    ]
    speeds.append((finished_result(run_dir) or {})["images_per_s"])
    assert (
        len(speeds) == 3 and max(speeds) <= 16 / STEP_S
    )  # including the last step's speed, although no step follows
    assert f"speed    {speeds[-1]:,.0f} images/s\n" in said
    before = contents(run_dir)
    for same in ("8 steps", "8  steps", "0.53 epochs"):
        assert (
            main(["train", str(config), f"run_dir={run_dir}", *words, f"train.duration={same}"])
            == 0
        )
        assert "finished before, at step 8" in capsys.readouterr().out
    assert contents(run_dir) == before


def test_weights_alone_are_taken_and_nobody_needs_their_source_again(
    config: Path, shapes: Path, other_shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    spec = MlpSpec(kind="mlp", depth=2, width=32, expansion=2)
    folder = write_folder(tmp_path / "folder", shapes, spec=spec)
    source, others = load_file(folder / "model.safetensors"), load_manifest(other_shapes).classes
    for classes, same_head in ((load_manifest(shapes).classes, True), (others, False)):
        model = build_model(spec, num_classes=len(classes), image_size=16, seed=3)
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        take_weights(model, Checkpoint.open(folder), classes=classes)
        expected = (
            source
            if same_head
            else source | {name: fresh[name] for name in fresh if name.startswith("head.")}
        )
        taken = model.state_dict()
        assert taken.keys() == expected.keys() and all(
            torch.equal(taken[name], expected[name]) for name in taken
        )
    words = (
        f"start_from={folder}",
        "optimizer={name: sgd, lr: 1e-9, momentum: 0}",
        "schedule.warmup=0 steps",
        "checkpoint.keep_last=9",
    )
    said = finish(start(config, tmp_path / "run", *words, "train.duration=2 steps", ranks=1))
    assert f"begins with the weights of {folder}, with the head\n" in said
    shutil.rmtree(folder)
    finish(start(config, tmp_path / "run", *words, "train.duration=3 steps", ranks=1))
    learned = load_file(list_checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    assert learned.keys() == source.keys() and all(
        torch.allclose(learned[name], source[name], atol=1e-6) for name in source
    )
    folder = write_folder(tmp_path / "other", shapes, spec=spec.model_copy(update={"width": 48}))
    capsys.readouterr()
    assert main(["train", str(config), f"run_dir={tmp_path / 'new'}", f"start_from={folder}"]) == 2
    assert printed_errors(capsys.readouterr().err) == [("start_from", "mismatch")]


def test_a_kept_checkpoint_is_the_end_of_a_shorter_run_and_a_branch_goes_on_from_it(
    config: Path, tmp_path: Path, capsys: Capture
) -> None:
    """240 images in batches of 14: an epoch has a fractional number of steps."""
    words = (
        *CONSTANT,
        "train={global_batch_size: 14, local_batch_size: 14}",
        "checkpoint={every: 40 steps, keep_last: 1, keep_best: false}",
    )
    run, short, whole, branch = (tmp_path / name for name in ("run", "short", "whole", "branch"))
    finish(
        start(
            config,
            run,
            *words,
            "train.duration=3 epochs",
            "checkpoint.milestones=[1 epochs, 2 epochs]",
            ranks=1,
        )
    )
    assert [path.name for path in list_checkpoints(run)] == [
        "step-00000018",
        "step-00000035",
        "step-00000052",
    ]
    finish(start(config, short, *words, "train.duration=1 epochs", ranks=1))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert sha256_of(Checkpoint.open(f"{run}@1epochs").directory / name) == sha256_of(
            list_checkpoints(short)[-1] / name
        )
    cooling = (
        *words[1:],
        "schedule={name: wsd, warmup: 3 steps, cooldown: 15 steps}",
        "train.duration=2 epochs",
    )
    finish(start(config, whole, *cooling, ranks=1))
    said = finish(start(config, branch, *cooling, f"start_from={run}@1epochs", ranks=1))
    place = run / "checkpoints" / "step-00000018"
    assert (
        f"begins with the weights of {place}, with the optimizer" in said
        and "new length" not in said
    )
    mine, theirs = final_state(branch), final_state(whole)
    assert (
        mine.keys() == theirs.keys()
        and [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    )
    capsys.readouterr()
    for epochs, more, field, code, named in (
        ("1.5", (), f"{run}@1.5epochs", "missing-path", "18, 35, 52"),
        ("1", ("train.seed=1",), "start_from", "conflict", "(train.seed: 1, was 0)"),
        ("2", (), "train.duration", "bad-value", "35 steps"),
    ):
        words = (f"run_dir={tmp_path}/new", *cooling, f"start_from={run}@{epochs}epochs", *more)
        assert main(["train", str(config), *words]) == 2
        said = capsys.readouterr().err
        assert printed_errors(said) == [(field, code)] and named in said, said
