"""The doctor against stand-ins of SLURM's commands: what it concludes from their answers, and that it never submits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.checks.job import check_job
from cluster.checks.nodes import judge, read_answers, srun_words
from cluster.checks.slurm import check_slurm, judge_preemption
from cluster.doctor import main
from cluster.slurm import read_submission

REPOSITORY = Path(__file__).parents[2]
PARTITIONS = (
    "PartitionName=low Default=YES DefaultTime=00:30:00 GraceTime=0 MaxTime=2-00:00:00 PriorityTier=1"
    " PreemptMode=CANCEL State=UP\n"
    "PartitionName=high Default=NO DefaultTime=NONE GraceTime=0 MaxTime=UNLIMITED PriorityTier=9 PreemptMode=OFF"
    " State=DRAIN\n"
)
STAND_INS = {
    "scontrol": f"""case "$*" in
        ping) echo "Slurmctld(primary) at c is ${{CONTROLLER:-UP}}" ;;
        "show config") printf '%s = %s\\n' MaxArraySize 501 PreemptType preempt/partition_prio ClusterName c ;;
        "-o show partition") printf '%s' '{PARTITIONS}' ;;
        esac""",
    "sinfo": """case "$*" in
        *%R*) printf 'n1 low\\nn1 high\\n' ;;
        *%c*) echo "$CPUS" ;;
        *%G*) echo 'gpu:a100:4(S:0-1)' ;;
        *) printf 'low*\\nhigh\\n' ;;
        esac""",
    "sbatch": """echo "$* ${SBATCH_ACCOUNT:-}" >>"$CALLS"
        case "$*" in *nowhere*) echo "sbatch: error: invalid partition specified: nowhere" >&2
            echo "allocation failure: Invalid partition name specified" >&2; exit 1 ;; esac
        echo "sbatch: Job 9 to start at 2030-01-01T00:00:00 using 8 processors on nodes n1 in partition low" >&2""",
    "srun": 'echo "srun $*" >>"$CALLS"; exit 1',
    "squeue": "exit 1",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with the stand-ins, in a small checkout."""
    for name in list(os.environ):
        if name.startswith(("SBATCH", "SLURM")):
            monkeypatch.delenv(name)
    bin_, checkout = tmp_path / "bin", tmp_path / "checkout"
    bin_.mkdir()
    for name, body in STAND_INS.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    for name in ("cluster", "pretrain", "configs", ".venv/bin", "runs"):
        (checkout / name).mkdir(parents=True)
    for name in ("pyproject.toml", "requirements.lock", ".venv/bin/python", ".venv/.installed"):
        (checkout / name).touch(mode=0o755)
    (checkout / "cluster/pretrain.slurm").write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    (checkout / "cluster/site.env").write_text("export SBATCH_ACCOUNT=mine\n")
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return dict(os.environ)


@pytest.mark.parametrize(
    ("words", "check", "verdict", "found", "remedy"),
    [
        ([], "submission", "ok", "would take pretrain.slurm (partition low, nodes n1)", ""),
        ([], "time limit", "warning", "lasts 30 min", "up to 2 d"),
        ([], "preemption", "warning", "preempted by high without time to save", "submit the same command again"),
        ([], "arrays", "warning", "500 tasks", "split"),
        (["-t", "3-0"], "time limit", "FAULT", "lasts 3 d", "at most 2 d"),
        (["--time=8"], "time limit", "FAULT", "lasts 8 min", "5 min before"),
        (["-t6:00:00"], "time limit", "ok", "lasts 6 h, saves 5 min before", ""),
        (["-p", "nowhere"], "submission", "FAULT", "Invalid partition name", "one of high, low"),
        (["--partition=high"], "partition", "FAULT", "high is DRAIN", "another partition"),
        (["--partition=high"], "preemption", "ok", "not preempted", ""),
        (["cluster/pretrian.slurm"], "script", "FAULT", "no such file", "cluster/pretrain.slurm"),
    ],
)
def test_what_is_concluded_from_slurms_answers(
    slurm: dict[str, str], words: list[str], check: str, verdict: str, found: str, remedy: str
) -> None:
    findings = [each for each in check_slurm(read_submission(words), slurm) if each.check == check]
    assert [each.verdict for each in findings] == [verdict]
    assert found in findings[0].found and remedy in findings[0].remedy


@pytest.mark.parametrize(("cpus", "verdicts"), [("2+", ["FAULT"]), ("8", [])])
def test_what_no_node_can_hold_is_said(slurm: dict[str, str], cpus: str, verdicts: list[str]) -> None:
    """sbatch takes such an array, which then pends for ever."""
    findings = check_slurm(read_submission(["-c", "4"]), slurm | {"CPUS": cpus})
    found = [each for each in findings if each.check == "CPUs"]
    assert [each.verdict for each in found] == verdicts
    assert not found or "--cpus-per-task=2" in found[0].remedy


@pytest.mark.parametrize(
    ("mode", "grace", "parameters", "verdict", "found"),
    [
        ("REQUEUE", "60", "(null)", "ok", "ranks are told (TERM), with 60 s to save; then the job is queued again"),
        ("REQUEUE", "60", "preempt_send_user_signal", "ok", "the job is told (USR2), with 60 s"),
        ("REQUEUE", "0", "(null)", "warning", "without time to save (GraceTime=0), and queued again"),
        ("CANCEL", "60", "(null)", "warning", "then SLURM cancels the job"),
        ("GANG,SUSPEND", "0", "(null)", "warning", "suspended by high"),
        ("OFF", "0", "(null)", "ok", "not preempted"),
    ],
)
def test_preemption_in_words(mode: str, grace: str, parameters: str, verdict: str, found: str) -> None:
    settings = {"PreemptType": "preempt/partition_prio", "SlurmctldParameters": parameters}
    (finding,) = judge_preemption("low", {"PreemptMode": mode, "GraceTime": grace}, settings, above=["high"])
    assert finding.verdict == verdict and found in finding.found


def test_without_slurm_there_is_one_clear_line(slurm: dict[str, str], tmp_path: Path) -> None:
    (finding,) = check_slurm(read_submission([]), {"PATH": str(tmp_path)})
    assert (finding.verdict, finding.found) == ("FAULT", "no SLURM here") and "make study" in finding.remedy
    (down,) = check_slurm(read_submission([]), slurm | {"CONTROLLER": "DOWN"})
    assert down.verdict == "FAULT" and "does not answer" in down.found


def test_a_whole_visit_submits_nothing_leaves_nothing_and_fits_the_terminal(
    slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    before = sorted(Path().rglob("*"))
    assert main([]) == 0
    assert main(["-p", "nowhere"]) == 1
    assert main(["--nodes"]) == 1  # a number is missing: the look from a node is --on-nodes
    assert sorted(Path().rglob("*")) == before
    calls = Path(os.environ["CALLS"]).read_text().splitlines()
    assert calls == ["--test-only cluster/pretrain.slurm mine", "--test-only -p nowhere cluster/pretrain.slurm mine"]
    told = capsys.readouterr().out
    assert "jobs can run; read the warnings once" in told and "jobs will not run well" in told
    assert max(len(line) for line in told.splitlines()) <= 80


def test_a_checkout_that_is_not_whole_is_one_fault_and_no_crash(
    slurm: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pyproject.toml", "requirements.lock"):
        Path(name).unlink()
    assert main([]) == 1
    assert "no pyproject.toml, requirements.lock" in " ".join(capsys.readouterr().out.split())


def test_whoever_stops_reading_sees_no_traceback(slurm: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "cluster.doctor"]
    done = subprocess.run(
        words, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=slurm | {"PYTHONPATH": str(REPOSITORY)}
    )
    os.close(write)
    assert done.stderr == ""


# ---- the given job ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cluster/pretrain.slurm"], [("config", "FAULT", "is given no config")]),
        (
            ["cluster/pretrain.slurm", "CONFIG", "optimizer.rate=1"],
            [("config", "FAULT", "optimizer.rate: unknown key")],
        ),
        (
            ["cluster/grid.slurm", "configs/plan/demo_grid.yaml", "pretrain", "train.seed=1"],
            [("config", "FAULT", "overrides are written in the plan file")],
        ),
        (
            ["cluster/data_prep.slurm", "configs/data_prep/cifar10.yaml", "source.path=data/none.tar.gz"],
            [("config", "FAULT", "source.path: data/none.tar.gz is not there")],
        ),
        (
            ["--nodes=3", "cluster/pretrain.slurm", "CONFIG", "data.dataset=data/none", "run_dir=runs/none"],
            [
                ("config", "ok", "resolves"),
                ("dataset", "FAULT", "data/none has no manifest"),
                ("batch", "FAULT", "on 3 nodes x 4 ranks: train.global_batch_size: 512"),
            ],
        ),
        (
            [
                "-N2",
                "-d",
                "afterok:7",
                "cluster/pretrain.slurm",
                "CONFIG",
                "data.dataset=data/none",
                "run_dir=runs/none",
            ],
            [("config", "ok", ""), ("dataset", "warning", "data/none"), ("batch", "ok", "64 samples a step for each")],
        ),
    ],
)
def test_the_given_job_is_resolved_as_it_will_be(
    slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[tuple[str, str, str]]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    words = ["configs/pretrain/demo_mlp.yaml" if word == "CONFIG" else word for word in words]
    findings = check_job(read_submission(words), slurm | {"PYTHONPATH": str(REPOSITORY)})
    assert [(each.check, each.verdict) for each in findings] == [(check, verdict) for check, verdict, _ in expected]
    for finding, (_, _, found) in zip(findings, expected, strict=True):
        assert found in finding.found


# ---- from a node ------------------------------------------------------------------------------------------------------


def test_srun_goes_where_the_job_would_go_and_asks_for_a_gpu(slurm: dict[str, str]) -> None:
    submission = read_submission(
        ["-p", "low", "-t", "9:00", "--signal=USR2@9", "--parsable", "-N", "2", "cluster/pretrain.slurm"]
    )
    words = srun_words(submission, slurm | {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "high"})
    assert words[:4] == ["srun", "--partition=low", "--account=mine", "--gres=gpu:1"] and "--nodes=2" in words
    assert "--time=2" in words and not any("signal" in word or word == "--parsable" for word in words)


HEALTHY = "\n".join(
    f"n1\t{key}\t{value}"
    for key, value in {
        "repository": "yes",
        "python": "yes 3.11",
        "scratch": "yes 800",
        "exec": "yes",
        "interfaces": "lo ib0",
        "scontrol": "yes",
        "compiler": "yes",
        "gpus": "1 given",
    }.items()
)


@pytest.mark.parametrize(
    ("was", "says", "verdict", "found"),
    [
        (
            "",
            "",
            "ok",
            "n1, n2: repository and Python there, /local writable (800 GB free), scontrol answers, nvidia-smi sees 1 GPU",
        ),
        ("repository\tyes", "repository\tno", "FAULT", "n2: does not see"),
        ("yes 3.11", "no bad interpreter", "FAULT", "n2: Python does not start there (bad interpreter)"),
        ("scratch\tyes 800", "scratch\tno", "FAULT", "n2: cannot write to /local"),
        ("exec\tyes", "exec\tno", "FAULT", "n2: nothing can be run in /local"),
        ("lo ib0", "lo eth0", "FAULT", "n2: NCCL_SOCKET_IFNAME=ib0, but there are only lo eth0"),
        ("scontrol\tyes", "scontrol\tno", "warning", "n2: scontrol does not answer"),
        ("compiler\tyes", "compiler\tno", "warning", "n2: no C compiler"),
    ],
)
def test_what_one_of_two_nodes_lacks_is_said_with_its_name(was: str, says: str, verdict: str, found: str) -> None:
    second = HEALTHY.replace("n1\t", "n2\t")
    answers = read_answers("noise of a prologue\n" + HEALTHY + "\n" + (second.replace(was, says) if was else second))
    (finding,) = judge(answers, {"NODE_SCRATCH": "/local", "NCCL_SOCKET_IFNAME": "ib0"})
    assert finding.verdict == verdict and found in finding.found
    assert finding.remedy or verdict == "ok"
