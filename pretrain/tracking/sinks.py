"""Write the event log of a run for other tools, in RUN/tracking/TOOL/: TensorBoard and Weights &
Biases (offline).

Opening a sink rewrites its files from the beginning of the log, so a kill duplicates nothing. Both
tools get metrics. TensorBoard also gets images, Weights & Biases parameters.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from pretrain.tracking.tracker import JOURNAL, RunIdentity, image_name, readable_events


class Sink(Protocol):
    def write(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """The files of one run for other tools (sinks), and their position in the event log."""

    def __init__(self, run_dir: Path, names: Iterable[str]):
        self._journal, self._offset = run_dir / JOURNAL, 0
        self._sinks = [open_sink(name, run_dir) for name in names]

    def write(self) -> int:
        """Write the new events of the log. Return their number."""
        if not self._sinks or not self._journal.exists():
            return 0
        with open(self._journal, "rb") as file:
            file.seek(self._offset)
            lines = [line for line in file if line.endswith(b"\n")]
        events = readable_events(lines)
        for sink in self._sinks:
            for event in events:
                sink.write(event)
        self._offset += sum(map(len, lines))
        return len(events)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_sink(name: str, run_dir: Path) -> Sink:
    folder = run_dir / "tracking" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == "tensorboard":
        return TensorBoard(folder)
    return Wandb(folder, RunIdentity.read(run_dir))


class TensorBoard:
    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, event: dict[str, Any]) -> None:
        time_s = event["time_ms"] / 1000
        if event["event"] == "metrics":
            for name, value in event["values"].items():
                self._writer.add_scalar(name, value, event["step"], walltime=time_s)
        elif event["event"] == "image" and Path(event["path"]).exists():
            with Image.open(event["path"]) as image:
                values_HWC = np.asarray(image.convert("RGB"))
            name = image_name(event["key"]).replace(":", "/")
            self._writer.add_image(
                name, values_HWC, event["step"], walltime=time_s, dataformats="HWC"
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """An offline run of Weights & Biases. `wandb sync RUN/tracking/wandb/wandb/offline-run-*` sends
    it, each time under the same id."""

    def __init__(self, folder: Path, identity: RunIdentity):
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run: Any = wandb.init(
            mode="offline",
            dir=folder,
            project=identity.experiment,
            name=identity.name,
            id=identity.run_key,
            settings=wandb.Settings(
                console="off", x_disable_stats=True, disable_git=True, x_save_requirements=False
            ),
        )
        # wandb's own step may not decrease, but node metrics count their own steps
        self._run.define_metric("*", step_metric="step")
        self._code = 0

    def write(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start" | "params":
                self._run.config.update(event["params"], allow_val_change=True)
            case "metrics":
                self._run.log(
                    event["values"] | {"step": event["step"], "_timestamp": event["time_ms"] / 1000}
                )
            case "end":
                self._code = int(event["status"] != "FINISHED")

    def close(self) -> None:
        self._run.finish(exit_code=self._code)
