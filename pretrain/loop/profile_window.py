"""The traces of `tracking.profile`: RUN/profile/rank-0000.json.gz, for Perfetto or
chrome://tracing. Each step is a `ProfilerStep#N`, with the spans of its parts (engine/step.py)."""

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from data_prep.publish import write_atomic
from pretrain.config import parse_window
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World


class ProfileWindow:
    """Profiler of the steps in `tracking.profile`. Call `begin_step` before each step. Call `close`
    after the step for which `is_last` is true, and after the loop."""

    def __init__(self, window: str | None, run_dir: Path, *, world: World, device: torch.device):
        self._steps = parse_window(window) if window else range(0)
        self._path = run_dir / "profile" / f"rank-{world.rank:04}.json.gz"
        self._is_printer, self._on_gpu = world.is_first, device.type == "cuda"
        self._profiler: profile | None = None
        self._step = ExitStack()

    def begin_step(self, step: int) -> None:
        if step not in self._steps:
            return
        if self._profiler is None:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
            if not self._on_gpu:
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides "no GPU" reports
            self._profiler = profile(activities=kinds, acc_events=True)
            self._profiler.start()
        self._step.close()
        self._step.enter_context(record_function(f"ProfilerStep#{step}"))

    def is_last(self, step: int) -> bool:
        return self._profiler is not None and step == self._steps[-1]

    def close(self) -> None:
        """Write the trace if the profiler has run. A full disk does not end the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        PROGRESS.mark("writing its trace")
        self._step.close()
        profiler.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(suffix=".json.gz") as file:
                profiler.export_chrome_trace(file.name)
                write_atomic(self._path, Path(file.name).read_bytes())
        except OSError as error:
            print(f"WARNING: tracking.profile: no trace is written ({error})", file=sys.stderr)
            return
        if self._is_printer:
            place = f"{self._path.parent} has a trace of each rank"
            print(f"tracking.profile: {place}. Open it at https://ui.perfetto.dev", flush=True)
