"""`cluster/submit --check` with stand-ins for SLURM's commands; it never submits."""

import os
import shutil
from pathlib import Path

import pytest

from cluster.check import check_job, check_locks, check_python, check_slurm, main
from cluster.submission import Submission, read_submission
from tests.cluster.checkouts import run, stand_in
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.processes

MLP = "configs/pretrain/demo_mlp.yaml"
PARTITIONS = (
    "PartitionName=low Default=YES DefaultTime=00:30:00 MaxTime=2-00:00:00 State=UP\n"
    "PartitionName=high Default=NO DefaultTime=NONE MaxTime=UNLIMITED State=DRAIN"
)
SBATCH = """echo "$*" >>calls
case "$*" in *nowhere*) echo "sbatch: error: invalid partition specified: nowhere" >&2
    echo "allocation failure: Invalid partition name specified" >&2; exit 1 ;; esac
echo "sbatch: Job 9 to start at 2030-01-01T00:00:00 using 8 processors on nodes n1 in partition low" >&2"""


@pytest.fixture
def slurm(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with stand-ins for SLURM."""
    for name in list(os.environ):
        if name.startswith(("SBATCH", "SLURM", "RANKS_PER", "APPTAINER", "PYXIS")):
            monkeypatch.delenv(name)
    stand_in(root, "scontrol", f"echo '{PARTITIONS}'")
    stand_in(root, "sbatch", SBATCH)
    for name in ("srun", "squeue"):
        stand_in(root, name, f"echo {name} >>calls; exit 1")
    monkeypatch.chdir(root)
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(root))
    return root


@pytest.mark.parametrize(
    ("options", "point", "warned"),
    [
        ("rw,flock,lazystatfs", "", False),
        ("rw,localflock,lazystatfs", "", True),
        ("rw,vers=3,nolock,local_lock=all", "", True),
        ("rw,vers=4.2,local_lock=none", "", False),
        ("rw,local_lock=flock", "", True),
        ("rw,localflock", "/another", False),
        ("rw,localflock", "/runs", True),  # only the runs are on this file system
        ("rw,localflock", "/of others", False),
        ("rw,localflock", "/named", True),  # the submission names a path on it
    ],
)
def test_file_systems_with_node_local_locks_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, point: str, warned: bool
) -> None:
    mounted = f"{tmp_path}/a folder{point}"
    Path(mounted).mkdir(parents=True)
    (tmp_path / "a folder/runs").mkdir(exist_ok=True)
    does = f"case $3 in *'{mounted}'|*'{mounted}'/*) echo '{mounted}  {options}' ;; *) echo '/ rw' ;; esac"
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin", "findmnt", does)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "a folder")
    words = ["cluster/pretrain.slurm", MLP, f"run_dir={tmp_path}/a folder/named/x"]
    found = [*check_locks(read_submission(words), {})]
    assert [each.verdict for each in found] == ["warning"] * warned
    assert all(f"{tmp_path}/a folder{point} is mounted with" in each.text for each in found)


@pytest.mark.parametrize(
    ("words", "check", "verdict", "found", "remedy"),
    [
        ([], "submission", "ok", "accepts every job script", ""),
        (["cluster/pretrain.slurm", MLP], "submission", "ok", "on nodes n1 in partition low", ""),
        ([], "time limit", "ok", "00:30:00 for each attempt", "SBATCH_TIMELIMIT"),
        (["-t6:00:00"], "time limit", "ok", "6:00:00 for each", ""),
        (
            ["-p", "nowhere", "cluster/probe.slurm"],
            "submission",
            "FAULT",
            "Invalid partition name",
            "SBATCH_",
        ),
        (["--partition=high"], "partition", "FAULT", "high is DRAIN", "another partition"),
        (["--partition=high"], "time limit", "ok", "UNLIMITED for each", ""),
        (
            ["cluster/pretrian.slurm"],
            "submission",
            "FAULT",
            "no such file",
            "cluster/pretrain.slurm",
        ),
    ],
)
def test_what_is_concluded_from_slurms_answers(
    slurm: Path, words: list[str], check: str, verdict: str, found: str, remedy: str
) -> None:
    (finding,) = [
        each for each in check_slurm(read_submission(words), os.environ) if each.check == check
    ]
    assert finding.verdict == verdict and found in finding.text and remedy in finding.fix
    calls = Path("calls").read_text().splitlines() if Path("calls").exists() else []
    assert all("--test-only" in line for line in calls if line)


def test_without_slurm_there_is_one_fault(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(slurm, "scontrol", "echo unable to contact >&2; exit 1")
    (down,) = check_slurm(Submission(), os.environ)
    assert down.verdict == "FAULT" and "unable to contact" in down.text
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = check_slurm(Submission(), os.environ)
    assert finding.verdict == "FAULT" and "sbatch, srun" in finding.text


@pytest.mark.parametrize(
    ("made", "environment", "verdict", "found"),
    [
        (("requirements.lock", ".venv/bin/python", ".venv/.installed"), {}, "ok", ".venv is "),
        (("requirements.lock",), {}, "FAULT", "there is no .venv"),
        ((".venv/bin/python", "requirements.lock"), {}, "FAULT", "incomplete"),
        (
            (".venv/bin/python", ".venv/.installed", "requirements.lock", "newer"),
            {},
            "FAULT",
            "older than",
        ),
        ((), {"RANK_PYTHON": "env /x.sif python"}, "FAULT", "/x.sif is not readable"),
        ((), {"RANK_PYTHON": "no-such-program exec python"}, "FAULT", "is not in PATH"),
        ((), {"RANK_PYTHON": "/opt/python", "SRUN_OPTIONS": "--container-image=x"}, "ok", "/opt"),
    ],
)
def test_an_environment_that_is_not_whole_is_a_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: tuple[str, ...],
    environment: dict[str, str],
    verdict: str,
    found: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in made:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch(mode=0o755)
    if "newer" in made:
        os.utime(".venv/.installed", (1, 1))
    (finding,) = check_python(Submission(), environment)
    assert finding.verdict == verdict and found in finding.text and (verdict == "ok" or finding.fix)


def test_the_given_job_is_checked_as_it_will_be(slurm: Path, shapes: Path) -> None:
    job = ("cluster/pretrain.slurm", MLP)
    whole = (*job, "train.global_batch_size=32", f"data.dataset={shapes}")
    for words, verdict, found in (
        (("--nodes=2", "--gpus-per-node=1", *whole), "ok", "can be divided over 2 ranks"),
        (("--nodes=3", *whole), "FAULT", "[conflict]"),
        ((*job, "train.duratoin=3"), "FAULT", "[unknown-key]"),
        (job, "FAULT", "[unfinished]"),
    ):
        finding, *more = check_job(read_submission(words), os.environ)
        assert (finding.check, finding.verdict) == ("config", verdict) and found in finding.text, (
            finding
        )
        assert [each.verdict for each in more] == ["warning"] * ("--gpus-per-node=1" in words), more
        assert all(
            "2 nodes would take" in each.text and "use --nodes=1" in each.fix for each in more
        )
    assert not Path("jobs").exists(), "nothing is kept"


def test_a_complete_check_submits_nothing_and_leaves_nothing(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(slurm.iterdir())
    assert main(["-p", "nowhere"]) == 1
    assert "faults: " in capsys.readouterr().out
    assert sorted(slurm.iterdir()) == sorted([*before, slurm / "calls"])


def test_site_env_counts_less_than_what_is_given_and_may_not_be_broken(slurm: Path) -> None:
    (slurm / "cluster").unlink()
    (slurm / "cluster").mkdir()
    for path in (REPOSITORY / "cluster").iterdir():
        if path.name not in ("site.env", "submit"):
            (slurm / "cluster" / path.name).symlink_to(path)
    shutil.copy(REPOSITORY / "cluster/submit", slurm / "cluster/submit")
    site = slurm / "cluster/site.env"
    site.write_text("export SBATCH_TIMELIMIT=3-0 PREFLIGHT=1\n")
    done = run(slurm, "cluster/submit", "--check")
    assert done.returncode == 0 and "3-0 for each attempt" in done.stdout, done
    show = (
        '. cluster/environment.sh cluster/site.env; echo "$PREFLIGHT'
        ' $SBATCH_TIMELIMIT,$JOB_SETTINGS_GIVEN"'
    )
    assert run(slurm, "bash", "-c", show, PREFLIGHT="0").stdout == "0 3-0, PREFLIGHT\n"
    site.write_text("export A='x\n")
    assert "bash cannot read it" in run(slurm, "cluster/submit", "--check").stdout
