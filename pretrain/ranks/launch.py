"""Start N local ranks of a command. If a rank dies, its error is printed first, and the others end
within seconds.

The environment variables equal torchrun's, but the launcher does not import torch and prints no
traceback. Ctrl-C and SIGTERM reach every rank. A rank then finishes its step, writes a checkpoint
and exits with 0. Ranks report that they have joined the process group (`report_joined`). If a rank
ends before all have joined, the launcher kills the others. They have nothing to save, and torch
runs no signal handler while they wait.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from data_prep.console import output_is_progress, write_error
from data_prep.exit_codes import BUSY
from data_prep.interrupts import ANSWERED, INTERRUPTED, keep
from pretrain.ranks.preemption import LAST_WRITE_S, SIGNALS, heeded_signals
from pretrain.ranks.world import free_port

_PR_SET_PDEATHSIG = 1
LAUNCHED_WITH = "WIDE_MLPS_LAUNCHED_WITH"
"""Environment variable with the launcher's arguments, for the run's page in MLflow."""
_JOINED_PIPE = "WIDE_MLPS_JOINED_PIPE"
LAST_WORDS_S = 5.0
"""Seconds that other ranks have to end after a rank has died."""
GRACE_S = LAST_WRITE_S + 10.0
"""Seconds that ranks get after SIGTERM to write a checkpoint. Then they are killed."""


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this child when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def report_joined() -> None:
    """Tell the launcher, if one started this rank, that all ranks have joined."""
    if pipe := os.environ.pop(_JOINED_PIPE, ""):
        os.write(int(pipe), b"j")


def launch(command: Sequence[str], *, num_ranks: int, heed_signals: bool = False) -> int:
    """Run the command on each rank. Return the exit code of the first rank that failed, or 0. Ranks
    inherit the standard streams.

    `heed_signals`: True if the command installs a StopFlag. An earlier signal stays pending until
    then, and does not end the rank.
    """
    joined, joined_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    shared = os.environ | {
        _JOINED_PIPE: str(joined_writer),
        LAUNCHED_WITH: f"--ranks {num_ranks}",
        ANSWERED: "saves" if heed_signals else "ends",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))

    def prepare() -> None:
        end_with_parent()
        if not heed_signals:
            # data_prep/interrupts.py handles and unblocks SIGINT
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(SIGNALS) - {signal.SIGINT})

    keep("")  # `answer` prints the message
    output_is_progress()
    ranks: list[subprocess.Popen[bytes]] = []
    # ranks inherit the mask; signals that arrive now are passed on afterwards
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for rank in range(num_ranks):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                command,
                env=environment,
                preexec_fn=prepare,  # noqa: PLW1509 (no threads here)
                pass_fds=[joined_writer],
            )
            ranks.append(process)
        restore = _forward_signals(ranks, saves=heed_signals)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        return _watch(ranks, joined=joined)
    finally:
        _end(ranks, have_joined=_have_joined(joined))
        restore()
        os.close(joined)
        os.close(joined_writer)


def _have_joined(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


def _watch(ranks: list[subprocess.Popen[bytes]], *, joined: int) -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := [(number, code) for number, code in enumerate(codes) if code]:
            # a rank that a signal killed comes first: the others may have ended because of it
            number, code = min(failed, key=lambda each: each[1] > 0)
            # the first rank reports an error that all ranks have
            _wait(ranks if _have_joined(joined) else ranks[:1], LAST_WORDS_S)
            if code not in (INTERRUPTED, BUSY):
                print(
                    f"launch: rank {number} ended with {describe(code)}; ending the others",
                    file=sys.stderr,
                )
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def describe(code: int) -> str:
    """Return how a process ended, for example SIGTERM or "exit code 1"."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _forward_signals(ranks: list[subprocess.Popen[bytes]], *, saves: bool) -> Callable[[], None]:
    """Forward signals to the ranks. A terminal itself sends Ctrl-C to all ranks. The launcher
    confirms the first Ctrl-C, and sends SIGTERM to ranks that save, because SIGINT may have reached
    only the launcher. A second Ctrl-C kills the ranks. Return a function that restores the
    handlers."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(number)

    def answer(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, end_at_once)
        words = (
            "stopping at the next step, with a checkpoint"
            if saves
            else "stopping; nothing more is saved"
        )
        # a signal may interrupt print itself
        write_error(f"\nlaunch: {words}; Ctrl-C again ends the command at once\n")
        if saves:
            pass_on(signal.SIGTERM, None)

    def end_at_once(_number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            rank.kill()
        os._exit(INTERRUPTED)

    handlers = dict.fromkeys(heeded_signals(), pass_on) | {signal.SIGINT: answer}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore


def _end(ranks: list[subprocess.Popen[bytes]], *, have_joined: bool) -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL) if have_joined else (signal.SIGKILL,):
        alive = [rank for rank in ranks if rank.poll() is None]
        for rank in alive:
            rank.send_signal(stop)
        _wait(alive, GRACE_S)


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
        time.sleep(0.05)
