"""Exports: every format gives the same predictions, and is complete or absent. Record, metadata and
card have true facts, and no unknown ones.
"""

import copy
import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import yaml
from torch import Tensor, nn

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from data_prep.publish import sha256_of
from finetune.cli import main as finetune
from finetune.export import graphs
from finetune.export.config import ExportSettings
from finetune.export.export import TOOLS
from finetune.export.model_card import Facts, readme
from finetune.runs import results_of, run_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import save_folder
from pretrain.checkpoints.run import list_checkpoints
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, StructuredMlpSpec
from pretrain.record import Parent, RunRecord, read_record
from tests.conftest import Capture, Patch
from tests.errors import fails, printed_errors
from tests.finetune.tiny import MEAN, STD, export_of, model_of, write_folder
from tests.forked import begin, environments, new_output, wait
from tests.moments import wait_until
from tests.records import write_record_of
from tests.training import finish, start, write_config

FAMILIES: dict[str, AnySpec] = {
    "standard mlp, batch norm": MlpSpec(
        kind="mlp", depth=1, width=12, bottleneck="none", norm="batch"
    ),
    "mixer": MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=1),
    "permuted s-mixer": MixerSpec(
        kind="mixer",
        patch_size=4,
        num_channels=6,
        depth=1,
        layers_per_mixing=1,
        permuted_blocks="all",
    ),
    "masked": SparseMlpSpec(kind="sw_mlp", num_channels=2, depth=1, density=0.3, storage="masked"),
    "sparse": SparseMlpSpec(
        kind="sw_mlp",
        num_channels=2,
        width=24,
        depth=1,
        density=0.3,
        storage="sparse",
        expansion=2.0,
    ),
    "monarch": StructuredMlpSpec(kind="structured", form="monarch", num_rows=3, num_columns=4),
    "kronecker": StructuredMlpSpec(
        kind="structured", form="kronecker", num_rows=3, num_columns=4, grayscale=False
    ),
}


@pytest.fixture(scope="module")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at ZeRO 3 on two ranks, with the directories of an evaluation and a probe next to
    it."""
    folder = tmp_path_factory.mktemp("exporting")
    config = write_config(folder, dataset=shapes)
    short = ["train.duration=6 steps", "train.eval_every=6 steps", "checkpoint.every=3 steps"]
    finish(start(config, folder / "run", "engine.zero_stage=3", *short))
    for name, source, settings, result in (
        (
            "judged",
            "run",
            {"data": {"split": "val"}},
            {"eval/top1": 0.25, "eval/loss": 2.0, "weights_step": 6},
        ),
        (
            "probed",
            "run",
            {"lrs": [0.1], "data": {"train_split": "train", "test_split": "test"}},
            {"test_top1": 0.5},
        ),
        ("strange", "other", {"data": {"split": "val"}}, {"eval/top1": 0.99}),
        ("unfinished", "run", {"data": {"split": "val"}}, None),
    ):
        (folder / name).mkdir()
        data = {"dataset": str(shapes), **settings["data"]}
        whole = settings | {"pretrained": str(folder / source), "data": data}
        (folder / name / "config.yaml").write_text(yaml.safe_dump(whole))
        write_record_of(folder / name, whole)
        if result is not None:
            (folder / name / "result.json").write_text(json.dumps(result))
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return export_of(run, run.parent / "out")


def onnx_answers(out: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(logits)


def near(found: Tensor, wanted: Tensor) -> None:
    assert float(wanted.abs().max()) > 0.05  # otherwise zeros would pass
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.processes
def test_every_format_of_a_zero_3_checkpoint_gives_the_models_answers(
    run: Path, exported: Path
) -> None:
    model = model_of(list_checkpoints(run)[-1])
    theirs = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    program = torch.export.load(exported / "model.pt2").module()
    for batch in (1, 7):
        x = torch.randn(batch, 3, 16, 16)
        with torch.no_grad():
            wanted = model(x)
            assert torch.equal(theirs(x), wanted)
        near(onnx_answers(exported, x), wanted)
        near(program(x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_exported_with_its_own_answers(name: str, tmp_path: Path) -> None:
    model = model_of(write_folder(tmp_path / "folder", spec=FAMILIES[name]))
    out = export_of(tmp_path / "folder", tmp_path / "out", formats=("torch", "onnx"))
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        wanted = model(x)
    program = torch.export.load(out / "model.pt2")
    assert not any(
        "wide_mlps" in str(node.target) for node in program.graph.nodes
    )  # independent of our code
    near(program.module()(x), wanted)
    near(onnx_answers(out, x), wanted)


SMALL = {"num_channels": 512, "depth": 8, "token_hidden": 7, "channel_hidden": 24}
PLAIN = """
import sys
sys.modules["pretrain"] = sys.modules["data_prep"] = None  # not installed
import timm, torch
for place in sys.argv[1:]:
    model = timm.create_model(f"local-dir:{place}/out", pretrained=True).eval()
    print(type(model).__name__)
    torch.save(model(torch.load(f"{place}/x")), f"{place}/y")
"""


@pytest.mark.processes
def test_a_mixer_that_timm_has_loads_in_timm_alone(tmp_path: Path) -> None:
    models = {}
    for place, eps in ((tmp_path / "trained here", 1e-5), (tmp_path / "imported", 1e-6)):
        spec = MixerSpec(kind="mixer", patch_size=16, norm_eps=eps, **SMALL)
        models[place] = model = model_of(write_folder(place / "folder", spec=spec))
        with torch.no_grad():
            for (
                name,
                weight,
            ) in model.named_parameters():  # small features, for which eps matters in every norm
                if "stem" in name or "outer" in name:
                    weight.mul_(3e-3)
        save_folder(
            place / "folder",
            card=Checkpoint.open(place / "folder").card,
            weights=model.state_dict(),
        )
        text = (
            export_of(place / "folder", place / "out", formats=("timm",)) / "README.md"
        ).read_text()
        assert "library_name: timm\n" in text and "timm_names" not in text
        assert ("scales the residual stream by 0.3162" in text) == (eps != 1e-6)
        again = export_of(place / "out", place / "again", formats=("timm",))
        assert (again / "model.safetensors").read_bytes() == (
            place / "out" / "model.safetensors"
        ).read_bytes()
        torch.save(torch.randn(3, 3, 16, 16), place / "x")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *models], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, 2 * "MlpMixer\n"), done.stderr
    for place, model in models.items():
        x, theirs = torch.load(place / "x"), torch.load(place / "y")
        with torch.no_grad():
            torch.testing.assert_close(theirs, model(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                model_of(place / "out")(x), model(x), rtol=1e-4, atol=1e-5
            )  # the import, too


@pytest.mark.slow
def test_pictures_are_normalized_inside_where_it_is_asked_for(tmp_path: Path) -> None:
    model = model_of(write_folder(tmp_path / "folder"))
    out = export_of(tmp_path / "folder", tmp_path / "out", with_preprocessing=True)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    images = (pictures / 255 - list(MEAN)) / list(STD)
    with torch.no_grad():
        wanted = model(torch.from_numpy(images.transpose(0, 3, 1, 2)).float())
    near(onnx_answers(out, torch.from_numpy(pictures)), wanted)
    near(torch.export.load(out / "model.pt2").module()(torch.from_numpy(pictures)), wanted)


def test_a_graph_that_answers_otherwise_is_not_published(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    write_folder(tmp_path / "folder")

    def off(model: ImageModel, **_: object) -> nn.Module:
        other = copy.deepcopy(model)
        other.get_classifier().bias.data[0] += 1e-3
        return other

    monkeypatch.setattr(graphs, "dense", off)
    with fails("mismatch", "formats"):
        export_of(tmp_path / "folder", tmp_path / "out", formats=("torch",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    wanted = [torch.tensor([[1.0, 2.0, 4.0]])]
    found = graphs.agreement(
        wanted, lambda x: x, [torch.tensor([[1.0, 2.0001, 4.0]])], graph="onnx"
    )
    assert found.max_abs == pytest.approx(1e-4, rel=0.01) and found.max_rel == pytest.approx(
        2.5e-5, rel=0.01
    )
    for wrong in (
        torch.tensor([[1.0, 2.0, 4.001]]),
        torch.tensor([[1.0, 2.0, math.nan]]),
        torch.ones(1, 2),
    ):
        with fails("mismatch", "formats"):
            graphs.agreement(wanted, lambda x: x, [wrong], graph="onnx")


def test_nothing_is_overwritten_and_the_same_export_is_done_once(
    tmp_path: Path, capsys: Capture
) -> None:
    write_folder(tmp_path / "folder")
    words = ["export", str(tmp_path / "folder"), str(tmp_path / "out"), "--formats", "timm"]
    assert finetune(words) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert set(before) == {
        "README.md",
        "config.json",
        "export.json",
        "model.safetensors",
        "record.json",
        "sha256.json",
    }
    assert finetune(words) == 0
    assert "exported before" in capsys.readouterr().out
    assert finetune([*words, "license=mit"]) == 2
    assert "license" in capsys.readouterr().err
    write_folder(
        tmp_path / "other", spec=MixerSpec(kind="mixer", patch_size=8, num_channels=4, depth=1)
    )
    assert finetune(["export", str(tmp_path / "other"), *words[2:]]) == 2
    assert "weights_sha256" in capsys.readouterr().err
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "README.md").write_text("mine")
    assert finetune(words) == 2
    assert printed_errors(capsys.readouterr().err) == [("out", "damaged")]
    assert finetune(["export", str(tmp_path / "out"), str(tmp_path / "folder")]) == 2


def test_a_missing_library_and_a_full_disk_are_one_message_each(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    write_folder(tmp_path / "folder")

    def errors_of(*words: str, exit_code: int = 2) -> list[tuple[str, str]]:
        assert finetune(["export", *words]) == exit_code
        out, error = capsys.readouterr()
        assert out == "" and len(error.splitlines()) == 1
        return printed_errors(error)

    source = str(tmp_path / "folder")
    here = (source, str(tmp_path / "out"))
    with monkeypatch.context() as patched:
        patched.setattr(
            "importlib.util.find_spec", lambda name: None if name == "onnxruntime" else name
        )
        assert errors_of(*here) == [("formats", "missing-library")]
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: Mock(free=10))
        assert errors_of(*here) == [("out", "no-space")]
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setitem(TOOLS, "torch", (Mock(side_effect=full), Mock()))
        assert finetune(["export", *here, "--formats", "torch"]) == 1
        assert printed_errors(capsys.readouterr().err) == [("out", "no-space")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_ended_leaves_nothing_there(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_folder(tmp_path / "folder")
    out, output = tmp_path / "out", new_output()
    words = ["export", str(tmp_path / "folder"), str(out), "--formats", "torch"]
    process = begin(
        "tests.training:main", "finetune", words, environment=environments(1)[0], output=output
    )
    wait_until(lambda: any(tmp_path.glob(".tmp-*-out/model.pt2")))
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait([process], timeout_s=300) == [130 if number == signal.SIGTERM else -9]
    left = [path.name for path in tmp_path.iterdir() if path != tmp_path / "folder"]
    assert len(left) == (number == signal.SIGKILL) and not out.exists()
    export_of(tmp_path / "folder", out, formats=("timm",))
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "folder", "out"]


@pytest.mark.processes
def test_the_record_and_the_metadata_say_what_was_made_of_what(run: Path, exported: Path) -> None:
    newest = list_checkpoints(run)[-1]
    assert (exported / "model.safetensors").read_bytes() == (
        newest / "model.safetensors"
    ).read_bytes()
    hashes = json.loads((exported / "sha256.json").read_text())
    assert set(hashes) == {path.name for path in exported.iterdir()} - {
        "sha256.json",
        "record.json",
    }
    assert all(sha256_of(exported / name) == value for name, value in hashes.items())
    record = json.loads((exported / "export.json").read_text())
    assert record["request"]["weights_sha256"] == sha256_of(newest / "model.safetensors")
    assert record["versions"]["onnxruntime"] == onnxruntime.__version__
    for graph in ("onnx", "torch"):
        assert record["checks"][graph]["batch_sizes"] == [1, 2, 5]
        assert 0 <= record["checks"][graph]["max_rel"] < 1e-5
    loaded = onnx.load(exported / "model.onnx")
    onnx.checker.check_model(loaded)
    metadata = {entry.key: entry.value for entry in loaded.metadata_props}
    card = Checkpoint.open(newest).card
    assert (
        json.loads(metadata["mean"]) == list(card.channel_mean)
        and len(json.loads(metadata["classes"])) == 8
    )
    assert metadata["image_size"] == "16" and metadata["input"] == "images"


@pytest.mark.processes
def test_the_card_tells_the_run_and_its_results(exported: Path) -> None:
    text = (exported / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert (
        front["library_name"] == "wide-mlps"
        and front["license"] == "unknown"
        and front["datasets"] == ["shapes-a"]
    )
    metrics = {
        (metric["name"], metric["value"])
        for each in front["model-index"][0]["results"]
        for metric in each["metrics"]
    }
    trained = json.loads((exported.parent / "run" / "result.json").read_text())
    # `probed` has another head, `strange` has other weights, and `unfinished` has no result
    assert metrics == {
        ("top-1", 0.25),
        ("top-1", round(trained["eval/top1"], 6)),
        ("top-5", round(trained["eval/top5"], 6)),
    }
    recorded = read_record(exported)
    assert recorded is not None and recorded.task == "export"
    (parent,) = recorded.parents
    trained_with = RunRecord("pretrain", seed=0)
    run = exported.parent / "run"
    sha256 = sha256_of(run / "checkpoints" / "step-00000006" / "model.safetensors")
    assert parent == Parent(str(run), 6, sha256, trained_with)
    # 768 x 32 + 32 and 32 x 8 + 8. Two blocks of 2 x 32 + 32 x 64 + 64 + 64 x 32 + 32.
    for fact in (
        "| Parameters | 33,384 |",
        "| Multiply-adds | 33,024 for one image |",
        "| Architecture | B-2/Wi-32 (kind mlp, depth 2, width 32, expansion 2.0,",
        "| Data | shapes-a, 240 images, content `",
        "| Started from | random weights |",
        "| Step | 6 |",
        "| Code | commit `",  # the event log has the commit even without tracking
        "optimizer: {name: adamw, lr: 0.001, weight_decay: 0.05",
        "| evaluated | shapes-a | val | top-1 | 25.0% | judged |",
        "| linear probe * | shapes-a | test | top-1 | 50.0% | probed |",
        'timm.create_model("hf-hub:OWNER/NAME", pretrained=True)',
        "what the images show: not stated",
    ):
        assert fact in text, fact
    assert (
        str(exported.parent) not in text + (exported / "export.json").read_text()
    )  # no path of this machine


@pytest.mark.processes
def test_an_older_checkpoint_does_not_take_the_results_of_the_newest(run: Path) -> None:
    older, newest = list_checkpoints(run)[-2:]
    for checkpoint, expected in ((older, False), (newest, True)):
        step = Checkpoint.open(checkpoint).card.step
        results = results_of(checkpoint, run_of(checkpoint), step=step, places=[run.parent])
        assert {
            each.is_of_these_weights for each in results if each.task in ("pretrain", "evaluate")
        } == {expected}


def test_what_is_not_known_is_not_stated(tmp_path: Path) -> None:
    write_folder(tmp_path / "imported", origin="scaling_mlps: B_weights, sha256 0, read as chw")
    source = Checkpoint.open(tmp_path / "imported")
    assert run_of(tmp_path / "imported") is None
    assert results_of(tmp_path / "imported", None, step=0, places=[tmp_path]) == []
    settings = ExportSettings(
        pretrained="imported", out="out", formats=("timm",), license="apache-2.0"
    )
    text = readme(Facts(source, None, [], 1, settings))
    assert yaml.safe_load(text.split("---\n")[1]).keys().isdisjoint({"metrics", "model-index"})
    assert "Imported from a public file (scaling_mlps: B_weights" in text
    for unknown in (
        "number of images not stated",
        "| Step | not stated |",
        "Recipe: not stated",
        "Not stated: no finished",
    ):
        assert unknown in text
    assert "apache-2.0, as stated in the export command" in text and "model.onnx" not in text
