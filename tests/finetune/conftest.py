"""What is probed, judged and exported: one folder of weights over the tiny datasets, and one run."""

from pathlib import Path

import pytest

from pretrain.models.spec import MlpSpec
from tests.finetune.tiny import export_of, write_folder, write_run


@pytest.fixture(scope="session")
def folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a B-1/Wi-24, of the 8 classes of `shapes`."""
    spec = MlpSpec(kind="mlp", depth=1, width=24, expansion=2)
    return write_folder(tmp_path_factory.mktemp("weights") / "folder", shapes, spec=spec)


@pytest.fixture(scope="session")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is exported."""
    return write_run(tmp_path_factory.mktemp("exporting"), shapes)


@pytest.fixture(scope="session")
def exported(run: Path) -> Path:
    return export_of(run, run.parent / "out")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where every evaluation would draw for a second; the commands and ranks of the tests do draw."""
    monkeypatch.setattr("finetune.evaluate.evaluate._draw", lambda *unused: None)
