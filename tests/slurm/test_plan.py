"""A plan on a real SLURM with every job script, each job after its dependencies."""

import hashlib
import json
import re

import pyarrow.parquet as pq
import pytest

from data_prep.manifest import load_manifest
from pretrain.tracking.delivery import sync
from tests.slurm.conftest import Cluster

PLAN = """
prepare:
  - config: configs/data_prep/demo_pretrain.yaml
    overrides: [out=data/whole-a, source.num_classes=8, source.num_train_per_class=20, {small}]
    sbatch: [--array=0-1, --cpus-per-task=1]
  - config: configs/data_prep/demo_transfer.yaml
    overrides: [out=data/whole-b, source.num_classes=8, source.num_train_per_class=10, {small}]
    sbatch: [--array=0-1, --cpus-per-task=1]
{runs}
""".replace(
    "{small}",
    "source.num_val_per_class=4, source.image_size=20, image_size=16, samples_per_shard=50,"
    " num_workers=1",
)
FEW = (
    "train.duration=4 steps, train.global_batch_size=16, train.eval_every=4 steps,"
    " checkpoint.every=4 steps"
)
HEAD = 'optimizer=lion, "lrs=[1e-2]", "weight_decays=[0]", epochs=2'
RUNS = """
pretrain:
  config: configs/pretrain/demo_mlp.yaml
  overrides: [run_dir=runs/{name}/pretrain, data.dataset={a}, model.depth=2, model.width=32, schedule.warmup=0 steps, {few}]
  sbatch: [{sbatch}]
probe:
  config: configs/probe/demo.yaml
  overrides: [run_dir=runs/{name}/probe, pretrained=runs/{name}/pretrain, dataset={b}, {head}]
finetune:
  config: configs/finetune/demo.yaml
  overrides: [run_dir=runs/{name}/tune, pretrained=runs/{name}/pretrain, data.dataset={b}, schedule.warmup=0 steps, {few}]
""".replace("{head}", HEAD).replace("{few}", FEW)
MORE = """
knn:
  config: configs/knn/demo.yaml
  overrides: [run_dir=runs/whole/knn, pretrained=runs/whole/pretrain, data.dataset=data/whole-b, "neighbors=[5]"]
evaluate:
  config: configs/evaluate/demo.yaml
  overrides: [run_dir=runs/whole/views, pretrained=runs/whole/tune, data.dataset=data/whole-b, num_views=2]
export:
  config: configs/export/demo.yaml
  overrides: [out=exports/whole, pretrained=runs/whole/tune, "formats=[timm]"]
  nodes: 2
  sbatch: [--mem=500M, --cpus-per-task=1]
figure: {kind: sweep, x: width, hue: task, facet: target}
"""
pytestmark = [pytest.mark.timeout(900), pytest.mark.processes, pytest.mark.nightly]


def jobs_of(said: str) -> list[list[str]]:
    """Return the jobs of each stage from the plan's table: for a dataset the array and the
    merge."""
    rows = (
        re.split(r"^stage  +jobs", said, flags=re.MULTILINE)[1]
        .partition("look: ")[0]
        .splitlines()[1:]
    )
    return [re.split(r"  +", row)[1].split(", ") for row in rows]


def test_a_whole_plan(slurm: Cluster) -> None:
    plan = slurm.root / "whole.yaml"
    plan.write_text(
        PLAN.format(runs=RUNS.format(name="whole", a="data/whole-a", b="data/whole-b", sbatch=""))
        + MORE
    )
    jobs = jobs_of(slurm("cluster/submit", "--time=30", plan.name))
    assert [len(each) for each in jobs] == [2, 2, 1, 1, 1, 1, 1, 1, 1], jobs
    plan.rename(slurm.root / "later.yaml")  # all jobs, including the figure's, read the snapshot
    (
        (a, merge_a),
        (b, merge_b),
        (pretrain,),
        (probe,),
        (tune,),
        (knn,),
        (views,),
        (export,),
        (figure,),
    ) = jobs
    for job in (a, merge_a, b, merge_b, pretrain, probe, tune, knn, views, export, figure):
        slurm.wait(job, "COMPLETED", timeout_s=200)

    awaited = {
        merge_a: (a,),
        merge_b: (b,),
        pretrain: (merge_a,),
        probe: (merge_b, pretrain),
        tune: (merge_b, pretrain),
    }
    awaited |= {knn: (merge_b, pretrain), views: (merge_b, tune), export: (tune, views)}
    awaited[figure] = tuple(awaited)
    tasks = {job: slurm.tasks(job) for job in (a, b, *awaited)}
    assert [len(tasks[job]) for job in (a, b)] == [2, 2]
    for task in (task for each in tasks.values() for task in each):
        assert (task["JobState"], task["Restarts"], task["TimeLimit"]) == (
            "COMPLETED",
            "0",
            "00:30:00",
        ), task
    for job, others in awaited.items():
        ends = [task["EndTime"] for other in others for task in tasks[other]]
        assert min(task["StartTime"] for task in tasks[job]) >= max(ends), (job, others)

    for name, num_samples in (("whole-a", 8 * 24), ("whole-b", 8 * 14)):
        directory = slurm.root / "data" / name
        shards = [
            shard for split in load_manifest(directory).splits.values() for shard in split.shards
        ]
        assert sum(shard.num_samples for shard in shards) == num_samples and len(shards) >= 3
        for shard in shards:
            assert hashlib.sha256((directory / shard.file).read_bytes()).hexdigest() == shard.sha256
    for run in ("pretrain", "probe", "tune", "knn", "views"):
        assert json.loads((slurm.root / "runs/whole" / run / "result.json").read_text())
        sync(
            slurm.root / "runs/whole" / run
        )  # on a busy machine a job may end before the complete event log has arrived
    assert (
        slurm.root / "exports/whole/model.safetensors"
    ).exists()  # written by one process on any number of nodes
    drawn = slurm.root / "runs/plans/whole"
    points = pq.read_table(drawn / "figure-results.parquet", columns=["plan", "task"]).to_pylist()
    assert points == [
        {"plan": "whole", "task": task} for task in ("pretrain", "probe", "tune", "knn", "evaluate")
    ]
    assert {path.suffix for path in drawn.glob("figure.*")} == {".png", ".svg", ".parquet", ".json"}
    parent = (
        "select value from tags where tags.run_uuid = runs.run_uuid and key = 'mlflow.parentRunId'"
    )
    tracked = slurm.mlflow(
        f"select run_uuid, name, status, ({parent}) from runs order by name", runs="runs/whole"
    )
    pretraining, tuned = tracked[1][0], tracked[3][0]
    assert [row[1:] for row in tracked] == [
        ("knn", "FINISHED", pretraining), ("pretrain", "FINISHED", None), ("probe", "FINISHED", pretraining),
        ("tune", "FINISHED", pretraining), ("views", "FINISHED", tuned),
    ]  # fmt: skip

    (slurm.root / "later.yaml").rename(plan)
    before = slurm("squeue", "--noheader", "--states=all", "--format=%i")
    said = slurm("cluster/submit", plan.name)
    assert (
        said.count(": finished, not submitted") == 8
        and "cluster/submit cluster/figure.slurm whole.yaml" in said
    )
    assert slurm("squeue", "--noheader", "--states=all", "--format=%i") == before
