"""RUN/stacks: what every thread of every rank was doing when a run was ended because it hung, or lost a rank. One file per rank.

Each dump is appended below a line that says when, who, where and why. The ways in which a stack comes there:

1. `dump`, by the heartbeat's thread, when a verdict ends this process: the Python frames of all threads, within C calls too. The
   file may lie on the very storage that hangs, so it is taken in memory and written within bounds, or else shown.
2. `arm`, at each beat: a thread of faulthandler's own, which needs no lock of Python's, dumps if no beat follows in time.
3. A process that dies of a signal of its own (SIGABRT, as of NCCL's watchdog; SIGSEGV, SIGBUS) leaves its stacks while it dies.
4. A process that can do none of that (stopped, or asleep in the kernel) is described by a rank of its node, from /proc.
"""

import contextlib
import faulthandler
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.ranks.heartbeat_wire import Peer

WRITE_S = 10.0
"""How long the end of a run waits for a file system to take the stacks."""
_LONGEST_SHOWN = 20_000
"""Characters, of what could not be written."""
_PROC = Path("/proc")


class Stacks:
    """Of one rank; `close` leaves no empty file behind."""

    def __init__(self, directory: Path, me: Peer):
        self.directory, self._me = directory, me
        self._descriptor: int | None = None
        self._heeds_signals = False

    def open(self) -> "Stacks":
        """Without its directory there is no file, and a dump is shown instead."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open(self._path(self._me))
        if self._descriptor is not None and not faulthandler.is_enabled():
            faulthandler.enable(self._descriptor)
            self._heeds_signals = True
        return self

    def arm(self, after_s: float) -> None:
        """Dumps after so long, unless it is armed again."""
        if self._descriptor is not None:
            faulthandler.dump_traceback_later(after_s, file=self._descriptor)

    def dump(self, why: str) -> None:
        file = os.memfd_create("stacks")
        try:
            faulthandler.dump_traceback(file, all_threads=True)
            found = os.pread(file, 1 << 20, 0).decode(errors="replace")
        finally:
            os.close(file)
        self._keep(self._me, f"{_heading(self._me, why)}\n{found}\n")

    def describe(self, peer: Peer) -> str | None:
        """What the kernel says of a rank of this node, in a word; the whole goes to that rank's file."""
        if peer.node != self._me.node:
            return None
        threads = _threads_of(peer.pid)
        said = _in_words(peer, threads)
        lines = [f"{_heading(peer, f'as rank {self._me.rank} sees it in /proc')}\n{said}\n"]
        self._keep(peer, "".join([*lines, *map(str, threads), "\n"]))
        return said

    def close(self) -> None:
        """May be called again."""
        if self._descriptor is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._heeds_signals:
            faulthandler.disable()
        with contextlib.suppress(OSError):
            is_empty = os.fstat(self._descriptor).st_size == 0
            os.close(self._descriptor)
            if is_empty:
                self._path(self._me).unlink()
                self.directory.rmdir()  # by the last one
        self._descriptor = None

    def _path(self, peer: Peer) -> Path:
        return self.directory / f"rank-{peer.rank:04}.txt"

    def _keep(self, peer: Peer, text: str) -> None:
        done = threading.Event()

        def write() -> None:
            with contextlib.suppress(OSError):
                file = _open(self._path(peer))
                os.write(file, text.encode())
                os.close(file)
                done.set()

        threading.Thread(target=write, name="stacks", daemon=True).start()
        if not done.wait(WRITE_S):
            shown = (
                f"{self._path(peer)} could not be written in {WRITE_S:g} s; it would hold:\n{text[:_LONGEST_SHOWN]}\n"
            )
            os.write(2, shown.encode())


@dataclass(frozen=True)
class _Thread:
    number: int
    name: str
    state: str
    """As in "D (disk sleep)"."""
    waits_in: str
    """The kernel's function; empty where it runs, or the kernel does not say."""
    syscall: str
    kernel_stack: str

    def __str__(self) -> str:
        more = "".join(f"    {line}\n" for line in self.kernel_stack.splitlines())
        facts = f"wchan {self.waits_in or '-'}, syscall {self.syscall or '-'}"
        return f"  thread {self.number} ({self.name}): {self.state}, {facts}\n{more}"


def _threads_of(pid: int) -> list[_Thread]:
    """The main thread first; none where the process is gone."""
    found = []
    with contextlib.suppress(OSError):
        for place in sorted((_PROC / str(pid) / "task").iterdir(), key=lambda place: int(place.name)):
            status = dict(line.split(":\t", 1) for line in _read(place / "status").splitlines() if ":\t" in line)
            waits_in = _read(place / "wchan")
            found.append(
                _Thread(
                    int(place.name),
                    status.get("Name", "?"),
                    status.get("State", "?"),
                    "" if waits_in == "0" else waits_in,
                    _read(place / "syscall"),
                    _read(place / "stack"),
                )
            )
    return sorted(found, key=lambda thread: thread.number != pid)


def _in_words(peer: Peer, threads: list[_Thread]) -> str:
    if not threads:
        return f"{peer}: its process is gone"
    stopped = next((each for each in threads if each.state[:1] in "Tt"), None)
    asleep = next((each for each in threads if each.state[:1] == "D"), None)
    if stopped is not None:
        return f"{peer}: its process is stopped, by SIGSTOP or a debugger ({stopped.state})"
    if asleep is not None:
        where = f" in {asleep.waits_in}" if asleep.waits_in else ""
        return f"{peer}: thread {asleep.number} ({asleep.name}) sleeps in the kernel{where}, as for a disk ({asleep.state})"
    main = threads[0]
    if main.state[:1] in "ZX":
        return f"{peer}: its process is dead ({main.state})"
    return f"{peer}: its process lives ({main.state}), but kept its heartbeat from running; its stacks should say why"


def _heading(peer: Peer, why: str) -> str:
    return f"== {time.strftime('%Y-%m-%d %H:%M:%S %z')}  {peer}: {why}"


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # what is for root alone, or gone meanwhile
        return ""
