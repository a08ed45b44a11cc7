"""A plan on a queue with limits (MaxSubmitJobs, no requeue) on a real SLURM with slurmdbd. Ranks
are simulated."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY
from tests.slurm.conftest import ACCOUNTING, Cluster, need_slurm
from tests.slurm.test_plan import FEW, PLAN

PYTHON = r"""#!/bin/bash
# stands in for .venv/bin/python: a member leaves a result at once; seed 1 waits for USR2 at first, seed 3 is not valid
[ "$1 $2 $3" = "-m pretrain train" ] || exec REAL "$@"
seed=$(grep -o 'train.seed=[0-9]*' <<<"$*")
echo "${seed#*=}" >>members
case $seed in
    *=1) [ -e waited ] || { trap 'touch waited; exit 0' USR2 TERM; echo "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}" >waiting; while :; do sleep 0.1; done; } ;;
    *=3) exit 2 ;;
    *=7) exit 9 ;;
esac
PYTHONPATH=REPOSITORY exec REAL -c 'import sys
from cluster.work import Work
from tests.cluster.checkouts import finish
finish(Work("pretrain", sys.argv[1], tuple(sys.argv[2:])))' "${@:4}"
"""
SBATCH = """#!/bin/sh
# the real one, except where a file says otherwise
[ ! -e kill ] || { left=$(($(cat kill) - 1)); echo $left >kill; [ $left != 0 ] || { rm kill; kill -KILL $PPID; exit 1; }; }
[ ! -e down ] || [ -z "$IN_JOB" ] || { rm down; echo "sbatch: error: Unable to contact slurm controller" >&2; exit 1; }
exec REAL "$@"
"""
GRID = f"""
pretrain:
  config: configs/pretrain/demo_mlp.yaml
  overrides: [data.dataset=data/whole-a, model.depth=2, model.width=32, schedule.warmup=0 steps, {FEW}]
  seeds: [0, 1, 2, 3, 4, 5]
  run_dir: "runs/{{name}}/{{seed}}"
"""  # fmt: skip
RUN = ("configs/pretrain/demo_mlp.yaml", "train.global_batch_size=16", "schedule.warmup=0 steps")
LIMIT = 5
pytestmark = [pytest.mark.timeout(300), pytest.mark.processes, pytest.mark.nightly]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm(*ACCOUNTING)
    folder = tmp_path_factory.mktemp("bin")
    real = {"python": sys.executable, "sbatch": "/usr/bin/sbatch"}
    for name, text in (("python", PYTHON), ("sbatch", SBATCH)):
        path = folder / name
        path.write_text(text.replace("REAL", real[name]).replace("REPOSITORY", str(REPOSITORY)))
        path.chmod(0o755)
    with Cluster(python=folder / "python", LAB_SUBMIT_LIMIT=str(LIMIT)) as cluster:
        with open(cluster.root / "cluster/site.env", "a") as site:
            site.write(f'export PATH={folder}:$PATH IN_JOB="$SLURM_JOB_ID"\n')
        yield cluster


def logs(lab: Cluster) -> str:
    return "".join(f"== {path.name}\n{path.read_text()}" for path in lab.root.glob("*.log"))


def await_end(lab: Cluster) -> None:
    waiting, deadline_s = lab.root / "waiting", time.monotonic() + 150
    while left := lab("squeue", "-h", "-r", "-o", "%i %j %T %E").splitlines():
        num_jobs = len([line for line in left if "COMPLETING" not in line])
        assert num_jobs <= LIMIT and time.monotonic() < deadline_s, (left, logs(lab))
        task = waiting.read_text().strip() if waiting.exists() else ""
        if "_" in task and not (lab.root / "waited").exists():
            lab("scancel", "--batch", "--signal=USR2", task)
        time.sleep(0.3)


def test_each_member_of_a_plan_larger_than_the_queue_runs_once(lab: Cluster) -> None:
    """The first command is killed and the second is superfluous. The first job cannot submit the
    rest, member 1 receives a signal, and member 3 fails."""
    head = PLAN.format(runs=GRID).partition("  - config: configs/data_prep/demo_transfer.yaml")[0]
    (lab.root / "large.yaml").write_text(head + GRID)
    lab("scontrol", "update", "PartitionName=low", "State=DOWN")
    (lab.root / "kill").write_text("3")
    assert lab.submit("--no-requeue", "large.yaml").returncode == -9
    cut = lab("squeue", "-h", "-r", "-o", "%i").splitlines()
    assert len(cut) == 3  # the dataset's parts and merge
    began = lab.submit("--no-requeue", "large.yaml")
    assert began.returncode == 0 and "the rest of the plan" in began.stdout, began
    queued = lab("squeue", "-h", "-r", "-o", "%i").splitlines()
    assert {*cut} < {*queued} and len(queued) == LIMIT
    again = lab.submit("--no-requeue", "large.yaml")
    assert again.returncode == 0 and "nothing is submitted" in again.stderr, again
    assert lab("squeue", "-h", "-r", "-o", "%i").splitlines() == queued
    (lab.root / "down").touch()
    lab("scontrol", "update", "PartitionName=low", "State=UP")
    await_end(lab)

    assert sorted((lab.root / "members").read_text().split()) == [*"0112345"], logs(lab)
    done = {path.parent.name for path in lab.root.glob("runs/large/*/result.json")}
    assert done == {*"01245"}
    assert not (lab.root / "down").exists() and "this queue does not requeue jobs" in logs(lab)
    lines = lab("squeue", "-h", "-r", "--states=all", "-o", "%j %S %e %T").splitlines()
    lines = [line for line in lines if "CANCELLED" not in line]  # cancelled jobs never started
    ends = [line.split()[2] for line in lines if line.startswith("data_prep")]
    starts = [line.split()[1] for line in lines if line.startswith("grid")]
    assert len(ends) == 3 and max(ends) <= min(starts)
    last = lab.submit("--no-requeue", "large.yaml")  # submits the failed member again
    assert "--array=3 " in last.stdout and "rest" not in last.stdout, last
    await_end(lab)
    assert sorted((lab.root / "members").read_text().split()) == [*"01123345"]


def test_what_waits_for_a_preempted_job_waits_for_its_successor(lab: Cluster, shapes: Path) -> None:
    words = (*RUN, f"data.dataset={shapes}")
    options = ("--nodes=1", "--time=60", "--no-requeue", "--parsable", "cluster/pretrain.slurm")
    for name in ("waiting", "waited"):
        (lab.root / name).unlink(missing_ok=True)
    first = lab("cluster/submit", *options, *words, "train.seed=1", "run_dir=runs/alone")
    after = lab.sbatch(f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes", "--wrap=true")
    deadline_s = time.monotonic() + 60
    while not (lab.root / "waiting").exists():
        assert time.monotonic() < deadline_s, logs(lab)
        time.sleep(0.1)
    where = f"--nodelist={lab.job(first)['NodeList']}"
    lab.sbatch("--partition=high", where, "--exclusive", "--wrap=true")
    await_end(lab)
    successor = (lab.root / "jobs" / first / "successor").read_text()
    jobs = [lab.job(number) for number in (first, successor, after)]
    assert [job["JobState"] for job in jobs] == ["COMPLETED"] * 3, logs(lab)
    assert (lab.root / "runs/alone/result.json").exists()
    assert jobs[0]["EndTime"] <= jobs[1]["StartTime"] < jobs[1]["EndTime"] <= jobs[2]["StartTime"]
    same = ("NumNodes", "NumTasks", "MinMemoryNode", "OverSubscribe", "TimeLimit", "Requeue")
    assert [jobs[0][name] for name in same] == [jobs[1][name] for name in same]


def test_successors_of_a_job_that_gets_nowhere_end(lab: Cluster, shapes: Path) -> None:
    words = (*RUN, f"data.dataset={shapes}")
    options = ("--no-requeue", "--parsable", "cluster/pretrain.slurm")
    job = lab("cluster/submit", *options, *words, "train.seed=7", "run_dir=runs/broken")
    await_end(lab)
    chain = [job]
    while (noted := lab.root / "jobs" / chain[-1] / "successor").exists():
        chain.append(noted.read_text())
    assert [lab.job(each)["JobState"] for each in chain] == ["COMPLETED", "COMPLETED", "FAILED"]
    assert "failed 3 times without a new checkpoint" in lab.log(chain[-1])
