"""GPUs and CPUs from sbatch's options and SLURM's variables: functions of strings."""

import pytest

from cluster.slurm import count_gpus, cpus_per_rank, facts, shape
from cluster.submission import read_submission


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("none", 0),
        ("gpu", 1),
        ("gpu:4", 4),
        ("gpu:h100", 1),
        ("gpu:4,x:1", 4),
        ("x:3,gpu:h100:2", 2),
        ("gpu:3g.20gb:7", 7),
        ("gpu:1080ti:2", 2),
        ("gpu:a100:2,gpu:h100:1", 3),
        ("gres/gpu:2", 2),
        ("gres:gpu:2", 2),
        ("gpu=2", 2),
        ("gpu:h100:8(S:0-1,3),nvme:2", 8),
        ("gpumem:80", 0),
    ],
)
def test_gpus_of_a_gres_list(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


@pytest.mark.parametrize(
    ("tres", "options"),
    [
        ("TresPerNode=gres/gpu:1 TresPerTask=cpu=4", ["--gres=gpu:1"]),
        ("TresPerTask=cpu:4", []),  # SLURM 23.02
        ("TresPerTask=gres:gpu:2", ["--gpus-per-task=2"]),  # SLURM 22.05
        ("TresPerTask=gres/gpu=2", ["--gpus-per-task=2"]),
        ("TresPerTask=cpu=4,gres/gpu:a100=2", ["--gpus-per-task=a100:2"]),
        ("TresPerJob=gres/gpu:a100:2,gres/gpu:h100:1", ["--gpus=a100:2,h100:1"]),
    ],
)
def test_gpus_of_a_job_of_the_same_size(tres: str, options: list[str]) -> None:
    assert shape(facts(f"NumNodes=1 NumTasks=1 {tres} "))[3:] == options


@pytest.mark.parametrize(
    ("options", "site", "gpus"),
    [
        ("", {}, 0),
        ("-G 16 -N4", {}, None),
        ("--gres=gpu:4,x:1", {}, 4),
        ("--gres=gpu", {}, 1),
        ("--gres=x:1", {"SBATCH_GPUS_PER_NODE": "8"}, 8),
        ("--gpus-per-node=h100:4", {"SBATCH_GRES": "gpu:8"}, 4),
        ("--gpus-per-node=0", {"SBATCH_GPUS_PER_NODE": "8"}, 0),
        ("--gpus-per-n 4", {}, 4),
        ("--gpus-per-task=2", {}, None),
        ("--nodes=2", {"SBATCH_GPUS": "4"}, None),
        ("", {"SBATCH_GRES": "gpu:h100:8"}, 8),
    ],
)
def test_gpus_that_a_submission_asks_for(
    options: str, site: dict[str, str], gpus: int | None
) -> None:
    asked = read_submission([*options.split(), "cluster/pretrain.slurm", "x.yaml"])
    assert asked.gpus_per_node(site) == gpus
    assert asked.ranks(site)[1] == (None if gpus is None else gpus or 1)
    assert asked.ranks(site | {"RANKS_PER_NODE": "3"})[1] == 3


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ("--mem=4G", "--mem-per-cpu", None),
        ("--ntasks=4", "--ntasks-per-node", None),
        ("--time=5", "--time-min", None),
        ("--depend=afterok:1", "--dependency", "afterok:1"),
        ("--gpus=16", "--gpus-per-node", None),
    ],
)
def test_a_complete_option_abbreviates_no_other(options: str, name: str, value: str | None) -> None:
    assert (
        read_submission([options, "cluster/pretrain.slurm"]).option(name.removeprefix("--"))
        == value
    )


@pytest.mark.parametrize(
    ("given", "threads", "ranks", "cpus"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}, 1, 4, 2),
        ({"SLURM_JOB_CPUS_PER_NODE": "6"}, 2, 2, 2),  # core specialization left three cores
        ({"SLURM_JOB_CPUS_PER_NODE": "6"}, 2, 1, 6),
        ({"SLURM_JOB_CPUS_PER_NODE": "8"}, 2, 8, 1),
        ({"SLURM_JOB_CPUS_PER_NODE": "2"}, 2, 4, 1),
        (
            {
                "SLURM_JOB_CPUS_PER_NODE": "4",
                "SLURM_HINT": "nomultithread",
                "SLURM_THREADS_PER_CORE": "1",
            },
            2,
            1,
            4,
        ),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "16", "SLURM_HINT": "nomultithread"},
            2,
            2,
            4,
        ),  # an older SLURM counts threads
        ({"SLURM_JOB_CPUS_PER_NODE": "16", "SLURM_HINT": "multithread"}, 2, 2, 8),
    ],
)
def test_cpus_of_each_rank(given: dict[str, str], threads: int, ranks: int, cpus: int) -> None:
    lines = [
        f"NodeName=n{number} CoresPerSocket={8 // threads} CPUEfctv=16 CPUTot=16 Sockets=2"
        for number in (0, 1)
    ]
    assert cpus_per_rank(given, lines, ranks=ranks) == cpus
    assert cpus_per_rank({"SLURM_JOB_CPUS_PER_NODE": "16"}, [], ranks=4) == 4
