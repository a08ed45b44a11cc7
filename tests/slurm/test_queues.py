"""A plan on a queue with limits: MaxSubmitJobs, MaxArraySize, and no requeue, on a real SLURM with
slurmdbd. Ranks pretend."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import REPOSITORY, Cluster, need_slurm
from tests.slurm.test_plan import FEW, PLAN

PYTHON = r"""#!/bin/bash
# stands in for .venv/bin/python: a member leaves a result at once; seed 1 waits for USR2 at first, seed 3 is not valid
[ "$2 $3" = "pretrain train" ] || exec REAL "$@"
seed=$(grep -o 'train.seed=[0-9]*' <<<"$*")
echo "${seed#*=}" >>members
case $seed in
    *=1) [ -e waited ] || { trap 'touch waited; exit 0' USR2; touch waiting; while :; do sleep 0.1; done; } ;;
    *=3) exit 2 ;;
esac
PYTHONPATH=REPOSITORY exec REAL -c 'import sys
from cluster.work import Work
from tests.cluster.checkouts import finish
finish(Work("pretrain", sys.argv[1], tuple(sys.argv[2:])))' "${@:4}"
"""
SBATCH = """#!/bin/sh
# the real one, except where a file says otherwise
[ ! -e kill ] || { rm kill; kill -KILL $PPID; exit 1; }
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
LIMIT = 5
pytestmark = [pytest.mark.timeout(300), pytest.mark.processes, pytest.mark.nightly]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm()
    folder = tmp_path_factory.mktemp("bin")
    real = {"python": sys.executable, "sbatch": "/usr/bin/sbatch"}
    for name, text in (("python", PYTHON), ("sbatch", SBATCH)):
        path = folder / name
        path.write_text(text.replace("REAL", real[name]).replace("REPOSITORY", str(REPOSITORY)))
        path.chmod(0o755)
    limits = {"LAB_SUBMIT_LIMIT": str(LIMIT), "LAB_CONF": "MaxArraySize=4"}
    with Cluster(python=folder / "python", **limits) as cluster:
        with open(cluster.root / "cluster/site.env", "a") as site:
            site.write(f'export PATH={folder}:$PATH IN_JOB="$SLURM_JOB_ID"\n')
        yield cluster


def submit(lab: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cluster/submit", "--no-requeue", *words],
        cwd=lab.root,
        env=lab.environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def logs(lab: Cluster) -> str:
    return "".join(f"== {path.name}\n{path.read_text()}" for path in lab.root.glob("*.log"))


def test_a_plan_larger_than_the_queue(lab: Cluster) -> None:
    head = PLAN.format(runs=GRID).partition("  - config: configs/data_prep/demo_transfer.yaml")[0]
    (lab.root / "large.yaml").write_text(head + GRID)
    (lab.root / "kill").touch()  # before the first job
    assert submit(lab, "large.yaml").returncode == -9
    lab("scontrol", "update", "PartitionName=low", "State=DOWN")
    cut = submit(lab, "large.yaml")
    print(cut.stdout, cut.stderr)
    assert cut.returncode == 0
    (lab.root / "down").touch()
    again = submit(lab, "large.yaml")
    print(again.stdout, again.stderr)
    lab("scontrol", "update", "PartitionName=low", "State=UP")
    deadline_s = time.monotonic() + 100
    most = 0
    while left := lab("squeue", "-h", "-r", "-o", "%i %j %T %E").splitlines():
        most = max(most, len(left))
        if (lab.root / "waiting").exists() and not (lab.root / "waited").exists():
            task = next(line.split()[0] for line in left if "grid RUNNING" in line)
            lab("scancel", "--batch", "--signal=USR2", task)
        assert time.monotonic() < deadline_s, (left, logs(lab))
        time.sleep(0.3)
    print(logs(lab))
    print(lab("squeue", "--states=all", "-r", "-o", "%i %j %T %S %e"))
    print((lab.root / "members").read_text())
    print(most)
    assert 0
