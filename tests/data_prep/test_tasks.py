"""Any number of array tasks, parallel or in turn, killed or not, gives the bytes of one build. A
merge publishes only complete parts of the same build.
"""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest

from data_prep.build import tasks as tasks_of_build
from data_prep.cli import main
from data_prep.exit_codes import BUSY
from data_prep.manifest import PARTS
from data_prep.publish import Holder, sole_writer
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import (
    LOCK,
    Child,
    build,
    encoded,
    files_of,
    forked,
    held_at_work,
    picture,
    write_classes,
    write_files,
)
from tests.moments import wait_until

CUT = ("samples_per_shard=4", "max_reject_fraction=0.2")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_classes(tmp_path_factory.mktemp("array") / "source", {"ant": 15, "bee": 11})
    return write_files(root, {"ant/zero.jpg": b"", "bee/text.jpg": b"no picture"})


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """Return the files of one uninterrupted build: 28 inputs in 7 shards."""
    out = source.parent / "whole" / "animals"
    assert build(source, out, *CUT) == 0
    return files_of(out)


@pytest.fixture(scope="module")
def parts(source: Path) -> tuple[Path, Path]:
    """Return the output of three tasks, and of the second of three tasks with another seed."""
    out, other = source.parent / "parts" / "animals", source.parent / "parts" / "other"
    for number in range(3):
        assert task(source, out, f"{number}/3") == 0
    assert task(source, other, "1/3", "seed=1") == 0
    return out, other


def task(source: Path, out: Path, which: str, *overrides: str) -> int:
    """Run one task, after making a plan if needed."""
    if not which.startswith("0/") and not (out / PARTS / "begun.json").exists():
        plan(source, out, *overrides)
    return main([*words_of(source, out, which), "num_workers=1", *overrides])


def plan(source: Path, out: Path, *overrides: str) -> None:
    words = [*words_of(source, out, "0/1"), "num_workers=1", *overrides]
    words[words.index("--task=0/1")] = "--plan"
    assert main(words) == 0


def merge(out: Path) -> int:
    return main(["merge", str(out), "--workers", "1"])


def words_of(source: Path, out: Path, which: str) -> list[str]:
    words = ["build", "--source=folder", f"--out={out}", f"--task={which}", f"source.path={source}"]
    return [*words, "image_size=16", "source.val_fraction=0", *CUT]


def running(source: Path, out: Path, which: str) -> AbstractContextManager[Child]:
    log = out.with_name(f"{which.replace('/', '-')}.log")
    return forked(log, *words_of(source, out, which))


@pytest.mark.parametrize("total", [1, 3, 9])
def test_any_number_of_tasks_in_any_order_makes_the_bytes_of_one_build(
    tmp_path: Path, source: Path, whole: dict[str, bytes], total: int
) -> None:
    out = tmp_path / "animals"
    for number in random.Random(total).sample(range(total), total):
        assert task(source, out, f"{number}/{total}") == 0
        assert not (out / "manifest.json").exists()
    assert merge(out) == 0
    assert files_of(out) == whole
    assert merge(out) == 0  # again: nothing to do
    assert files_of(out) == whole


def test_tasks_continue_what_a_build_began_and_the_other_way_round(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "animals"
    assert task(source, out, "1/3") == 0
    written = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(written) == 2
    assert task(source, out, "0/2") == 0  # another number of tasks, as no task is running
    assert build(source, out, *CUT) == 0
    assert files_of(out) == whole
    assert {path: path.stat().st_mtime_ns for path in written} == written


# ---- errors of a merge


FOURTH = "train-000004"


def _changed_index(out: Path, _: Path) -> None:
    data = (out / f"{FOURTH}.npy").read_bytes()
    (out / f"{FOURTH}.npy").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _edited_record(out: Path, _: Path) -> None:
    path = out / PARTS / f"{FOURTH}.json"
    record = json.loads(path.read_text())
    assert record["channels"]
    path.write_text(json.dumps(record | {"channels": [[1, 2, 3], [1, 2, 3], 4]}))


def _foreign_part(out: Path, other: Path) -> None:
    for name in (f"{FOURTH}.tar", f"{FOURTH}.npy", f"{FOURTH}.paths", f"{PARTS}/{FOURTH}.json"):
        shutil.copy(other / name, out / name)


HARM: dict[str, Callable[[Path, Path], object]] = {
    "lost record": lambda out, _: (out / PARTS / f"{FOURTH}.json").unlink(),
    "killed task": lambda out, _: [
        (out / PARTS / f"{FOURTH}.json").unlink(),
        (out / f"{FOURTH}.tar").rename(out / f".tmp-{FOURTH}.tar"),
    ],
    "lost tar": lambda out, _: (out / f"{FOURTH}.tar").unlink(),
    "cut tar": lambda out, _: os.truncate(out / f"{FOURTH}.tar", 1024),
    "changed index": _changed_index,
    "lost paths": lambda out, _: (out / f"{FOURTH}.paths").unlink(),
    "damaged record": lambda out, _: (out / PARTS / f"{FOURTH}.json").write_text('{"plan_hash": '),
    "copied record": lambda out, _: shutil.copy(
        out / PARTS / "train-000001.json", out / PARTS / f"{FOURTH}.json"
    ),
    "edited record": _edited_record,
    "foreign part": _foreign_part,
}


def test_a_merge_compares_the_source_with_its_listing_where_it_can_be_reached(
    tmp_path: Path,
    whole: dict[str, bytes],
    source: Path,
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
) -> None:
    mine, out = tmp_path / "source", tmp_path / "animals"
    shutil.copytree(source, mine)
    assert task(mine, out, "0/1") == 0
    file = mine / "bee" / "003.jpg"
    before = file.stat()
    os.utime(file, ns=(1, 1))
    refused(merge(out), "bee/003.jpg", "[changed]")
    assert not (out / "manifest.json").exists()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.copytree(mine / "bee", mine / "wasp")  # a class that nobody has listed
    refused(merge(out), "wasp", "[changed]")
    shutil.rmtree(mine / "wasp")
    shutil.copytree(out, tmp_path / "twin" / "animals")
    assert merge(out) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(mine)
    mine.mkdir()  # as if its disk is not mounted
    assert merge(tmp_path / "twin" / "animals") == 0
    said = f"data_prep: {mine} cannot be reached"
    assert said in capsys.readouterr().err
    assert files_of(out) == files_of(tmp_path / "twin" / "animals") == whole


@pytest.mark.parametrize("name", HARM)
def test_a_missing_damaged_or_foreign_part_is_one_clear_line_and_the_named_task_mends_it(
    tmp_path: Path,
    source: Path,
    parts: tuple[Path, Path],
    whole: dict[str, bytes],
    refused: Refused,
    name: str,
) -> None:
    out = Path(shutil.copytree(parts[0], tmp_path / "animals"))
    HARM[name](out, parts[1])
    before = {key: data for key, data in files_of(out).items() if ".tmp-" not in key}
    refused(merge(out), FOURTH, "[unfinished]")
    assert files_of(out) == before  # nothing damaged
    assert task(source, out, "1/3") == 0
    assert merge(out) == 0
    assert files_of(out) == whole


def test_what_the_tasks_agreed_on_is_published_only_as_it_was_written(
    tmp_path: Path, source: Path, whole: dict[str, bytes], refused: Refused
) -> None:
    out = tmp_path / "animals"
    assert task(source, out, "0/1") == 0
    begun = out / PARTS / "begun.json"
    data, message = begun.read_bytes(), f"{begun}"
    for before, after in (
        (b'"bee"', b'"Bee"'),
        (b'"image_size": 16', b'"image_size": 61'),
        (b'"center"', b'"squash"'),
        (b'"stamp"', b'"\xf3tamp"'),
    ):
        assert before in data
        begun.write_bytes(data.replace(before, after))
        refused(merge(out), message)
        refused(task(source, out, "0/1"), message)
    begun.unlink()
    refused(merge(out), "[unfinished]")
    assert task(source, out, "0/1") == 0
    assert merge(out) == 0
    assert files_of(out) == whole


@pytest.mark.parametrize("harm", ["cut", "changed", "lost"])
@pytest.mark.parametrize(
    "name",
    ["inventory/containers.json", "inventory/label.bin", "inventory/names.bin", "order-train.npy"],
)
def test_a_damaged_plan_is_named_and_a_task_that_runs_alone_makes_it_again(
    tmp_path: Path,
    source: Path,
    whole: dict[str, bytes],
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
    name: str,
    harm: str,
) -> None:
    out = tmp_path / "animals"
    assert task(source, out, "0/2") == 0
    tars = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    path = out / PARTS / name
    data = path.read_bytes()
    if harm == "lost":
        path.unlink()
    else:
        path.write_bytes(
            data[: len(data) // 2]
            if harm == "cut"
            else data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
        )
    refused(merge(out), f"{path}", "[damaged]")
    capsys.readouterr()
    assert task(source, out, "0/2") == 0
    assert f"{path} is damaged" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tars} == tars
    (out / PARTS / "failed.json").write_text('{"nodes": ')  # damaged JSON
    assert task(source, out, "1/2") == 0
    assert merge(out) == 0
    assert files_of(out) == whole


def test_a_merge_needs_no_list_of_classes_and_a_task_after_it_has_nothing_to_do(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    (tmp_path / "list").write_text("bee\n")
    monkeypatch.chdir(tmp_path)
    out, words = tmp_path / "animals", "classes_file=list"
    assert task(source, out, "0/1", words) == 0
    content = (tmp_path / "list").read_bytes()
    (tmp_path / "list").unlink()
    assert merge(out) == 0
    before = files_of(out)
    (tmp_path / "list").write_bytes(content)
    refused(task(source, out, "0/1", words), "[exists]")
    assert files_of(out) == before


def test_what_is_not_a_build_cannot_be_merged(tmp_path: Path, refused: Refused) -> None:
    refused(merge(tmp_path / "nowhere"), "[missing-path]")
    (tmp_path / "empty").mkdir()
    refused(merge(tmp_path / "empty"), "[unfinished]")
    assert [path.name for path in (tmp_path / "empty").iterdir()] in ([], [LOCK])


def test_a_stranger_among_the_shards_is_named(
    tmp_path: Path, source: Path, whole: dict[str, bytes], refused: Refused
) -> None:
    out = tmp_path / "animals"
    assert task(source, out, "0/1") == 0
    write_files(out, {"train-000099.tar": b"of another dataset"})
    refused(merge(out), "train-000099.tar", "[conflict]")
    (out / "train-000099.tar").unlink()
    assert merge(out) == 0
    assert files_of(out) == whole


# ---- several at once


def at_work(source: Path, out: Path) -> AbstractContextManager[None]:
    """A task that is paused between its plan and its first shard."""
    return held_at_work(out.parent / "held", *words_of(source, out, "0/2"))


@pytest.mark.processes
def test_whoever_does_not_belong_to_the_tasks_at_work_is_refused(
    tmp_path: Path, source: Path, whole: dict[str, bytes], refused: Refused
) -> None:
    out = tmp_path / "animals"
    write_files(
        out, {LOCK: json.dumps(asdict(Holder())).encode()}
    )  # a killed build, whose name is not shown
    with at_work(source, out):
        refused(merge(out), "[busy]", code=BUSY)
        refused(build(source, out, *CUT), "[busy]", code=BUSY)
        assert task(source, out, "1/2") == 0
    assert merge(out) == 0
    assert files_of(out) == whole


def test_a_source_that_changes_between_tasks_is_refused(
    tmp_path: Path, source: Path, refused: Refused
) -> None:
    mine = Path(shutil.copytree(source, tmp_path / "source"))
    out = tmp_path / "animals"
    assert task(mine, out, "0/2") == 0
    write_files(mine, {"ant/new.jpg": encoded(picture(seed=77))})
    assert task(mine, out, "1/2") == 0
    refused(merge(out), "[changed]")
    assert not (out / "manifest.json").exists()


@pytest.mark.processes
def test_a_file_that_changes_while_tasks_are_at_work_is_refused(
    tmp_path: Path, source: Path, refused: Refused
) -> None:
    mine, out = Path(shutil.copytree(source, tmp_path / "source")), tmp_path / "animals"
    with at_work(mine, out):
        times = {path: path.stat().st_mtime_ns for path in mine.rglob("*.jpg")}
        for path in times:
            path.write_bytes(path.read_bytes() + b"more")
        refused(task(mine, out, "1/2"), "[changed]")
        for path, changed_ns in times.items():
            path.write_bytes(path.read_bytes()[:-4])
            os.utime(path, ns=(changed_ns, changed_ns))
        assert task(mine, out, "1/2") == 0


def test_a_wrong_task_number_is_one_clear_line(
    tmp_path: Path, source: Path, refused: Refused
) -> None:
    for which in ("1", "2/2", "a/b", "-1/2", "1/0", "1/2/3", "/"):
        refused(main(words_of(source, tmp_path / "out", which)), "--task", "[bad-syntax]")
    assert not (tmp_path / "out").exists()


def test_more_tasks_than_shards_leave_some_with_nothing_to_do(
    tmp_path: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert task(source, tmp_path / "animals", "8/9") == 0
    said = capsys.readouterr().out
    assert (
        "task 8/9 has written its 0 shards" in said
        and "after the last task, run data_prep merge" in said
    )
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    assert task(source, tmp_path / "animals", "0/9") == 0
    said = capsys.readouterr().out
    assert (
        "task 0/9 has written its 1 shard; the queued merge of cluster/data_prep.slurm finishes"
        in said
    )


@pytest.mark.processes
def test_a_task_waits_for_an_earlier_start_of_its_own_and_for_no_other(
    tmp_path: Path, source: Path
) -> None:
    """A node that SLURM has lost may continue for a while: the next attempt must not fail because
    of it."""
    out = tmp_path / "animals"
    assert task(source, out, "0/2") == 0
    with contextlib.ExitStack() as stack:
        with sole_writer(out / PARTS / "task-0"):
            again = stack.enter_context(running(source, out, "0/2"))
            wait_until(lambda: "an earlier attempt at task 0/2" in again.said())
            assert task(source, out, "1/2") == 0
        assert again.ended_well()


def test_a_waiting_task_reports_the_error_of_task_0(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    out, wrong = tmp_path / "animals", "classes=[wasp]"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    refused(task(source, out, "0/2", wrong), "[unknown-name]")
    refused(main([*words_of(source, out, "1/2"), wrong]), "[unknown-name]")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")  # another array ignores the failure
    monkeypatch.setattr(tasks_of_build, "PLAN_DEADLINE_S", -1.0)
    refused(main([*words_of(source, out, "1/2"), wrong]), "--task", "[unfinished]")
    assert task(source, out, "0/2") == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd")])
def test_any_error_of_task_0_is_reported_but_not_to_the_next_attempt(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
    error: Exception,
) -> None:
    def fail(*_: object) -> None:
        raise error

    out, code = tmp_path / "animals", "no-space" if isinstance(error, OSError) else "unfinished"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setattr(tasks_of_build, "PLAN_DEADLINE_S", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(tasks_of_build, "prepare", fail)
        with contextlib.suppress(RuntimeError):
            assert task(source, out, "0/2") != 0
    said = "odd" if code == "unfinished" else "No space left"
    refused(main(words_of(source, out, "1/2")), said, f"[{code}]", code=2)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    refused(main(words_of(source, out, "1/2")), "has no plan", "[unfinished]")


def test_a_plan_of_another_listing_is_not_accepted(tmp_path: Path, source: Path) -> None:
    """A kill between the new listing and the record of the new plan leaves this state."""
    mine, out = Path(shutil.copytree(source, tmp_path / "source")), tmp_path / "animals"
    plan(mine, out)
    begun = out / PARTS / "begun.json"
    before = begun.read_bytes()
    assert task(mine, out, "0/2") == 0  # creates the plan
    for path in mine.rglob("*.jpg"):
        os.utime(path, (0, 0))
    plan(mine, out)
    after = begun.read_bytes()
    assert after != before
    begun.write_bytes(before)
    assert task(mine, out, "0/2") == 0
    assert begun.read_bytes() == after


@pytest.mark.processes
def test_a_task_waits_for_the_plan_of_task_0(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "animals"
    with running(source, out, "1/2") as waiting:
        wait_until((out / PARTS / "task-1").exists)
        assert task(source, out, "0/2") == 0
        assert waiting.ended_well()
    assert merge(out) == 0
    assert files_of(out) == whole


def test_parts_made_by_another_pillow_are_not_mixed(
    tmp_path: Path, source: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "animals"
    assert task(source, out, "0/2") == 0
    with monkeypatch.context() as patch:
        patch.setattr("PIL.__version__", "1.1.7")
        refused(task(source, out, "1/2"), "[changed]")
        assert build(source, out, *CUT) == 2
    assert task(source, out, "1/2") == 0
    assert merge(out) == 0
    decoder = json.loads((out / "manifest.json").read_text())["decoder"]
    assert "libjpeg" in decoder
