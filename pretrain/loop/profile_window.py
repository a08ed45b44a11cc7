"""A trace of the steps of `tracking.profile` on each rank: RUN/profile/rank-0000.json.gz.

The files have the format of chrome://tracing, which Perfetto reads, too. Each step is a
`ProfilerStep#N`, with the spans of its parts (`span` in engine/step.py).
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from data_prep.publish import write_atomic
from pretrain.config import parse_window
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World


class ProfileWindow:
    """Call `begin_step` before each step of the loop, and `close` after `is_last` or the loop."""

    def __init__(self, window: str | None, run_dir: Path, *, world: World, device: torch.device):
        self._steps = parse_window(window) if window else range(0)
        self._path = run_dir / "profile" / f"rank-{world.rank:04}.json.gz"
        self._is_first_rank = world.is_first
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profiler: profile | None = None
        self._step: record_function | None = None

    def begin_step(self, step: int) -> None:
        if step not in self._steps:
            return
        if self._profiler is None:
            if ProfilerActivity.CUDA not in self._activities:
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it misses a GPU, on stderr
            self._profiler = profile(activities=self._activities, acc_events=True)
            self._profiler.start()
        self._end_step()
        self._step = record_function(f"ProfilerStep#{step}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def is_last(self, step: int) -> bool:
        return self._profiler is not None and step == self._steps[-1]

    def close(self) -> None:
        """Write the trace, if one was begun. An error of the disk does not end the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        PROGRESS.mark("writing its trace")
        self._end_step()
        profiler.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory() as place:
                trace = Path(place) / "trace.json.gz"
                profiler.export_chrome_trace(str(trace))
                write_atomic(self._path, trace.read_bytes())
        except OSError as error:
            print(f"WARNING: tracking.profile: the trace is not written ({error})", file=sys.stderr)
            return
        if self._is_first_rank:
            print(
                f"tracking.profile: one trace for each rank is in {self._path.parent}. Open it at"
                " https://ui.perfetto.dev or chrome://tracing",
                flush=True,
            )

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self._step = None
