"""A real MLflow server that is frozen, killed and started again while a run tells it of its steps.

Nothing is lost, nothing stands twice, there is one run, its status is true, and no step waits for the server.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from PIL import Image

from pretrain.ranks.world import free_port
from pretrain.tracking.tracker import RunIdentity, Tracker
from tests.moments import wait_until

STEPS_BETWEEN = 60


class Server:
    """`mlflow server` on loopback, in a process group of its own."""

    def __init__(self, folder: Path):
        self.store, self.port = f"sqlite:///{folder}/server.db", free_port()
        self._words = ["--backend-store-uri", self.store, "--artifacts-destination", f"{folder}/artifacts"]
        self._log = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        words = [*self._words, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *words],
                start_new_session=True,
                stdout=log,
                stderr=log,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        wait_until(self.answers)
        return self

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def is_frozen(self) -> bool:
        assert self.process is not None
        here = psutil.Process(self.process.pid)
        return all(each.status() == psutil.STATUS_STOPPED for each in [here, *here.children(recursive=True)])


class Training:
    """A loop of steps that tells of each, and notes how long the telling took."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.step, self.calls_s = tracker, 0, list[float]()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            time.sleep(0.002)
            began_s = time.perf_counter()
            self.tracker.metrics({"train/loss": 1 / self.step, "train/lr": 0.1}, step=self.step)
            if self.step % STEPS_BETWEEN == 0:
                self.tracker.picture("first", lambda: Image.new("RGB", (8, 8)), step=self.step)
            self.calls_s.append(time.perf_counter() - began_s)


def test_an_outage_costs_no_metric_no_step_and_no_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")  # of the deliverer, or each failed try would last 10 s
    server, run_dir = Server(tmp_path).start(), tmp_path / "run"
    try:
        RunIdentity.of(run_dir, experiment="outage", uri=server.uri)
        training = Training(Tracker(run_dir, params={"lr": 0.1}, tags={"task": "test"}, close_timeout_s=60))
        position = run_dir / "tracking" / "delivered.json"

        def delivered() -> int:
            return int(json.loads(position.read_text())["offset"]) if position.exists() else 0

        training.run(STEPS_BETWEEN)
        wait_until(lambda: delivered() > 0)
        server.signal(signal.SIGSTOP)
        wait_until(server.is_frozen)
        training.run(STEPS_BETWEEN)  # would not end if a step waited for the server
        assert server.is_frozen() and training.step == 2 * STEPS_BETWEEN
        before = delivered()
        server.signal(signal.SIGCONT)
        wait_until(lambda: delivered() > before)
        training.run(STEPS_BETWEEN // 2)
        server.signal(signal.SIGKILL)
        training.run(STEPS_BETWEEN)
        assert not server.answers()
        server.start()
        training.run(STEPS_BETWEEN // 2)
        training.tracker.close("FINISHED")
    finally:
        server.signal(signal.SIGKILL)
    assert "sync" not in capsys.readouterr().err
    ordered = sorted(training.calls_s)
    with capsys.disabled():
        print(f"  tracker calls: median {1e6 * ordered[len(ordered) // 2]:.0f} us, longest {1e3 * ordered[-1]:.2f} ms")

    client = MlflowClient(tracking_uri=server.store)
    experiment = client.get_experiment_by_name("outage")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    steps = list(range(1, training.step + 1))
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in losses) == [(step, 1 / step) for step in steps]
    rates = client.get_metric_history(run.info.run_id, "train/lr")
    assert sorted(point.step for point in rates) == steps
    pictures = sorted(path.name for path in (tmp_path / "artifacts").rglob("*.png"))
    assert [name.split("+")[:3] for name in pictures] == [
        ["first", "step", str(step)] for step in sorted(steps, key=str) if step % STEPS_BETWEEN == 0
    ]
