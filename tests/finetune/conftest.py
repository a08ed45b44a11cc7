"""What is probed, judged and exported: one folder of weights over the tiny datasets."""

from pathlib import Path

import pytest

from pretrain.models.spec import MlpSpec
from tests.finetune.tiny import write_folder


@pytest.fixture(scope="session")
def folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a B-1/Wi-24, of the 8 classes of `shapes`."""
    spec = MlpSpec(kind="mlp", depth=1, width=24, expansion=2)
    return write_folder(tmp_path_factory.mktemp("weights") / "folder", shapes, spec=spec)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where every evaluation would draw for a second; the commands and ranks of
    the tests do draw."""
    monkeypatch.setattr("finetune.evaluate.report.draw", lambda *words, **also: [])
