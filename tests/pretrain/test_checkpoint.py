"""A checkpoint appears whole or not at all, wherever the writer dies; what is damaged is never loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import publish
from pretrain import checkpoint
from pretrain.card import CheckpointError, ModelCard, fault_of, list_checkpoints, resolve
from pretrain.checkpoint import TrainerState
from pretrain.models.spec import MlpSpec
from pretrain.step import EngineState

CARD = ModelCard(
    model=MlpSpec(kind="mlp", depth=1, width=4),
    image_size=8,
    classes=("a", "b"),
    channel_mean=(0.5, 0.5, 0.5),
    channel_std=(0.2, 0.2, 0.2),
    dataset="shapes",
    manifest_hash="0" * 64,
    step=1,
    run_key="",
)


def state(value: float) -> EngineState:
    return EngineState({"w": torch.full((3,), value)}, {"exp_avg.w": torch.full((3,), -value)}, int(value))


def save(run_dir: Path, step: int, *, keep_last: int = 2) -> Path:
    trainer = TrainerState(step=step, samples_consumed=step * 16)
    return checkpoint.save(run_dir, engine=state(float(step)), trainer=trainer, card=CARD, keep_last=keep_last)


def test_what_is_saved_is_what_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 7)
    restored = checkpoint.restore(tmp_path)
    assert restored is not None
    assert restored.trainer == TrainerState(7, 112) and restored.engine.num_updates == 7
    assert torch.equal(restored.engine.weights["w"], torch.full((3,), 7.0))
    assert torch.equal(restored.engine.optimizer["exp_avg.w"], torch.full((3,), -7.0))


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004\n"


class Crash(BaseException):
    """Stands for the end of the process: nothing may catch it and go on."""


def test_a_crash_between_any_two_file_operations_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies at the n-th rename, removal or fsync, for every n, and restores afterwards."""
    operations = [(publish.os, "rename"), (publish.os, "replace"), (publish.os, "fsync"), (checkpoint.shutil, "rmtree")]
    for crash_at in range(200):
        run_dir = tmp_path / str(crash_at)
        save(run_dir, 1, keep_last=1)
        calls = 0

        def wrap(original: Any, crash_at: int = crash_at) -> Any:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > crash_at:
                    raise Crash
                return original(*arguments, **options)

            return wrapped

        crashed = False
        with monkeypatch.context() as patch:
            for module, name in operations:
                patch.setattr(module, name, wrap(getattr(module, name)))
            try:
                save(run_dir, 2, keep_last=1)
            except Crash:
                crashed = True
        restored = checkpoint.restore(run_dir)
        assert restored is not None and restored.trainer.step in (1, 2)
        assert float(restored.engine.weights["w"][0]) == restored.trainer.step
        save(run_dir, 3, keep_last=1)  # leftovers are in nobody's way
        assert [path.name for path in list_checkpoints(run_dir)] == ["step-00000003"]
        if not crashed:
            assert crash_at > 10 and restored.trainer.step == 2
            return
    raise AssertionError("the crash point never moved past the end")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "no hashes"])
def test_damage_falls_back_to_the_one_before(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    victim = newest / "model.safetensors"
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        victim.write_bytes(data)
    elif damage == "cut":
        victim.write_bytes(data[:-1])
    elif damage == "remove":
        victim.unlink()
    else:
        (newest / "sha256.json").unlink()
    assert fault_of(newest) is not None
    restored = checkpoint.restore(tmp_path)
    assert restored is not None and restored.trainer.step == 1
    assert "is damaged" in capsys.readouterr().err


def test_training_never_silently_starts_over(tmp_path: Path) -> None:
    assert checkpoint.restore(tmp_path) is None
    path = save(tmp_path, 1)
    (path / "trainer.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="never silently starts over"):
        checkpoint.restore(tmp_path)
    assert resolve(tmp_path) == path  # the weights are whole, and that is all that later stages need
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint there is whole"):
        resolve(tmp_path)


def test_an_abandoned_future_is_pruned_and_the_newest_stays(tmp_path: Path) -> None:
    """100 is good, 200 is damaged, training went on from 100: 150 must not fall victim to 200."""
    save(tmp_path, 100)
    (save(tmp_path, 200) / "model.safetensors").write_bytes(b"")
    save(tmp_path, 150, keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000150"]
