"""Ctrl-C reaches a process group: the program reports once which files it keeps, without a
traceback."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.models.spec import MlpSpec
from tests.finetune.tiny import write_folder
from tests.moments import Strike, wait_until
from tests.ranks import REPOSITORY
from tests.training import Run

pytestmark = pytest.mark.processes

SLOW_TORCH = """import signal, sys, time
while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
    time.sleep(0.01)
sys.path.remove({folder!r})
del sys.modules["torch"]
import torch
"""
"""An import that ends after Ctrl-C."""


@pytest.fixture(scope="module")
def folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("weights") / "folder",
        shapes,
        spec=MlpSpec(kind="mlp", depth=1, width=24, expansion=2),
    )


def answered(program: str, kept: str) -> str:
    return f"\n{program}: stopping; {kept}; Ctrl-C again ends the command at once\n"


VERBS = {
    "evaluate": (
        "finetune evaluate pretrained={folder} dataset={shapes}",
        "nothing is saved; the same command starts from the beginning",
    ),
    "probe": (
        (
            "finetune probe --ranks 2 {knn} pretrained={folder} dataset={shapes} run_dir={here}/run"
            " weight_decays=[0.1]"
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", VERBS)
def test_while_torch_is_loading_which_is_said(
    name: str, folder: Path, shapes: Path, tmp_path: Path
) -> None:
    line, kept = VERBS[name]
    (tmp_path / "torch.py").write_text(SLOW_TORCH.format(folder=str(tmp_path)))
    (tmp_path / "knn.yaml").write_text("{}")
    words = line.format(
        folder=folder, shapes=shapes, here=tmp_path, knn=tmp_path / "knn.yaml"
    ).split()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stderr=said,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
    wait_until(
        lambda: "loading torch\n" in (tmp_path / "said").read_text(),
        lives=lambda: process.poll() is None,
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130
    answer = answered(words[0], kept) if kept else answered("launch", "nothing more is saved")
    assert (tmp_path / "said").read_text() == f"loading torch\n{answer}"


STRUCK = """import os, runpy, signal, sys, sysconfig
os.kill(os.getpid(), signal.SIGINT)
try:
    path = os.path.join(sysconfig.get_path("stdlib"), __name__ + ".py")
    globals().update(runpy.run_path(path, run_name=__name__))
except BaseException:
    os.abort()  # as C++ does if an exception comes up while it imports
"""
PROGRAMS = {"cluster submit": "cluster/submit", "cluster": "wide-mlps"}


@pytest.mark.parametrize("words", ["data_prep", "pretrain", "finetune", "analysis", *PROGRAMS])
def test_while_a_program_is_loading(words: str, tmp_path: Path) -> None:
    """The signal comes during an import of interrupts.py, when the process ends silently, or during
    a later import."""
    answer = answered(PROGRAMS.get(words, words), "nothing is saved")
    for module, expected in (("typing", (-signal.SIGINT, "")), ("textwrap", (130, answer))):
        (tmp_path / f"{module}.py").write_text(STRUCK)
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
        line = [sys.executable, "-m", *words.split(), "x"]
        done = subprocess.run(
            line, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert (done.returncode, done.stderr) == expected
        (tmp_path / f"{module}.py").unlink()


@pytest.mark.parametrize("verb", ["verify", "stats --recompute", "dedup"])
def test_a_look_at_a_dataset_by_workers(verb: str, shapes: Path, tmp_path: Path) -> None:
    """The process that opens the fourth file sends the signal: a worker, or the program while it
    starts workers."""
    strike = Strike(shapes, 4, signal=signal.SIGINT, target="group")
    words = [
        sys.executable,
        "-m",
        "tests.moments",
        "data_prep",
        *verb.split(),
        str(shapes),
        "--workers",
        "2",
    ]
    environment = os.environ | strike.environment
    done = subprocess.run(
        words,
        env=environment,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    kept = (
        "no list was written; with --hashes, finished hashes are reused"
        if verb == "dedup"
        else "the dataset was not changed"
    )
    assert done.returncode == 130 and done.stderr.count(answered("data_prep", kept)) == 1, (
        done.stderr
    )
    assert re.sub(r"data_prep: .*\n|\w.*  \d+/.*\n|\n", "", done.stderr) == ""


def test_ranks_within_an_evaluation(folder: Path, shapes: Path, tmp_path: Path) -> None:
    words = [
        "evaluate",
        f"pretrained={folder}",
        f"dataset={shapes}",
        f"run_dir={tmp_path / 'run'}",
        "tracking.enabled=false",
    ]
    strikes = {
        rank: Strike(tmp_path, 1, stage="predicting val", signal=signal.SIGINT) for rank in range(2)
    }
    run = Run(words, ranks=2, program="finetune", strikes=strikes)
    said, _ = run.communicate()
    assert [rank.exitcode for rank in run.ranks] == [130, 130]
    assert said.replace("loading torch\n", "") == answered(
        "finetune", "nothing is saved; the same command starts from the beginning"
    )
    assert not (tmp_path / "run" / "result.json").exists()
