"""A plan's grid on a real SLURM: one member fails, and only this member is submitted again."""

import shutil
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster
from tests.slurm.test_plan import jobs_of

GRID = """
probe:
  config: configs/probe/demo.yaml
  overrides: [pretrained=null, optimizer=lion, "lrs=[1e-2]", "weight_decays=[0]", epochs=2]
  grid:
    case:
      first: {{dataset: {shapes}}}
      second: {{dataset: data/late}}
      third: {{dataset: {others}}}
  run_dir: runs/{{name}}/{{case}}
  max_concurrent: 2
"""
pytestmark = [pytest.mark.timeout(900), pytest.mark.processes, pytest.mark.nightly]


def most_at_once(tasks: list[dict[str, str]]) -> int:
    """Return the largest number of simultaneous tasks. SLURM's times are seconds: a task may start
    when another ends."""
    starts = [task["StartTime"] for task in tasks]
    return max(
        sum(task["StartTime"] <= start < task["EndTime"] for task in tasks) for start in starts
    )


def test_a_grid_with_one_failing_member(slurm: Cluster, shapes: Path, other_shapes: Path) -> None:
    plan, runs = slurm.root / "three.yaml", slurm.root / "runs/three"
    plan.write_text(GRID.format(shapes=shapes, others=other_shapes))
    # with --begin, submit accepts missing files that may appear before the job starts
    array = jobs_of(slurm("cluster/submit", "--begin=now", plan.name))[0][0]
    for index, state in ((1, "FAILED"), (0, "COMPLETED"), (2, "COMPLETED")):
        slurm.wait(f"{array}_{index}", state, timeout_s=200)
    tasks = {task["ArrayTaskId"]: task for task in slurm.tasks(array)}
    ends = {index: (task["ExitCode"], task["Restarts"]) for index, task in tasks.items()}
    assert ends == {"0": ("0:0", "0"), "1": ("2:0", "0"), "2": ("0:0", "0")}
    assert most_at_once([*tasks.values()]) == 2, tasks  # although three nodes are free
    assert "data/late" in slurm.log(f"{array}_1").splitlines()[-1], slurm.log(f"{array}_1")
    done = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert {path.parent.name for path in done} == {"first", "third"}

    shutil.copytree(shapes, slurm.root / "data/late")
    again = slurm("cluster/submit", "--parsable", "cluster/grid.slurm", plan.name, "probe")
    slurm.wait(f"{again}_1", "COMPLETED")
    assert [task["ArrayTaskId"] for task in slurm.tasks(again)] == ["1"]
    assert (runs / "second/result.json").exists()
    assert done == {path: path.stat().st_mtime_ns for path in done}
    assert slurm("cluster/submit", plan.name) == "probe: finished, not submitted"
    assert slurm("squeue", "--noheader", "--format=%i", f"--jobs={again}") == ""
    tracked = slurm.mlflow("select name, status from runs order by name", runs="runs/three")
    assert tracked == [(name, "FINISHED") for name in ("first", "second", "third")]
