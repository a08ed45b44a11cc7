"""A user's own model in every command; its code runs only if the user names it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import pretrain.models.timm_names  # noqa: F401 (registers the name)
from analysis.cli import main as analysis
from finetune.cli import main as finetune
from finetune.export.graphs import answers_of_onnx, answers_of_pt2
from pretrain.checkpoints.card import read_card
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import list_checkpoints
from pretrain.models import imported
from pretrain.models.build import build_model
from pretrain.models.imported import allow_import, code_of
from pretrain.models.spec import ImportSpec
from pretrain.record import read_record
from tests.conftest import Capture, Patch
from tests.errors import fails, printed_errors
from tests.finetune.tiny import write_folder, write_tuning
from tests.training import Run, final_state, finish, start, write_config

CODE = """
from pathlib import Path
from torch import nn

Path("it-ran").touch()

class MyModel(nn.Module):
    def __init__(self, num_classes, img_size, width=64):
        super().__init__()
        self.num_features = width
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(3 * img_size**2, width), nn.GELU())
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes):
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x):
        return self.first(x)

    def forward_head(self, x, pre_logits=False):
        return x if pre_logits else self.head(x)

class Headless(MyModel):
    forward_head = property()

class Constant(MyModel):
    def reset_classifier(self, num_classes):
        self.head = nn.Linear(self.num_features, 5)
"""
PATH = "my_package.my_models:MyModel"
SPEC = ImportSpec(kind="import", path=PATH, arguments='{"width": 12}')
STEADY = ["schedule={name: constant}", f"model={{import: '{PATH}', width: 12}}"]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """The user's module, not yet imported or allowed."""
    path = tmp_path / "my_package/my_models.py"
    path.parent.mkdir()
    path.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(imported, "_ALLOWED", set())
    imported.hash_package.cache_clear()
    yield path
    forget()


def forget() -> None:
    for name in ("my_package.my_models", "my_package"):
        sys.modules.pop(name, None)


def run(line: str, *, code: int = 0) -> str:
    return finish(Run(line.split(), ranks=1, program="finetune", journal_only=True), code=code)


def by_hand(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    first = linear(x.flatten(1), weights["body.first.1.weight"], weights["body.first.1.bias"])
    return linear(gelu(first), weights["head.weight"], weights["head.bias"])


@pytest.mark.processes
@pytest.mark.usefixtures("code")
def test_every_command_takes_it(shapes: Path, tmp_path: Path) -> None:
    config, trained = write_config(tmp_path, dataset=shapes), tmp_path / "runs/trained"
    finish(start(config, trained, *STEADY, "train.duration=4 steps", ranks=1))
    finish(start(config, Path("resumed"), *STEADY, "train.duration=2 steps", ranks=1))
    finish(Run(["train", "resumed", "train.duration=4 steps"], ranks=1))
    ours, resumed = final_state(trained), final_state(Path("resumed"))
    assert ours.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in ours.items())
    card, record = read_card(list_checkpoints(trained)[-1]), read_record(trained)
    assert card.model == SPEC and record is not None
    assert record.code_sha256 == card.code_sha256 == code_of(SPEC) != ""

    refused = run(f"export {trained} refused", code=2)
    assert printed_errors(refused) == [("allow_import", "unsafe")]
    data, allow = f"data.dataset={shapes} tracking.enabled=false", f"--allow-import {PATH}"
    probe, tuning = tmp_path / "probe.yaml", write_tuning(tmp_path, trained, shapes)
    probe.write_text("{optimizer: sgd, lrs: [0.1], weight_decays: [0.0], epochs: [2]}")
    run(f"probe {probe} pretrained={trained} run_dir=runs/probed {data} {allow}")
    run(f"tune {tuning} run_dir=runs/tuned layer_decay=1.0 {data} allow_import={PATH}")
    run("tune runs/tuned train.duration=12steps")  # the config names the code
    for place in ("runs/probed", "runs/tuned"):
        run(f"evaluate pretrained={place} {data} allow_import={PATH}")
    run(f"predict runs/tuned {shapes} --out seen.csv --features f.parquet {allow}")
    run(f"export {trained} exported {allow}")

    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    wanted = by_hand(ours, x)
    allow_import(PATH)
    models: list[Any] = [
        load_model(Checkpoint.open(place)).eval() for place in (trained, "exported")
    ]
    exported = Path("exported")
    models += [answers_of_pt2(exported / "model.pt2"), answers_of_onnx(exported / "model.onnx")]
    for model in models:
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.processes
def test_a_run_does_not_resume_with_other_code_unless_told(
    code: Path, shapes: Path, tmp_path: Path
) -> None:
    config, place = write_config(tmp_path, dataset=shapes), tmp_path / "run"
    finish(start(config, place, *STEADY, "train.duration=2 steps", ranks=1))
    code.with_name("part.py").touch()
    longer = ["train", str(place), "train.duration=4 steps"]
    said = finish(Run(longer, ranks=1), code=2)
    assert printed_errors(said) == [("model.import", "changed")]
    finish(Run([*longer, "resume=changed_code"], ranks=1))
    assert read_card(list_checkpoints(place)[-1]).code_sha256 == code_of(SPEC)


@pytest.mark.usefixtures("code")
def test_the_code_of_a_checkpoint_does_not_run(
    shapes: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    allow_import(PATH)
    folder = write_folder(tmp_path / "folder", shapes, spec=SPEC)
    Path("it-ran").unlink()
    forget()
    monkeypatch.setattr(imported, "_ALLOWED", {"my_package.my_models:Headless"})
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    words = f"{config} pretrained={folder} data.dataset={shapes} run_dir=run"
    lines = [f"{verb} {words}" for verb in ("probe", "knn", "evaluate")]
    lines += [f"predict {folder} {shapes} --out x.csv", f"export {folder} out"]
    lines += [f"tune {words} epochs=1 global_batch_size=8", f"filters {folder}"]
    for line in lines:
        program = analysis if line.startswith("filters") else finetune
        assert program(line.split()) == 2
        assert printed_errors(capsys.readouterr().err) == [("allow_import", "unsafe")], line
    with fails("unsafe", "allow_import"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert not Path("it-ran").exists() and "my_package" not in sys.modules


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize(
    ("path", "arguments", "error"),
    [
        ("my_package.my_models:YourModel", "{}", "unknown-name"),
        ("my_package.my_models:Headless", "{}", "mismatch"),
        ("my_package.my_models:Constant", "{}", "mismatch"),
        (PATH, '{"wdth": 3}', "mismatch"),
    ],
)
def test_a_class_that_does_not_fit_is_an_error(path: str, arguments: str, error: str) -> None:
    spec = ImportSpec(kind="import", path=allow_import(path) or "", arguments=arguments)
    with fails(error, "model.import"):  # type: ignore[arg-type]
        build_model(spec, num_classes=3, image_size=8)
