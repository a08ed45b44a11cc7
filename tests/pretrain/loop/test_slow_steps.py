"""Tools for slow steps: a trace of some steps on each rank, and garbage collection at the same
steps on all ranks."""

import gc
import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config import parse_window
from pretrain.engine.deepspeed import DeepSpeedEngine
from pretrain.engine.step import StepResult, span
from pretrain.loop import garbage, trainer
from pretrain.loop.garbage import collect, fixed_collection
from pretrain.loop.profile_window import ProfileWindow
from pretrain.ranks.world import World
from tests import training as trainings
from tests.errors import fails
from tests.faults.test_interrupted_training import assert_same_bits
from tests.moments import Strike
from tests.training import Run, finish, start, write_config

STEPS = ("schedule={name: constant}", "checkpoint.every=4 steps", "train.eval_every=99 steps")


def train_noting_collections(program: str, words: list[str], strike: Strike | None) -> int:
    """Train with more garbage on the second rank. Each rank writes the steps and generations of its
    collections to a file."""
    plain, rank = DeepSpeedEngine.train_step, os.environ["RANK"]
    garbage.COLLECT_EVERY_STEPS = 3
    noted: list[tuple[int | None, int]] = []
    step_now: int | None = None

    def note(phase: str, facts: dict[str, Any]) -> None:
        if phase == "start":
            noted.append((step_now, facts["generation"]))

    def littering(*given: Any, **also: Any) -> StepResult:
        if note not in gc.callbacks:
            gc.callbacks.append(note)
        litter: list[Any] = [[] for _ in range(2000 if rank == "1" else 0)]
        litter.append(litter)
        return plain(*given, **also)

    def collecting(step: int, **also: Any) -> None:
        nonlocal step_now
        step_now = step
        collect(step, **also)
        step_now = None
        if step == 16:
            gc.callbacks.remove(note)
            path = next(Path(word[8:]) for word in words if word.startswith("run_dir="))
            (path / f"noted-{rank}.json").write_text(json.dumps(noted))

    DeepSpeedEngine.train_step = littering  # type: ignore[method-assign]
    trainer.collect = collecting  # type: ignore[attr-defined]
    return trainings.main(program, words, strike)


@pytest.mark.processes
def test_traces_and_collections_change_no_weight_and_happen_at_the_same_steps_on_all_ranks(
    shapes: Path, tmp_path: Path
) -> None:
    """The resumed run traces the remaining steps of the window."""
    config = write_config(tmp_path, dataset=shapes)
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    finish(start(config, plain, *STEPS, "train.duration=16 steps"))
    finish(start(config, traced, *STEPS, "train.duration=8 steps"))
    assert not (traced / "profile").exists()
    words = ["train", str(config), f"run_dir={traced}", *STEPS, "train.duration=16 steps"]
    words.append("tracking.profile=steps 5-11")
    target = f"{__name__}:train_noting_collections"
    output = finish(Run(words, ranks=2, target=target))
    assert output.count("tracking.profile: ") == 1 and str(traced / "profile") in output
    assert "gpuGetDeviceCount" not in output
    assert_same_bits(plain, traced)

    for rank in (0, 1):
        noted = json.loads((traced / f"noted-{rank}.json").read_text())
        assert noted == [[9, 1], [12, 2], [15, 1], [16, 2]]
    files = sorted(path.name for path in (traced / "profile").iterdir())
    assert files == ["rank-0000.json.gz", "rank-0001.json.gz"]
    for name in files:
        spans = json.loads(gzip.decompress((traced / "profile" / name).read_bytes()))["traceEvents"]
        own = Counter(each["name"] for each in spans if each.get("cat") == "user_annotation")
        steps = {name: count for name, count in own.items() if name.startswith("ProfilerStep")}
        assert steps == {f"ProfilerStep#{step}": 1 for step in (9, 10, 11)}
        parts = {"wait for data": 3, "forward and backward": 6, "update": 3}
        assert {name: own[name] for name in parts} == parts  # two micro-batches in each step
        assert own["garbage collection"] == 1
        assert any("mm" in each["name"] for each in spans)


def test_a_window_is_the_steps_of_its_form() -> None:
    assert parse_window("steps 20-25") == range(20, 26) and parse_window("steps 3-3") == range(3, 4)
    for wrong in ("20-25", "steps 20", "steps 0-3", "steps 9-8", "20-25 steps"):
        with fails("bad-value"):
            parse_window(wrong)


def test_without_a_window_and_after_it_nothing_is_traced(tmp_path: Path) -> None:
    for words in (None, "steps 5-8"):
        window = ProfileWindow(words, tmp_path, world=World(0, 0, 1), device=torch.device("cpu"))
        for step in (1, 4, 9, 20):
            window.begin_step(step)
            with span("update") as opened:
                assert opened is None and not window.is_last(step)
        window.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("was_enabled", [True, False])
def test_automatic_collection_is_as_before_after_the_steps_also_after_an_error(
    was_enabled: bool,
) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), fixed_collection():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            raise ZeroDivisionError
        assert gc.isenabled() == was_enabled and gc.get_freeze_count() == 0
    finally:
        (gc.enable if before else gc.disable)()


def test_garbage_does_not_pile_up() -> None:
    class Litter:
        num_alive = 0

        def __init__(self) -> None:
            self.me = self
            Litter.num_alive += 1

        def __del__(self) -> None:
            Litter.num_alive -= 1

    most = 0
    with fixed_collection():
        for step in range(1, 4 * garbage.COLLECT_EVERY_STEPS + 1):
            Litter()
            most = max(most, Litter.num_alive)
            collect(step, is_pause=False)
        assert most == garbage.COLLECT_EVERY_STEPS and Litter.num_alive == 0
