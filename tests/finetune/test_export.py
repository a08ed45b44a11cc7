"""Exports: the same answers from every format, and nothing half-way."""

import copy
import errno
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from data_prep.settings import UserError
from finetune.cli import main as finetune
from finetune.export import graphs
from finetune.export.export import TOOLS
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model, save_folder
from pretrain.checkpoints.run import list_checkpoints
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, StructuredMlpSpec
from tests.finetune.tiny import MEAN, STD, export_of, model_of, write_folder
from tests.forked import begin, new_output, wait
from tests.moments import Strike

FAMILIES: dict[str, AnySpec] = {
    "standard mlp, batch norm": MlpSpec(kind="mlp", depth=1, width=12, bottleneck="none", norm="batch"),
    "mixer": MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=1),
    "permuted s-mixer": MixerSpec(
        kind="mixer", patch_size=4, num_channels=6, depth=1, layers_per_mixing=1, num_tokens=5, permuted_blocks="all"
    ),
    "masked": SparseMlpSpec(kind="sw_mlp", num_channels=2, depth=1, density=0.3, storage="masked"),
    "sparse": SparseMlpSpec(kind="sw_mlp", num_channels=2, width=24, depth=1, density=0.3, storage="sparse", expansion=2.0),
    "monarch": StructuredMlpSpec(kind="structured", form="monarch", num_rows=3, num_columns=4),
    "kronecker": StructuredMlpSpec(kind="structured", form="kronecker", num_rows=3, num_columns=4, greyscale=False),
}
BY_ONNX = ("standard mlp, batch norm", "permuted s-mixer", "sparse")
"""The slow one; tests/pretrain/models/test_every_model.py has the others."""


def onnx_answers(out: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(logits)


def near(found: Tensor, wanted: Tensor) -> None:
    assert float(wanted.abs().max()) > 0.05  # or zeros would do
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_every_format_of_a_zero_3_checkpoint_gives_the_models_answers(run: Path, exported: Path) -> None:
    model = load_model(Checkpoint.open(list_checkpoints(run)[-1]))
    theirs = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    program = torch.export.load(exported / "model.pt2").module()
    for batch in (1, 7):
        x = torch.randn(batch, 3, 16, 16)
        with torch.no_grad():
            wanted = model.eval()(x)
            assert torch.equal(theirs(x), wanted)
        near(onnx_answers(exported, x), wanted)
        near(program(x), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_exported_with_its_own_answers(name: str, tmp_path: Path) -> None:
    model, formats = (model_of(write_folder(tmp_path / "folder", spec=FAMILIES[name])), ["torch", "onnx"][: 1 + (name in BY_ONNX)])
    out = export_of(tmp_path / "folder", tmp_path / "out", formats=tuple(formats))
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        wanted = model(x)
    program = torch.export.load(out / "model.pt2")
    assert not any("wide_mlps" in str(node.target) for node in program.graph.nodes)  # needs nothing of ours
    near(program.module()(x), wanted)
    if "onnx" in formats:
        near(onnx_answers(out, x), wanted)


SMALL = {"num_channels": 512, "depth": 8, "token_hidden": 7, "channel_hidden": 24}
PLAIN = """
import sys
sys.modules["pretrain"] = sys.modules["data_prep"] = None  # not installed
import timm, torch
model = timm.create_model(f"local-dir:{sys.argv[1]}", pretrained=True).eval()
print(type(model).__name__)
torch.save(model(torch.load(sys.argv[2])), sys.argv[3])
"""


@pytest.mark.parametrize("eps", [1e-5, 1e-6], ids=["trained here", "imported"])
def test_a_mixer_that_timm_has_loads_in_timm_alone(tmp_path: Path, eps: float) -> None:
    spec = MixerSpec(kind="mixer", patch_size=16, norm_eps=eps, **SMALL)
    model = model_of(write_folder(tmp_path / "folder", spec=spec))
    with torch.no_grad():
        for name, weight in model.named_parameters():  # small features: there it matters what eps is, in every norm
            if "stem" in name or "outer" in name:
                weight.mul_(3e-3)
    save_folder(tmp_path / "folder", card=Checkpoint.open(tmp_path / "folder").card, weights=model.state_dict())
    out = export_of(tmp_path / "folder", tmp_path / "out", formats=("timm",))
    x = torch.randn(3, 3, 16, 16)
    torch.save(x, tmp_path / "x")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, out, tmp_path / "x", tmp_path / "y"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "MlpMixer\n"), done.stderr
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "y"), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(load_model(Checkpoint.open(out)).eval()(x), model(x), rtol=1e-4, atol=1e-5)  # here, too
    text = (out / "README.md").read_text()
    assert "library_name: timm\n" in text and "timm_names" not in text
    assert ("the residual stream scaled by 0.3162" in text) == (eps != 1e-6)
    again = export_of(out, tmp_path / "again", formats=("timm",))
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_model_that_timm_lacks_says_that_it_needs_this_package(tmp_path: Path) -> None:
    for number, (spec, size) in enumerate(
        (
            (MixerSpec(kind="mixer", patch_size=8, num_channels=4, depth=1), "of a size that timm has not"),
            (MixerSpec(kind="mixer", patch_size=16, activation="relu", **SMALL), "timm's have GELU"),
            (MixerSpec(kind="mixer", patch_size=16, permuted_blocks="all", **SMALL), "permuted"),
        )
    ):
        write_folder(tmp_path / f"folder{number}", spec=spec)
        out = export_of(tmp_path / f"folder{number}", tmp_path / f"out{number}", formats=("timm",))
        text = (out / "README.md").read_text()
        assert "library_name: wide-mlps\n" in text and "import pretrain.models.timm_names" in text, size


def test_pictures_are_normalised_inside_where_it_is_asked_for(tmp_path: Path) -> None:
    model = model_of(write_folder(tmp_path / "folder"))
    out = export_of(tmp_path / "folder", tmp_path / "out", with_preprocessing=True)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    images = (pictures / 255 - list(MEAN)) / list(STD)
    with torch.no_grad():
        wanted = model(torch.from_numpy(images.transpose(0, 3, 1, 2)).float())
    near(onnx_answers(out, torch.from_numpy(pictures)), wanted)
    near(torch.export.load(out / "model.pt2").module()(torch.from_numpy(pictures)), wanted)


def test_a_graph_that_answers_otherwise_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "folder")

    def off(model: ImageModel, **_: object) -> nn.Module:
        other = copy.deepcopy(model)
        other.get_classifier().bias.data[0] += 1e-3
        return other

    monkeypatch.setattr(graphs, "dense", off)
    with pytest.raises(UserError, match=r"torch: its answers are off by 0.001, .* nothing is published"):
        export_of(tmp_path / "folder", tmp_path / "out", formats=("torch",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    wanted = [torch.tensor([[1.0, 2.0, 4.0]])]
    found = graphs.agreement(wanted, lambda x: x, [torch.tensor([[1.0, 2.0001, 4.0]])], graph="onnx")
    assert found.max_abs == pytest.approx(1e-4, rel=0.01) and found.max_rel == pytest.approx(2.5e-5, rel=0.01)
    for wrong in (torch.tensor([[1.0, 2.0, 4.001]]), torch.tensor([[1.0, 2.0, math.nan]]), torch.ones(1, 2)):
        with pytest.raises(UserError, match="onnx: "):
            graphs.agreement(wanted, lambda x: x, [wrong], graph="onnx")


def test_nothing_is_overwritten_and_the_same_export_is_done_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "folder")
    words = ["export", str(tmp_path / "folder"), str(tmp_path / "out"), "--formats", "timm"]
    assert finetune(words) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert set(before) == {"README.md", "config.json", "export.json", "model.safetensors", "sha256.json"}
    assert finetune(words) == 0
    assert "exported before, and whole" in capsys.readouterr().out
    assert finetune([*words, "license=mit"]) == 2
    assert "belongs to an export with other settings (license: " in capsys.readouterr().err
    write_folder(tmp_path / "other", spec=MixerSpec(kind="mixer", patch_size=8, num_channels=4, depth=1))
    assert finetune(["export", str(tmp_path / "other"), *words[2:]]) == 2
    assert "belongs to an export with other settings (weights_sha256: " in capsys.readouterr().err
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "README.md").write_text("mine")
    assert finetune(words) == 2
    assert "README.md has changed since; name another" in capsys.readouterr().err
    assert finetune(["export", str(tmp_path / "out"), str(tmp_path / "folder")]) == 2
    assert "folder exists and is not an export; name another out, or remove it" in capsys.readouterr().err


def test_mistakes_are_one_message_each(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "folder")

    def said(*words: str) -> str:
        assert finetune(["export", *words]) == 2
        out, error = capsys.readouterr()
        assert out == "" and len(error.splitlines()) == 1
        return error

    here = (str(tmp_path / "folder"), str(tmp_path / "out"))
    assert "formats.1: 'onxx' is not one of its values; did you mean 'onnx'" in said(*here, "--formats", "timm,onxx")
    assert "with_preprocessing: true changes nothing" in said(*here, "--formats", "timm", "--with-preprocessing")
    assert "holds no checkpoint; give a run directory" in said(str(tmp_path), here[1])
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else name)
        assert "formats: onnx needs onnxruntime, which is not installed; install it, or take --formats timm,torch" in said(*here)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
        assert "0.00 GB are free; free some" in said(*here)
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setitem(TOOLS, "torch", (Mock(side_effect=full), Mock()))
        assert finetune(["export", *here, "--formats", "torch"]) == 1
        assert "out cannot be written, for the disk is full; free some space" in capsys.readouterr().err
    weights = tmp_path / "folder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "no checkpoint there is whole (model.safetensors has changed); copy it again" in said(*here)
    (tmp_path / "folder" / "sha256.json").unlink()
    assert finetune(["export", *here]) == 1
    assert "model.safetensors: cannot be read" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_ended_leaves_nothing_there(tmp_path: Path, number: signal.Signals) -> None:
    write_folder(tmp_path / "folder")
    out, output = tmp_path / "out", new_output()
    words = ["export", str(tmp_path / "folder"), str(out)]
    strike = Strike(tmp_path / ".tmp-out", 7, signal=number)  # where it opens model.onnx
    process = begin("tests.training:main", "finetune", words, strike, environment=os.environ, output=output)
    assert wait([process], timeout_s=300) == [130 if number == signal.SIGTERM else -9]
    assert not out.exists()
    if number == signal.SIGTERM:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    else:  # the next one clears away what this one left
        assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-out", "folder"]
        export_of(tmp_path / "folder", out, formats=("timm",))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out"]
