"""Files that other tools read agree with the package: citation, changelog, workflow and notebook."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep import __version__
from tests.ranks import REPOSITORY

NOTEBOOKS = sorted(REPOSITORY.glob("notebooks/*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_citation_and_changelog_have_the_version_and_the_license() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    versions = re.findall(r"^## \[(.*?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def test_the_workflow_only_calls_the_script_of_ci() -> None:
    (job,) = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command == 'sudo -E env "PATH=$PATH" .ci/run'


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs(notebook: Path) -> None:
    for cell in code_cells(notebook):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is a shell command after "!", or Python."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path / "notebooks")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    names: dict[str, Any] = {}
    for cell in code_cells(notebook):
        code = "".join(cell["source"])
        if code.startswith("!"):
            subprocess.run(code[1:], shell=True, check=True, env=environment)
        else:
            exec(code, names)
    assert names["probabilities"].shape == (len(names["images"]), len(names["dataset"].classes))
    assert all(axis.get_title() for axis in names["axes"])
