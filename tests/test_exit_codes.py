"""Each kind of fault has one exit code in all programs; data_prep/exit_codes.py has the table."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.cli import main as data_prep
from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import BAD_INPUT, BUSY, FAILED, OK, exit_code_of
from data_prep.publish import Busy, sole_writer
from data_prep.remote import RemoteError
from finetune.cli import main as finetune
from pretrain.checkpoints.card import CheckpointError, WeightsError
from tests.conftest import Capture
from tests.finetune.tiny import write_folder


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (SettingsError("lr", "is bad", code="bad-value"), BAD_INPUT, BAD_INPUT),
        (WeightsError("model", "the weights do not fit", code="mismatch"), BAD_INPUT, BAD_INPUT),
        (CheckpointError("run_dir", "not written", code="no-space"), BAD_INPUT, FAILED),
        (UserError("model", "another node differs", code="mismatch"), BAD_INPUT, FAILED),
        (Busy("out", "is held", code="busy"), BUSY, BUSY),
        (RemoteError("s3://x", "is silent", code="unreachable"), FAILED, FAILED),
        (OSError(errno.ENOSPC, "disk full"), FAILED, FAILED),
        (FileNotFoundError(errno.ENOENT, "no such file"), BAD_INPUT, FAILED),
        (ValueError("from a library"), BAD_INPUT, FAILED),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_has_one_code(error: ValueError | OSError, before: int, after: int) -> None:
    assert (exit_code_of(error), exit_code_of(error, is_started=True)) == (before, after)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


def without_a_tensor(file: Path) -> None:
    save_file(dict(list(load_file(file).items())[1:]), file)


def with_nan(file: Path) -> None:
    save_file(
        {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(file).items()}, file
    )


def with_another_card(file: Path) -> None:
    card = file.with_name("config.json")
    card.write_text(json.dumps({"nothing": "known"}))


@pytest.mark.parametrize("damage", [cut, without_a_tensor, with_nan, with_another_card])
@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "plain"])
def test_refused_weights_are_bad_input_before_and_after_the_start(
    damage: Callable[[Path], None], hashed: bool, shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Without hashes the fault is found after the checks, when the model is loaded."""
    weights = write_folder(tmp_path / "weights", shapes)
    damage(weights / "model.safetensors")
    if not hashed:
        (weights / "sha256.json").unlink()
    assert (
        finetune(
            ["predict", str(weights), str(shapes), "--split", "val", "--out", f"{tmp_path}/o.csv"]
        )
        == BAD_INPUT
    )
    assert (
        finetune(["export", str(weights), str(tmp_path / "export"), "--formats", "timm"])
        == BAD_INPUT
    )
    assert str(weights) in capsys.readouterr().err


@pytest.mark.processes
def test_a_held_dataset_is_busy_and_a_damaged_one_failed(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    with sole_writer(tmp_path / "made"):
        assert (
            data_prep(
                ["build", "--source", "synthetic", f"--out={tmp_path / 'made'}", "image_size=16"]
            )
            == BUSY
        )
    damaged = Path(shutil.copytree(shapes, tmp_path / "damaged"))
    assert data_prep(["verify", str(damaged)]) == OK
    shard = sorted(damaged.glob("*.tar"))[0]
    shard.write_bytes(shard.read_bytes().replace(b"P6", b"P5"))
    assert data_prep(["verify", str(damaged)]) == FAILED
    assert "made" in capsys.readouterr().err
