"""RUN/stacks: what every thread of every rank was doing when a run was ended because it hung, or lost a rank. One file per rank.

Each dump is appended below a line that says when, who, where and why. A stack gets there in four ways:

1. `dump`, by the heartbeat's thread, when a verdict ends this process: the Python frames of all threads, within C calls too. The
   file may lie on the very storage that hangs, so the stack is taken in memory and written within bounds, or else printed.
2. `arm`, at each beat: a thread of faulthandler's own, which needs no lock of Python's, dumps if no beat follows in time.
3. A process that dies of a signal of its own (SIGABRT, as from NCCL's watchdog; SIGSEGV, SIGBUS) leaves its stacks while it dies.
4. A process that can do none of that (stopped, or asleep in the kernel) is described by another rank of its node, from /proc.
"""

import contextlib
import faulthandler
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from pretrain.ranks.world import Peer

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
        self._is_enabled = False

    def open(self) -> "Stacks":
        """Without its directory there is no file, and a dump is shown instead."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open(self._path(self._me))
        if self._descriptor is not None and not faulthandler.is_enabled():
            faulthandler.enable(self._descriptor)
            self._is_enabled = True
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
        """What the kernel reports of a rank of this node, in one line; the whole goes to that rank's file."""
        if peer.node != self._me.node:
            return None
        threads = _threads_of(peer.pid)
        found = _in_words(peer, threads)
        heading = _heading(peer, f"as rank {self._me.rank} sees it in /proc")
        self._keep(peer, f"{heading}\n{found}\n{''.join(thread.facts for thread in threads)}\n")
        return found

    def close(self) -> None:
        """May be called again."""
        if self._descriptor is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._is_enabled:
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
            shown = f"{self._path(peer)} could not be written in {WRITE_S:g} s; it would hold:\n{text[:_LONGEST_SHOWN]}\n"
            os.write(2, shown.encode())


class _Thread(NamedTuple):
    number: int
    name: str
    state: str
    """As in "D (disk sleep)"."""
    waits_in: str
    """The kernel's function; empty where it runs, or the kernel does not say."""
    facts: str


def _threads_of(pid: int) -> list[_Thread]:
    """The main thread first; none where the process is gone."""
    found = []
    with contextlib.suppress(OSError):
        for place in (_PROC / str(pid) / "task").iterdir():
            status = dict(line.split(":\t", 1) for line in _read(place / "status").splitlines() if ":\t" in line)
            waits_in, name, state = _read(place / "wchan"), status.get("Name", "?"), status.get("State", "?")
            facts = f"  thread {place.name} ({name}): {state}, wchan {waits_in}, syscall {_read(place / 'syscall') or '-'}\n"
            facts += "".join(f"    {line}\n" for line in _read(place / "stack").splitlines())
            found.append(_Thread(int(place.name), name, state, "" if waits_in == "0" else waits_in, facts))
    return sorted(found, key=lambda thread: (thread.number != pid, thread.number))


def _in_words(peer: Peer, threads: list[_Thread]) -> str:
    if not threads:
        return f"{peer}: its process is gone"
    main = threads[0]
    for thread in threads:
        if thread.state[:1] in "Tt":
            return f"{peer}: its process is stopped, by SIGSTOP or a debugger ({thread.state})"
    for thread in threads:
        if thread.state[:1] == "D":
            where = f" in {thread.waits_in}" if thread.waits_in else ""
            return f"{peer}: thread {thread.number} ({thread.name}) sleeps in the kernel{where}, as for a disk ({thread.state})"
    if main.state[:1] in "ZX":
        return f"{peer}: its process is dead ({main.state})"
    return f"{peer}: its process is alive ({main.state}), but kept its heartbeat from running; its stacks should say why"


def _heading(peer: Peer, why: str) -> str:
    return f"== {time.strftime('%Y-%m-%d %H:%M:%S %z')}  {peer}: {why}"


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # what is for root alone, or gone meanwhile
        return ""
