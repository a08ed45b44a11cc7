"""The folder of weights that tests probe, evaluate and export."""

from pathlib import Path

import pytest

from pretrain.models.spec import MlpSpec
from tests.finetune.tiny import write_folder


@pytest.fixture(scope="session")
def folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A B-1/Wi-24 for the 8 classes of `shapes`."""
    spec = MlpSpec(kind="mlp", depth=1, width=24, expansion=2)
    return write_folder(tmp_path_factory.mktemp("weights") / "folder", shapes, spec=spec)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip an evaluation's figures (one second) in this process. Commands and ranks draw
    figures."""
    monkeypatch.setattr("finetune.evaluate.report.draw", lambda *words, **also: [])
