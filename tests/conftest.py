"""Shared fixtures: a tiny synthetic dataset of each class set, built once per session by the real
command."""

import os
import sys

if "cuda" not in sys.argv:  # pytest -m cuda
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # tests have more ranks than most machines have GPUs: run on the CPU
    )

# Four test processes, which often wait, share two cores: spinning threads would take a third of
# both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault(
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
)  # it requests information that the emulator does not have

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from _pytest.warnings import catch_warnings_for_item
from PIL import Image

from data_prep import progress
from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from pretrain.data.torch_dataset import Shards
from tests import forked, soak

REPOSITORY = Path(__file__).parent.parent
# in this process: a busy machine prints no progress into the expected output
progress.SILENT_S = 3600.0

Command = Callable[..., subprocess.CompletedProcess[str]]
Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]


FIRST = ("tests/test_repository.py", "tests/slurm/", "tests/faults/", "tests/distributed/")
"""Tests of real runs, in this order."""


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork xdist's processes from this process after importing all test modules, which takes 20
    seconds."""
    if "not processes" not in config.option.markexpr:  # `make check` starts none
        forked.share()
    with catch_warnings_for_item(config, config.hook, "collect", None, record=False):
        asked = [Path(each.partition("::")[0]).absolute() for each in config.args]
        for path in sorted(
            path
            for path in Path(__file__).parent.rglob("test_*.py")
            if {path, *path.parents} & {*asked}
        ):
            with suppress(Exception):  # each process collects and reports the error
                import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    forked.fork_workers(len(specs))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first: otherwise one process would run them last while the others are idle."""
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST)
        )
    )


def pytest_collection_finish() -> None:
    _started.clear()  # the processes of xdist themselves


def pytest_report_header() -> str:
    return f"soak: SOAK={soak.FACTOR} SOAK_SEED={soak.FIRST}"


_started: list[str] = []
"""Python processes that were started since the last test ended, by its fixtures too."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.fork" or (event == "subprocess.Popen" and "python" in str(arguments[0])):
        _started.append(f"{event} {arguments[:2]}")


def _start(process: BaseProcess, start: Callable[[BaseProcess], None] = BaseProcess.start) -> None:
    _started.append(repr(process))
    start(process)


# A shell's background job ignores Ctrl-C, and nohup ignores SIGHUP, but the tests' processes must
# handle both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.addaudithook(_note)
BaseProcess.start = _start  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def no_rank_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no process after a failed test, and check the mark of tests that start processes. Then
    restore the environment and signal handlers that a command in this process has changed.
    """
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    )
    before = {name: os.environ.get(name) for name in names}
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    }
    yield
    if training := sys.modules.get(f"{__package__}.training"):  # imports torch
        training.end_commands()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    started, _started[:] = list(_started), []
    marks = {mark.name for mark in request.node.iter_markers()}
    assert not started or marks & {"processes", "nightly", "stores", "benchmarks", "cuda"}, (
        f"mark it pytest.mark.processes: it started {started}"
    )


@pytest.fixture
def benchmarks(monkeypatch: Patch) -> None:
    """Make the modules of benchmarks/ importable."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 classes with 30 train and 9 val images each, 16 px raw, in shards of 64."""
    return _build(
        tmp_path_factory, "a", "num_classes=8", "num_train_per_class=30", "num_val_per_class=9"
    )


@pytest.fixture(scope="session")
def other_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 classes of the other set with 12 train and 7 val images each: sizes without common
    divisors."""
    return _build(
        tmp_path_factory, "b", "num_classes=5", "num_train_per_class=12", "num_val_per_class=7"
    )


@pytest.fixture(scope="session")
def unequal(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of `shapes`: in val 9 of the first class, 2 of each other class. The source is next to
    it in `images`."""
    place, classes, kept = (
        tmp_path_factory.mktemp("unequal"),
        load_manifest(shapes).classes,
        Counter[int](),
    )
    for number, (pixels, label) in enumerate(Shards(shapes, "val")):
        kept[label] += 1
        for split in ("train", "val") if kept[label] <= (9 if label == 0 else 2) else ():
            path = place / "images" / split / classes[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    settings = [f"source.path={place / 'images'}", "image_size=16", "num_workers=1"]
    assert (
        data_prep(["build", "--source", "folder", "--out", str(place / "unequal"), *settings]) == 0
    )
    return place / "unequal"


def _build(factory: pytest.TempPathFactory, class_set: str, *source: str) -> Path:
    out = factory.mktemp("data") / f"shapes-{class_set}"
    settings = [
        f"source.{setting}" for setting in (f"class_set={class_set}", "image_size=20", *source)
    ]
    shards = ["image_size=16", "samples_per_shard=64", "num_workers=1"]
    assert data_prep(["build", "--source", "synthetic", "--out", str(out), *shards, *settings]) == 0
    return out


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return a function that runs one of our commands in its own process, in an empty directory."""

    def run(
        *words: str, timeout_s: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
