"""What the doctor says of cluster/site.env, and how cluster/python.sh starts Python by it."""

import errno
import os
import re
import subprocess
from pathlib import Path
from typing import IO

import pytest

from cluster.checks.files import check_files, check_python, interface_exists, mount_of, read_mounts, told_of_mount
from cluster.checks.site import SETTINGS, read_site
from cluster.checks.site_time import minutes_of
from data_prep.publish import sole_writer
from data_prep.settings import UserError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in SETTINGS or name.startswith(("SBATCH", "SLURM", "BASH_FUNC")):
            monkeypatch.delenv(name)


BROKEN = [
    # text, verdict, found, remedy
    ("export RANK_PER_NODE=4", "FAULT", "line 1: nobody reads RANK_PER_NODE", "RANKS_PER_NODE"),
    ("\nexport SBATCH_PARTITON=gpu", "FAULT", "line 2: nobody reads SBATCH_PARTITON", "SBATCH_PARTITION"),
    ("export A=1 APPTAINER_IMGE=/x.sif", "FAULT", "nobody reads APPTAINER_IMGE", "APPTAINER_IMAGE"),
    ("export SBATCH_COLOUR=red", "warning", "SBATCH_COLOUR is known neither", "man sbatch"),
    ("export MAX_RESTARTS=4", "warning", "MAX_RESTARTS is known neither", "keep it"),
    ("export RANKS_PER_NODE=abc", "FAULT", "RANKS_PER_NODE=abc will not do", "a whole number from 1 on"),
    ("export MAX_IDLE_STARTS=0", "FAULT", "MAX_IDLE_STARTS=0 will not do", "from 1 on"),
    ("export NODE_SCRATCH=scratch/me", "FAULT", "NODE_SCRATCH=scratch/me", "absolute path"),
    ("export PREFLIGHT=no", "FAULT", "PREFLIGHT=no", "0 (no)"),
    ("export CONTAINER_MOUNTS=/data,scratch", "FAULT", "CONTAINER_MOUNTS", "absolute paths"),
    ("export SBATCH_TIMELIMIT=12h", "FAULT", "SBATCH_TIMELIMIT=12h", "hours:minutes:seconds"),
    ("export GLOO_SOCKET_IFNAME=^lo", "FAULT", "GLOO_SOCKET_IFNAME=^lo", "Gloo knows no ^"),
    ("export SBATCH_SIGNAL=USR1@60", "FAULT", "SBATCH_SIGNAL", "remove it"),
    ("SBATCH_ACCOUNT=project1", "warning", "line 1: SBATCH_ACCOUNT set without export", "export"),
    ("\n\nmodule() { echo cannot load $2 >&2; return 1; }\nmodule load gcc", "FAULT", "line 4 fails: module", "mend"),
    ("module() { echo 'ERROR: Unable to locate gcc' >&2; }\nmodule load gcc", "FAULT", "Unable to locate gcc", "avail"),
    ("module load gcc", "FAULT", "line 1 fails: module load gcc", "no modules in this shell"),
    ("export A='x", "FAULT", "does not come to its end", "mend that line"),
    ("exit 0", "FAULT", "does not come to its end", "mend that line"),
]


@pytest.mark.parametrize(("text", "verdict", "found", "remedy"), BROKEN)
def test_a_mistake_in_site_env_has_its_line_and_its_remedy(
    tmp_path: Path, text: str, verdict: str, found: str, remedy: str
) -> None:
    (tmp_path / "site.env").write_text(text + "\n")
    finding = next(each for each in read_site(tmp_path / "site.env").findings if found in each.found)
    assert finding.verdict == verdict and remedy in finding.remedy


GOOD = """
project=vision                                  # a variable for this file
export SBATCH_ACCOUNT=$project SBATCH_GRES=gpu:4 NCCL_DEBUG=INFO MLFLOW_TRACKING_URI=x HF_HOME="/a b"
[ "$USER" = nobody ] && export RANKS_PER_NODE=2
export NODE_SCRATCH=/scratch/$project
"""


def test_what_is_right_is_left_alone_and_its_values_are_what_bash_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "site.env").write_text(GOOD)
    site = read_site(tmp_path / "site.env")
    assert [finding.verdict for finding in site.findings] == ["ok"]
    assert site.environment["SBATCH_ACCOUNT"] == "vision" and site.environment["NODE_SCRATCH"] == "/scratch/vision"


def test_every_line_that_site_env_offers_is_known_and_right(tmp_path: Path) -> None:
    """Each commented command, without its #; modules are what this machine lacks."""
    offered = re.findall(r"^# (export .*)$", (REPOSITORY / "cluster/site.env").read_text(), re.MULTILINE)
    names = [name for line in offered for name in re.findall(r"(\w+)=", line)]
    assert set(names) == set(SETTINGS)
    (tmp_path / "site.env").write_text("\n".join(offered))
    assert [finding.verdict for finding in read_site(tmp_path / "site.env").findings] == ["ok"]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("2-0", 2880),
        ("1-12:30", 2190),
        ("UNLIMITED", float("inf")),
        ("12h", None),
    ],
)
def test_durations_are_read_as_slurm_reads_them(text: str, minutes: float | None) -> None:
    assert minutes_of(text) == minutes


def test_a_directory_belongs_to_the_deepest_mount_above_it() -> None:
    mounts = read_mounts(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        "2 1 0:5 / /home rw master:3 shared:2 - nfs4 server:/home rw\n"
        "3 2 0:6 / /home/a\\040b rw - fuse.glusterfs x rw\n"
    )
    places = {"/home2/x": "ext4", "/home/me": "nfs4", "/home/a b/runs": "glusterfs"}
    assert {path: mount_of(Path(path), mounts).kind for path in places} == places


def test_a_file_system_that_locks_only_what_may_be_written_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def as_nfs(file: IO[str], _: int) -> None:
        if not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", as_nfs)
    assert not [finding for finding in check_files() if "lock" in finding.found]


def test_a_file_system_without_locks_for_all_nodes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not [finding for finding in check_files() if "lock" in finding.found]

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    [first, _] = [finding for finding in check_files() if "lock" in finding.found]
    assert first.verdict == "FAULT" and first.found == "runs/ is on a file system without locks"
    with pytest.raises(UserError, match="its file system has no locks"), sole_writer(tmp_path):
        pass
    mounts = read_mounts("1 0 8:1 / / rw shared:1 - lustre mgs:/x rw,localflock,lazystatfs\n")
    told = told_of_mount(mounts[0], ["runs/"])
    assert told.verdict == "warning" and "nodes do not see each other's locks" in told.found


@pytest.mark.parametrize(
    ("value", "exists"),
    [
        ("ib", True),
        ("=ib", False),
        ("=ib0", True),
        ("^lo,eth", True),
        ("^lo,eth,ib", False),
        ("hsn0", False),
        ("x,eth1", True),
    ],
)
def test_interfaces_are_named_by_nccls_rules(value: str, exists: bool) -> None:
    assert interface_exists(value, ["lo", "eth1", "ib0"]) is exists


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), "no .venv"),
        ((".venv/bin/python",), "half installed"),
        ((".venv/bin/python", ".venv/.installed"), "older than requirements.lock"),
    ],
)
def test_an_environment_that_is_not_whole_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch(mode=0o755)
        os.utime(name, (1000, 1000))
    Path("requirements.lock").write_text("a==2 \\\n    --hash=1\npillow==1 \\\n    --hash=2\nz==1\n")
    (finding,) = check_python({})
    assert finding.verdict == "FAULT" and found in finding.found
    if len(files) == 2:  # the same lines with another date: a checkout, not another lock
        Path(".venv/all.lock").write_text("a==2 \\\n    --hash=1\nz==1\n")
        assert check_python({})[0].verdict == "ok"
        Path(".venv/all.lock").write_text("a==1 \\\n    --hash=1\nz==1\n")
        assert check_python({})[0].verdict == "FAULT"


def test_two_containers_and_links_that_lead_out_of_one_are_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far/runs").mkdir(parents=True)
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    Path("runs").symlink_to(tmp_path / "far/runs")
    stand_in(tmp_path)
    both = {"APPTAINER_IMAGE": str(tmp_path / "apptainer"), "PATH": str(tmp_path)}
    assert [each.verdict for each in check_python(both | {"PYXIS_IMAGE": "x"})] == ["FAULT"]
    runs, hidden = check_python(both)
    assert runs.verdict == "ok" and hidden.verdict == "FAULT" and str(tmp_path / "far/runs") in hidden.remedy
    assert [each.verdict for each in check_python(both | {"CONTAINER_MOUNTS": f"/x:/y,{tmp_path / 'far'}"})] == [
        "ok",
        "warning",
    ]


APPTAINER = r"""#!/bin/bash
# stands in for apptainer: keeps its words, and runs the rest with the variables that it would pass on
printf '%s\n' "$@" >"${0%/*}/words"
[ "$1 $2 $4" = "exec --bind --pwd" ] || exit 99
cd "$5" || exit 98
export PYTHONPATH=/of/the/image
for name in "${!APPTAINERENV_@}"; do export "${name#APPTAINERENV_}=${!name}"; done
while [ "$1" != /image.sif ]; do shift; done
PATH=/usr/local/bin:/usr/bin:/bin exec "${@:2}"
"""
RUN = '. "$1" && python_command && "${python[@]}" -c "import os, sys; print(sys.argv[1:], *map(os.environ.get, sys.argv[3:]))" "$@"'


def stand_in(directory: Path) -> None:
    (directory / "apptainer").write_text(APPTAINER)
    (directory / "apptainer").chmod(0o755)


def test_apptainer_is_given_the_repository_the_mounts_and_our_variables(tmp_path: Path) -> None:
    """The image sets a PYTHONPATH of its own here, as NGC's do: ours wins."""
    stand_in(tmp_path)
    site = {"APPTAINER_IMAGE": "/image.sif", "CONTAINER_MOUNTS": "/data,/w", "NODE_SCRATCH": "/scratch"}
    outside = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "/snapshot/a b", "PYTHONSAFEPATH": "1"}
    words = [
        "bash",
        "-c",
        RUN,
        "job",
        str(REPOSITORY / "cluster/python.sh"),
        "two words",
        "PYTHONPATH",
        "PYTHONNOUSERSITE",
    ]
    done = subprocess.run(words, env=site | outside, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{words[4:]} /snapshot/a b 1\n"
    told = (tmp_path / "words").read_text().splitlines()
    assert told[:5] == ["exec", "--bind", f"{tmp_path},/data,/w,/scratch", "--pwd", str(tmp_path)]


@pytest.mark.parametrize(
    ("venv", "job", "here"), [(True, "", ".venv/bin/python"), (False, "7", "srun"), (False, "", "")]
)
def test_pyxis_is_asked_for_through_srun_alone(tmp_path: Path, venv: bool, job: str, here: str) -> None:
    if venv:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").touch(mode=0o755)
    script = (
        '. "$1" && python_command && printf "%s\\n" "${container_options[@]}" "${python[0]}" "here ${python_here[0]-}"'
    )
    site = {
        "PYXIS_IMAGE": "/i.sqsh",
        "CONTAINER_MOUNTS": "/data,/a:/b",
        "SLURM_JOB_ID": job,
        "PATH": os.environ["PATH"],
    }
    words = ["bash", "-u", "-c", script, "job", str(REPOSITORY / "cluster/python.sh")]
    done = subprocess.run(words, env=site, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--container-image=/i.sqsh",
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data,/a:/b",
        f"--container-workdir={tmp_path}",
        "--container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONNOUSERSITE",
        "/bin/sh",
        f"here {here}",
    ]
