"""What an export says of itself: its record, its metadata and its card have true facts, and nothing that is not known."""

import json
from pathlib import Path

import onnx
import onnxruntime
import yaml

from data_prep.publish import sha256_of
from finetune.export.config import ExportSettings
from finetune.export.model_card import Facts, readme
from finetune.runs import results_of, run_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import list_checkpoints
from tests.finetune.tiny import write_folder


def test_the_record_and_the_metadata_say_what_was_made_of_what(run: Path, exported: Path) -> None:
    newest = list_checkpoints(run)[-1]
    assert (exported / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
    hashes = json.loads((exported / "sha256.json").read_text())
    assert set(hashes) == {path.name for path in exported.iterdir()} - {"sha256.json"}
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
    assert json.loads(metadata["mean"]) == list(card.channel_mean) and len(json.loads(metadata["classes"])) == 8
    assert metadata["image_size"] == "16" and metadata["input"] == "images"


def test_the_card_tells_the_run_and_its_results(exported: Path) -> None:
    text = (exported / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "wide-mlps" and front["license"] == "unknown" and front["datasets"] == ["shapes-a"]
    metrics = {(each["metrics"][0]["name"], each["metrics"][0]["value"]) for each in front["model-index"][0]["results"]}
    trained = json.loads((exported.parent / "run" / "result.json").read_text())
    # the probe's head is not among these weights, `strange` is of others, `unfinished` has no result
    assert metrics == {("top-1", 0.25), ("top-1", round(trained["eval/top1"], 6)), ("top-5", round(trained["eval/top5"], 6))}
    # by hand: 768 x 32 + 32, two blocks of 2 x 32 + 32 x 64 + 64 + 64 x 32 + 32, 32 x 8 + 8
    for fact in (
        "| Parameters | 33,384 |",
        "| Multiply-adds | 33,024 for one image |",
        "| Architecture | B-2/Wi-32 (kind mlp, depth 2, width 32, expansion 2.0,",
        "| Data | shapes-a, 240 images, content `",
        "| Started from | random weights |",
        "| Step | 6 |",
        "| Code | not stated |",  # tracking was off
        "optimizer: {name: adamw, lr: 0.001, weight_decay: 0.05",
        "| evaluation | shapes-a | val | top-1 | 25.0% | judged |",
        "| linear probe * | shapes-a | test | top-1 | 50.0% | probed |",
        'timm.create_model("hf-hub:OWNER/NAME", pretrained=True)',
        "what the pictures show: not stated",
    ):
        assert fact in text, fact
    assert str(exported.parent) not in text + (exported / "export.json").read_text()  # no path of this machine


def test_an_older_checkpoint_does_not_take_the_results_of_the_newest(run: Path) -> None:
    older, newest = list_checkpoints(run)[-2:]
    for checkpoint, expected in ((older, False), (newest, True)):
        step = Checkpoint.open(checkpoint).card.step
        results = results_of(checkpoint, run_of(checkpoint), step=step, places=[run.parent])
        assert {each.is_of_these_weights for each in results if each.task in ("pretrain", "evaluate")} == {expected}


def test_what_is_not_known_is_not_stated(tmp_path: Path) -> None:
    write_folder(tmp_path / "imported", origin="scaling_mlps: B_weights, sha256 0, read as chw")
    card = Checkpoint.open(tmp_path / "imported").card
    assert run_of(tmp_path / "imported") is None
    assert results_of(tmp_path / "imported", None, step=0, places=[tmp_path]) == []
    settings = ExportSettings(pretrained="imported", out="out", formats=("timm",), license="apache-2.0")
    text = readme(Facts(card, None, [], 1, "0", settings))
    assert yaml.safe_load(text.split("---\n")[1]).keys().isdisjoint({"metrics", "model-index"})
    assert "Imported from a public file (scaling_mlps: B_weights" in text
    for unknown in ("number of images not stated", "| Step | not stated |", "Recipe: not stated", "Not stated: no finished"):
        assert unknown in text
    assert "apache-2.0, as stated by whoever" in text and "model.onnx" not in text
