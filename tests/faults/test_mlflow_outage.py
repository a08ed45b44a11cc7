"""An MLflow server is frozen, killed and restarted while a run logs its steps.

Nothing is lost or duplicated, there is one run with the correct status, and no step waits for the
server.
"""

import json
import multiprocessing
import os
import signal
import time
import urllib.request
import warnings
from pathlib import Path

import psutil
import pytest
import uvicorn
from mlflow import MlflowClient
from PIL import Image

from pretrain.ranks.world import free_port
from pretrain.tracking.store import make_database
from pretrain.tracking.tracker import RunIdentity, Tracker
from tests.moments import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

STEPS_BETWEEN = 60
FORK = multiprocessing.get_context("fork")


class Server:
    """`mlflow server --workers 1` on loopback, forked after its imports to save seconds."""

    def __init__(self, folder: Path, name: str = "server.db"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # starlette warns
            import mlflow.server.fastapi_app  # noqa: F401 (once, for all forks)

        self.store, self.port = f"sqlite:///{folder}/{name}", free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        make_database(
            folder / name, files=folder / "artifacts"
        )  # otherwise its first reply would take too long
        self._settings = {
            "_MLFLOW_SERVER_FILE_STORE": self.store,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"{folder}/artifacts",
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        }

    def start(self) -> "Server":
        self.process = FORK.Process(target=self._serve, daemon=True)
        self.process.start()
        wait_until(self.answers, lives=self.process.is_alive)
        return self

    def _serve(self) -> None:
        from mlflow.server import _UVICORN_LOG_CONFIG

        os.closerange(
            3, 1 << 10
        )  # otherwise it would keep the deliverer's pipe open at its second start
        warnings.simplefilter("ignore")
        os.environ.update(self._settings)
        words = [
            "--log-config",
            str(_UVICORN_LOG_CONFIG),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        uvicorn.main(
            [*words, "mlflow.server.fastapi_app:app"]
        )  # the arguments of mlflow.server._build_uvicorn_command

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()

    def is_frozen(self) -> bool:
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED


class Training:
    """A loop that logs each step."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.step = tracker, 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            time.sleep(0.002)
            self.tracker.metrics({"train/loss": 1 / self.step, "train/lr": 0.1}, step=self.step)
            if self.step % STEPS_BETWEEN == 0:
                self.tracker.picture("first", lambda: Image.new("RGB", (8, 8)), step=self.step)


def test_an_outage_costs_no_metric_no_step_and_no_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deliverer is killed, too, while the server is frozen; the next event restarts it."""
    monkeypatch.setenv(
        "MLFLOW_HTTP_REQUEST_TIMEOUT", "2"
    )  # for the deliverer, whose failed attempts would last 10 s
    monkeypatch.setattr("pretrain.tracking.tracker.RESTART_S", 0.0)
    server, run_dir = Server(tmp_path).start(), tmp_path / "run"
    capsys.readouterr()
    try:
        RunIdentity.of(run_dir, experiment="outage", uri=server.uri)
        training = Training(
            Tracker(run_dir, params={"lr": 0.1}, tags={"task": "test"}, close_timeout_s=60)
        )
        position = run_dir / "tracking" / "delivered.json"

        def delivered() -> int:
            return int(json.loads(position.read_text())["offset"]) if position.exists() else 0

        training.run(STEPS_BETWEEN)
        wait_until(lambda: delivered() > 0)
        server.signal(signal.SIGSTOP)
        wait_until(server.is_frozen)
        training.run(STEPS_BETWEEN // 2)  # would block if a step waited for the server
        deliverer = training.tracker._deliverer
        assert deliverer is not None and deliverer.process is not None
        deliverer.process.kill()
        training.run(STEPS_BETWEEN // 2)
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
    assert "(SIGKILL; see" in capsys.readouterr().err

    client = MlflowClient(tracking_uri=server.store)
    experiment = client.get_experiment_by_name("outage")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    steps = list(range(1, training.step + 1))
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in losses) == [
        (step, 1 / step) for step in steps
    ]
    rates = client.get_metric_history(run.info.run_id, "train/lr")
    assert sorted(point.step for point in rates) == steps
    pictures = sorted(path.name for path in (tmp_path / "artifacts").rglob("*.png"))
    assert pictures == [f"first-{step:08d}.png" for step in steps if step % STEPS_BETWEEN == 0]
