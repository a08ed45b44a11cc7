"""`wide-mlps init` and the wheel: jobs can be submitted from the created folder without a
checkout."""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.init import HERE
from data_prep import __version__
from tests.cluster.checkouts import has_error, run, stand_in
from tests.cluster.conftest import STAND_IN
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.nightly

FLOORS = ("data_prep", "pretrain", "finetune", "analysis", "cluster")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, because setuptools leaves files next to its input."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in (*FLOORS, "wide_mlps", "configs"):
        shutil.copytree(
            REPOSITORY / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    words = [
        "-m",
        "uv",
        "build",
        "--quiet",
        "--wheel",
        "--no-config",
        "--no-build-isolation",
        "--offline",
        "--python",
    ]
    subprocess.run([sys.executable, *words, sys.executable, "-o", out, source], check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. Its requirements come from the environment of these tests."""
    place = tmp_path_factory.mktemp("environment")
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config", "--offline"]
    subprocess.run([*uv, "venv", "--python", sys.executable, "--allow-existing", place], check=True)
    subprocess.run([*uv, "pip", "install", "--python", place, "--no-deps", wheel], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(
        sysconfig.get_path("purelib")
    )  # its own .pth files, for example this checkout's, are not read
    return place


@pytest.fixture
def folder(installed: Path, tmp_path: Path) -> Path:
    """The folder of a new user, with stand-ins for SLURM."""
    done = run(tmp_path, f"{installed}/bin/wide-mlps", "init", ".")
    assert (
        done.returncode == 0
        and "describe your site in cluster/site.env, then cluster/submit --check" in done.stdout
    ), done.stderr
    for name in ("squeue", "scancel", "sbatch"):
        stand_in(tmp_path, name, STAND_IN)
    return tmp_path


def test_the_wheel_requires_one_pil_and_holds_every_config_and_job_script(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {
            name
            for name in archive.namelist()
            if not name.endswith(".py") and "dist-info" not in name
        }
        (metadata,) = (
            archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")
        )
    configs = {
        f"cluster/{path.relative_to(REPOSITORY)}" for path in REPOSITORY.glob("configs/*/*.yaml")
    }
    files = {
        f"cluster/{path.name}"
        for path in (REPOSITORY / "cluster").iterdir()
        if path.is_file() and path.suffix != ".py"
    }
    files |= {
        str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("pretrain/recommend/*.yaml")
    } | {
        "analysis/papers/page.html",
        "analysis/papers/shared.yaml",
        "finetune/export/README.md.jinja",
    }
    files |= {f"{name}/py.typed" for name in (*FLOORS, "wide_mlps")}
    of_a_checkout = {
        f"cluster/{name}" for name in ("apptainer.def", "Containerfile", "skypilot.yaml")
    }
    assert names == configs | files - of_a_checkout and len(configs) > 20
    assert re.findall(r"^Requires-Dist: (pillow\S*?)[><=;]", metadata, re.MULTILINE) == ["pillow"]
    assert {"onnx", "remote"} <= set(re.findall(r"^Provides-Extra: (\S+)", metadata, re.MULTILINE))
    assert (
        "arxiv.org/abs/2306.13575" in metadata
        and "arxiv.org/abs/2306.01470" in metadata
        and "License-Expression: Apache-2.0\n" in metadata
    )
    assert re.findall(r"^Version: (\S+)", metadata, re.MULTILINE) == [__version__]


def test_every_command_of_the_readme_works_there(folder: Path) -> None:
    section = (REPOSITORY / "README.md").read_text().partition("## On a cluster")[2]
    commands = [
        line.partition("#")[0].split() for line in re.findall(r"^cluster/.*", section, re.MULTILINE)
    ]
    assert commands[0][:2] == ["cluster/submit", "--check"]
    for program, *words in commands[1:]:
        assert (folder / words[-1]).is_file()
        if "scaling_laws" in words[-1]:  # like the plan before, with too many members for a test
            continue
        done = run(folder, program, "--hold", *words)  # the archives may be missing
        assert done.returncode == 0 and done.stderr == "", done.stderr
    calls = [
        line.split()
        for line in (folder / "calls").read_text().splitlines()
        if line.startswith("sbatch")
    ]
    scripts = {word for words in calls for word in words if word.endswith(".slurm")}
    assert {Path(script).name for script in scripts} == {"pretrain.slurm", "data_prep.slurm"}
    assert all(
        Path(script).is_relative_to(folder / "jobs/snapshots") and Path(script).is_file()
        for script in scripts
    )
    done = run(folder, *commands[0])
    assert (
        re.search(r"^ok +python ", done.stdout, re.MULTILINE) and "[unfinished]" in done.stdout
    ), done.stdout


def test_a_snapshot_has_the_code_of_the_package_and_the_site_of_the_folder(
    folder: Path, installed: Path
) -> None:
    (folder / "cluster/site.env").write_text("export PREFLIGHT=0\n")
    taken = Path(run(folder, "cluster/snapshot").stdout.strip())
    (packages,) = installed.glob("lib/python*/site-packages")
    for floor in FLOORS:
        for path in (packages / floor).rglob("*.py"):
            kept = taken / path.relative_to(packages)
            assert not kept.is_symlink() and kept.read_bytes() == path.read_bytes()
    assert (taken / "cluster/site.env").read_text() == "export PREFLIGHT=0\n" and not (
        taken / "cluster/start.sh"
    ).is_symlink()
    assert (taken / "COMMIT").read_text().startswith("wide_mlps-")
    assert (taken / "configs/plan/demo.yaml").is_file()
    (packages / "analysis/later.py").write_text("")  # like an upgrade
    later = Path(run(folder, "cluster/snapshot").stdout.strip())
    (packages / "analysis/later.py").unlink()
    assert (
        later != taken
        and (later / "analysis/later.py").is_file()
        and not (taken / "analysis/later.py").exists()
    )


def test_typed_again_it_keeps_what_was_edited_and_mends_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, script, program = (
        tmp_path / "cluster" / name for name in ("site.env", "probe.slurm", "submit")
    )
    assert main(["init", str(tmp_path)]) == 0
    site.write_text("export SBATCH_PARTITION=mine\n")
    script.unlink()
    program.unlink()
    program.symlink_to(tmp_path / "gone")
    capsys.readouterr()
    assert main(["init", str(tmp_path)]) == 0
    assert f"kept, although the package has another version: {site}\n" in capsys.readouterr().out
    assert (
        site.read_text() == "export SBATCH_PARTITION=mine\n"
        and script.is_file()
        and program.resolve() == HERE / "submit"
    )


def test_where_it_cannot_be_laid_out_one_line_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("own/.venv", "half", "taken/cluster/site.env"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("file", "half/cluster"):
        (tmp_path / file).touch()
    for place, field, code in (
        (REPOSITORY, "", "exists"),
        (tmp_path / "file", "/cluster", ""),
        (tmp_path / "half", "/cluster", ""),
        (tmp_path / "own", "/.venv", "exists"),
        (tmp_path / "taken", "/cluster/site.env", "unreadable"),
        (Path("/sys/mine"), "", "unreadable"),
    ):
        assert main(["init", str(place)]) == (1 if place == Path("/sys/mine") else 2)
        said = capsys.readouterr().err
        assert has_error(said, f"{place}{field}", code) and said.count("\n") == 1, said
