"""The script cluster/pretrain.slurm with simulated ranks that do not import torch.

Each scenario is a job or two. Scenarios mostly wait for SLURM, so all run at the same time in
threads, on one lab. SLURM chooses the nodes, and a scenario's bad nodes are those of its job's
first attempt.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from cluster.attempts import read_attempts
from tests.slurm.conftest import Cluster, need_slurm

PYTHON = r"""#!/bin/bash
# stands in for .venv/bin/python: -m pretrain train CONFIG, where CONFIG is what the ranks do
case $1 in
    */cluster/job.py) exec REAL "$@" ;;
    -c) [ -z "${NO_PYTHON:-}" ] || [ -n "${SLURM_RESTART_COUNT:-}" ] || exit 127; exit ;;
esac
case $2 in
    cluster) exec REAL "$@" ;;
    cluster.preflight)
        [ -z "${SLOW:-}" ] || [ -n "${SLURM_RESTART_COUNT:-}" ] || { touch measuring; sleep 60; }
        exit ;;
    cluster.resolve)
        [ "$3" != --starting ] || shift
        kept=${3#--kept=} config=$6
        shift
        for copy in "$kept/$config" "$kept/given$PWD/$config"; do [ ! -f "$copy" ] || config=$copy; done
        [ "$3" != grid ] || config=second-time-$6
        name=$(basename "$config") state=unfinished
        [ ! -e "runs/$name/result.json" ] || state=finished
        [[ $name != blind* ]] || [[ $name = blind-quick* && -n ${SLURM_RESTART_COUNT:-} ]] || state=blind
        printf '{"state": "%s", "about": "/data/x", "writes": "runs/%s", "reads": [], "can_stage": false, ' "$state" "$name"
        printf '"result": "result.json", "needs_one_rank": false, "is_build": false, '
        printf '"words": ["pretrain", "train", "%s"]}\n' "$config"
        [[ $name != no-python* ]] || [ -n "${SLURM_RESTART_COUNT:-}" ] || exit 127
        [[ $name != odd* ]] || exit 1
        [[ $name != *slowly* ]] || [ -n "${SLURM_RESTART_COUNT:-}" ] || { touch checking; sleep 60; }
        exit ;;
    pretrain) ;;
    *) exit ;;
esac
name=$(basename "$4")
finish() { [ "$SLURM_PROCID" != 0 ] || { mkdir -p "runs/$1" && echo {} >"runs/$1/result.json"; }; exit 0; }
trap 'echo "rank $SLURM_PROCID got USR2"; exit 0' USR2
trap 'echo "rank $SLURM_PROCID got TERM"; exit 0' TERM
echo "rank $SLURM_PROCID of $SLURM_NTASKS, local $SLURM_LOCALID of $SLURM_NTASKS_PER_NODE, gpus $CUDA_VISIBLE_DEVICES," \
    "master $MASTER_ADDR, on $(hostname), caches $TRITON_CACHE_DIR $TORCH_EXTENSIONS_DIR"
[ ! -f "$4" ] || { echo "config: $(<"$4")"; finish "$name"; }
case $name in
    quick* | no-python* | blind*) finish "$name" ;;
    second-time*) [ -z "${SLURM_RESTART_COUNT:-}" ] || finish "$name" ;;
    busy*)
        [ "${SLURM_RESTART_COUNT:-0}" -lt 2 ] || finish "$name"
        [ "$SLURM_PROCID" != 0 ] || { echo "process 5 on n9 holds it"; exit 75; } ;;
    crash*)
        [ "$SLURM_PROCID" = 1 ] || {
            until [ -s "jobs/$SLURM_JOB_ID/ends/rank.${SLURM_RESTART_COUNT:-0}/1" ]; do sleep 0.1; done
            exit 1
        }
        echo "disk on fire"
        exit 7 ;;
esac
while :; do sleep 0.1; done
"""
SCRIPT = "cluster/pretrain.slurm"
pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]  # scenarios wait for SLURM


Scenario = Callable[[Cluster], None]
SCENARIOS: list[Scenario] = []


def scenario(run: Scenario) -> Scenario:
    SCENARIOS.append(run)
    return run


@pytest.fixture(autouse=True)
def settled() -> None:
    """Disable the fixture: no test waits for the jobs of others."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm()
    python = tmp_path_factory.mktemp("bin") / "python"
    python.write_text(PYTHON.replace("REAL", sys.executable))
    python.chmod(0o755)
    with Cluster(python=python, num_nodes=7) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def running(lab: Cluster) -> Iterator[dict[Scenario, Future[None]]]:
    with ThreadPoolExecutor(len(SCENARIOS)) as threads:
        yield {each: threads.submit(each, lab) for each in SCENARIOS}


def bad_nodes(lab: Cluster, job: str) -> list[str]:
    return [
        line.partition("\t")[0]
        for line in (lab.root / "jobs" / job / "bad-nodes").read_text().splitlines()
    ]


def await_ranks(lab: Cluster, job: str, *, start: int = 1) -> None:
    """Wait until both ranks of the job run and handle signals in this attempt."""
    for rank in (0, 1):
        deadline_s = time.monotonic() + 150
        while sum(log.count(f"rank {rank} of ") for log in lab.rank_logs(job)) < start:
            assert time.monotonic() < deadline_s, lab.log(job)
            time.sleep(0.05)


@scenario
def one_rank_per_gpu_and_every_rank_sees_all(lab: Cluster) -> None:
    mine = (
        lab.directory / f"node/lab/wide-mlps-{os.getuid()}"
    )  # NODE_SCRATCH comes from cluster/site.env
    cases = (
        ([], 4),
        (["--oversubscribe", "--gpus-per-node=2", "--cpus-per-task=2"], 2),
        (["--ntasks=4", "--gpus-per-task=1"], 4),
        (["--gpu-bind=single:1"], 4),
        (["--oversubscribe", "--gpus=3", "--cpus-per-task=3"], 3),
    )
    jobs = [
        lab.sbatch("--partition=gpu", *options, SCRIPT, "quick" + "".join(options))
        for options, _ in cases
    ]
    for job, (_, count) in zip(jobs, cases, strict=True):
        lab.wait(job, "COMPLETED")
        ranks = [
            re.sub(r"master [\d.]+,", "master,", line)
            for log in lab.rank_logs(job)
            for line in log.splitlines()[1:]
        ]
        (gpus,) = {re.findall(r"gpus ([\d,]+), master", rank)[0] for rank in ranks}
        assert len(set(gpus.split(","))) == count  # SLURM chooses the GPUs of a shared node
        where = f"gpus {gpus}, master, on g1, caches {mine}/triton {mine}/extensions"
        assert ranks == [
            f"rank {rank} of {count}, local {rank} of {count}, {where}" for rank in range(count)
        ]
    assert mine.stat().st_mode & 0o777 == 0o700


@scenario
def a_run_that_needs_one_gpu_leaves_the_rest_of_its_node(lab: Cluster) -> None:
    words = (
        "--hold",
        "--parsable",
        "--partition=gpu",
        "cluster/knn.slurm",
        "configs/knn/demo.yaml",
    )
    job = lab("cluster/submit", *words)
    asked = lab.job(job)
    assert (asked["NumCPUs"], asked["MinMemoryNode"], asked["OverSubscribe"]) == (
        "1",
        "25000M",
        "YES",
    )
    lab("scontrol", "release", job)
    lab.wait(job, "COMPLETED")
    (log,) = lab.rank_logs(job)
    assert re.search(r"rank 0 of 1, local 0 of 1, gpus [0-3],", log), log


@scenario
def ranks_of_a_node_have_successive_numbers(lab: Cluster) -> None:
    job = lab.sbatch(
        "--nodes=2",
        "--export=ALL,RANKS_PER_NODE=2,SLURM_DISTRIBUTION=cyclic",
        SCRIPT,
        "quick-block",
    )
    lab.wait(job, "COMPLETED")
    places = [
        re.findall(r"(rank \d) of 4, local (\d) of .* on (\w+),", log)[0]
        for log in lab.rank_logs(job)
    ]
    assert [place[:2] for place in places] == [
        ("rank 0", "0"),
        ("rank 1", "1"),
        ("rank 2", "0"),
        ("rank 3", "1"),
    ]
    assert places[0][2] == places[1][2] != places[2][2] == places[3][2]


@scenario
def node_names_that_do_not_resolve_are_replaced_by_addresses(lab: Cluster) -> None:
    with Cluster(
        python=(lab.root / ".venv/bin/python").readlink(), num_nodes=2, LAB_HOSTS="none"
    ) as other:
        job = other.sbatch("--nodes=2", SCRIPT, "quick")
        other.wait(job, "COMPLETED")
        assert ["master 127.0.0.11, on n" in log for log in other.rank_logs(job)] == [True, True]


@scenario
def a_preempted_job_comes_back_though_only_its_ranks_received_the_signal(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", SCRIPT, "second-time")
    await_ranks(lab, job)
    urgent = lab.sbatch(
        "--partition=high",
        f"--nodelist={lab.job(job)['NodeList']}",
        "--exclusive",
        "--wrap",
        "true",
    )
    lab.wait(urgent, "COMPLETED")
    assert lab.wait(job, "COMPLETED")["Restarts"] == "1"
    assert ["got TERM" in log for log in lab.rank_logs(job)] == [True, True]
    assert "the job was preempted, srun ended with exit code 0\n" in lab.log(job), lab.log(job)


@scenario
def the_signal_before_the_time_limit_puts_it_back(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", SCRIPT, "second-time-limit")
    await_ranks(lab, job)
    lab(
        "scontrol", "update", f"JobId={job}", "TimeLimit=5"
    )  # USR2@300 is due at once; SLURM checks every 30 s
    lab.wait_for(job, "requeueing")
    with suppress(AssertionError):  # it may have ended
        lab("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    assert lab.wait(job, "COMPLETED")["Restarts"] == "1"
    assert ["got USR2" in log for log in lab.rank_logs(job)] == [True, True]


@scenario
def what_fails_three_times_from_one_checkpoint_is_given_up(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", SCRIPT, "crash")
    assert lab.wait(job, "FAILED")["Restarts"] == "2"
    log = lab.log(job)
    assert "failed 3 times without a new checkpoint" in log
    assert (
        len(re.findall(r"rank 1 on n\d failed first, with exit code 7; the last lines of", log))
        == 3
    ), log
    assert "    disk on fire" in log, (
        log
    )  # rank 1's output, although the job's log has the first rank's


@scenario
def a_start_that_waits_for_anothers_lock_has_not_failed(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", "--export=ALL,MAX_IDLE_STARTS=1,SLURM_WAIT=5", SCRIPT, "busy")
    assert lab.wait(job, "COMPLETED")["Restarts"] == "2"
    log = lab.log(job)
    assert (
        log.count("runs/busy is locked by another attempt (see above)") == 2
        and "process 5 on n9 holds it" in log
    ), log
    assert [each["how"] for each in read_attempts(lab.root / "jobs" / job / "attempts.jsonl")] == [
        "busy",
        "busy",
        "finished",
    ]


@scenario
def a_task_of_an_array_starts_again_as_itself(lab: Cluster) -> None:
    (lab.root / "crash-plan").write_text("")
    array = lab.sbatch("--array=3,5", "cluster/grid.slurm", "crash-plan", "pretrain")
    for task in (3, 5):
        lab.wait_for(f"{array}_{task}", "rank 0 of 1")
        lab("scancel", "--batch", "--signal=USR2", f"{array}_{task}")
    for task in (3, 5):
        assert lab.wait(f"{array}_{task}", "COMPLETED")["Restarts"] == "1"
        assert (
            lab.log(f"{array}_{task}").count(f"member {task} of crash-plan pretrain") == 2
        )  # appended by the same member
        assert (lab.root / f"runs/second-time-{task}/result.json").exists()


@scenario
def what_is_edited_after_the_submission_changes_nothing(lab: Cluster) -> None:
    config = lab.root / "configs/mine.yaml"
    settings = (lab.root / "configs/pretrain/demo_mlp.yaml").read_text()
    for place in (config, lab.root / "outside.yaml"):
        place.write_text(f"# as submitted\n{settings}")
    names = ("configs/mine.yaml", "outside.yaml")
    # as if submitted from a task of another array in its third attempt
    within = ("env", "SLURM_RESTART_COUNT=2", "SLURM_ARRAY_JOB_ID=77", "SLURM_ARRAY_TASK_ID=5")
    kept = [
        lab(
            *within,
            "cluster/submit",
            "--hold",
            "--parsable",
            SCRIPT,
            name,
            f"run_dir=runs/of-{number}",
        )
        for number, name in enumerate(names)
    ]
    plain = [lab.sbatch("--hold", SCRIPT, name) for name in ("configs/mine.yaml", "quick-plain")]
    for place in (config, lab.root / "outside.yaml"):
        place.write_text(f"# edited\n{settings}")
        os.utime(
            place, (time.time() + 7, time.time() + 7)
        )  # SLURM's times are in seconds, and clocks differ slightly
    for job in [*kept, *plain]:
        lab("scontrol", "release", job)
    for job in kept:
        lab.wait(job, "COMPLETED")
        (log,) = lab.rank_logs(job)
        assert (
            "config: # as submitted" in log and f"caches {lab.directory}/node/lab/wide-mlps-" in log
        )
    lab.wait(plain[0], "FAILED")
    assert "configs/mine.yaml. Submit it again" in lab.log(plain[0])
    lab.wait(plain[1], "COMPLETED")  # edits of other configs do not matter


def await_file(lab: Cluster, name: str, job: str) -> None:
    deadline_s = time.monotonic() + 150
    while not (lab.root / name).exists():
        assert time.monotonic() < deadline_s, lab.log(job)
        time.sleep(0.05)


@scenario
def a_check_that_was_cut_off_condemns_no_node(lab: Cluster) -> None:
    job = lab.sbatch(SCRIPT, "quick-slowly-checked")
    await_file(lab, "checking", job)
    lab("scontrol", "requeue", job)
    assert lab.wait(job, "COMPLETED")["Restarts"] == "1"
    assert not (lab.root / "jobs" / job / "bad-nodes").exists(), lab.log(job)


@scenario
def a_check_that_goes_wrong_everywhere_is_the_configs_fault(lab: Cluster) -> None:
    job = lab.sbatch(SCRIPT, "odd")
    ended = lab.wait(job, "FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "1"), lab.log(job)
    said = (
        "the check of the config failed on this node (exit code 1, see above); also on"
        f" {bad_nodes(lab, job)[0]}"
    )
    assert said in lab.log(job), lab.log(job)


@scenario
def a_preemption_during_the_pre_flight_is_heeded(lab: Cluster) -> None:
    job = lab.sbatch("--export=ALL,PREFLIGHT=1,SLOW=1", SCRIPT, "quick-measured")
    await_file(lab, "measuring", job)
    lab(
        "scancel", "--signal=TERM", job
    )  # only to its steps, as some clusters do; SLURM chooses the step numbers
    assert lab.wait(job, "COMPLETED")["Restarts"] == "1"
    (log,) = lab.rank_logs(job)
    assert log.count("rank 0 of 1") == 1, lab.log(job)


@scenario
def a_node_without_python_is_avoided(lab: Cluster) -> None:
    job = lab.sbatch("--export=ALL,NO_PYTHON=1", SCRIPT, "no-python-quick")
    ended = lab.wait(job, "FAILED", "COMPLETED")
    assert (ended["JobState"], [ended["ExcNodeList"]]) == ("COMPLETED", bad_nodes(lab, job)), (
        lab.log(job)
    )


@scenario
def a_node_that_does_not_see_the_data_is_avoided_and_two_mean_that_it_is_not_there(
    lab: Cluster,
) -> None:
    once, everywhere = (lab.sbatch(SCRIPT, name) for name in ("blind-quick", "blind-everywhere"))
    ended = lab.wait(once, "FAILED", "COMPLETED")
    assert (ended["JobState"], [ended["ExcNodeList"]]) == ("COMPLETED", bad_nodes(lab, once)), (
        lab.log(once)
    )
    assert (
        (lab.root / "jobs" / once / "bad-nodes")
        .read_text()
        .endswith("\t/data/x does not exist on this node\n")
    )
    ended = lab.wait(everywhere, "FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "1"), lab.log(everywhere)
    assert f"also on {bad_nodes(lab, everywhere)[0]}" in lab.log(everywhere)


@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
def test_scenario(running: dict[Scenario, Future[None]], run: Scenario) -> None:
    running[run].result()


def test_edited_code_is_refused_where_nothing_was_kept(lab: Cluster) -> None:
    """This test comes last: the other jobs have a snapshot by now."""
    code = lab.root / "pretrain/edited.py"
    job = lab.sbatch("--hold", SCRIPT, "quick-code")
    try:
        code.write_text("edited")
        later = time.time() + 7  # SLURM's times are in seconds, and clocks differ slightly
        os.utime(code, (later, later))
        lab("scontrol", "release", job)
        lab.wait(job, "FAILED")
        assert (
            "changed after the job was submitted: pretrain/edited.py. Submit it again"
            in lab.log(job)
        )
    finally:
        code.unlink()
