"""RUN/stacks: what every thread of every rank was doing when a run was ended because it hung, or
lost a rank. One file per rank.

Each dump is appended below a line that says when, who, where and why. A stack gets there in four
ways:

1. `dump`, by the heartbeat's thread, when a verdict ends this process: the Python frames of all
   threads, within C calls too. The file may lie on the very storage that hangs, so the stack is
   taken in memory and written within bounds, or else printed.
2. `arm`, at each beat: a thread of faulthandler's own, which needs no lock of Python's, dumps if no
   beat follows in time.
3. A process that dies of a signal of its own (SIGABRT, as from NCCL's watchdog; SIGSEGV, SIGBUS)
   leaves its stacks while it dies.
4. A process that can do none of that (stopped, or asleep in the kernel) is described by another
   rank of its node, from /proc.
"""

import faulthandler
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from data_prep.console import write_error
from pretrain.ranks.world import Peer

WRITE_S = 10.0
"""How long the end of a run waits for a file system to take the stacks."""
_LONGEST_SHOWN = 20_000
"""Characters, of what could not be written."""


class Stacks:
    """Of one rank; `close` leaves no empty file behind. Without its directory there is no file, and
    a dump is shown instead."""

    def __init__(self, directory: Path, me: Peer, *, armed_s: float):
        self.directory, self._me, self._armed_s = directory, me, armed_s
        self._file: int | None = None
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._open(me)
        self._is_enabled = self._file is not None and not faulthandler.is_enabled()
        if self._file is not None and self._is_enabled:
            faulthandler.enable(self._file)
        self.arm()  # the next beat may never come

    def arm(self) -> None:
        """Dumps after `armed_s`, unless it is armed again."""
        if self._file is not None:
            faulthandler.dump_traceback_later(self._armed_s, file=self._file)

    def dump(self, why: str) -> None:
        file = os.memfd_create("stacks")
        try:
            faulthandler.dump_traceback(file, all_threads=True)
            found = os.pread(file, 1 << 20, 0).decode(errors="replace")
        finally:
            os.close(file)
        self._keep(self._me, why, found)

    def describe(self, peer: Peer) -> str | None:
        """What the kernel reports of a rank of this node, in one line; the whole goes to that
        rank's file."""
        if peer.node != self._me.node:
            return None
        threads = _threads_of(peer.pid)
        found = f"{peer}: {_state_of(threads)}"
        facts = "".join(thread.facts for thread in threads)
        self._keep(peer, f"as rank {self._me.rank} sees it in /proc", f"{found}\n{facts}")
        return found

    def close(self) -> None:
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._is_enabled:
            faulthandler.disable()
        with suppress(OSError):
            is_empty = os.fstat(self._file).st_size == 0
            os.close(self._file)
            if is_empty:
                self._path(self._me).unlink()
                self.directory.rmdir()  # by the last one

    def _path(self, peer: Peer) -> Path:
        return self.directory / f"rank-{peer.rank:04}.txt"

    def _open(self, peer: Peer) -> int:
        return os.open(
            self._path(peer), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )

    def _keep(self, peer: Peer, why: str, found: str) -> None:
        text = f"== {time.strftime('%Y-%m-%d %H:%M:%S %z')}  {peer}: {why}\n{found}\n"
        done = threading.Event()

        def write() -> None:
            with suppress(OSError):
                file = self._open(peer)
                os.write(file, text.encode())
                os.close(file)
                done.set()

        threading.Thread(target=write, name="stacks", daemon=True).start()
        if not done.wait(WRITE_S):
            shown = (
                f"{self._path(peer)} could not be written in {WRITE_S:g} s; it would"
                f" hold:\n{text[:_LONGEST_SHOWN]}\n"
            )
            write_error(shown)


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
    with suppress(OSError):
        for place in Path(f"/proc/{pid}/task").iterdir():
            status = dict(
                line.split(":\t", 1)
                for line in _read(place / "status").splitlines()
                if ":\t" in line
            )
            waits_in, name, state = (
                _read(place / "wchan"),
                status.get("Name", "?"),
                status.get("State", "?"),
            )
            facts = (
                f"  thread {place.name} ({name}): {state}, wchan {waits_in}, syscall"
                f" {_read(place / 'syscall') or '-'}\n"
            )
            facts += "".join(f"    {line}\n" for line in _read(place / "stack").splitlines())
            found.append(
                _Thread(int(place.name), name, state, "" if waits_in == "0" else waits_in, facts)
            )
    return sorted(found, key=lambda thread: (thread.number != pid, thread.number))


def _state_of(threads: list[_Thread]) -> str:
    if not threads:
        return "its process is gone"
    for thread in threads:
        if thread.state[0] in "Tt":
            return f"its process is stopped, by SIGSTOP or a debugger ({thread.state})"
        if thread.state[0] == "D":
            where = f" in {thread.waits_in}" if thread.waits_in else ""
            return (
                f"thread {thread.number} ({thread.name}) sleeps in the kernel{where}, as for a disk"
                f" ({thread.state})"
            )
    if threads[0].state[0] in "ZX":
        return f"its process is dead ({threads[0].state})"
    return (
        f"its process is alive ({threads[0].state}), but kept its heartbeat from running; its"
        " stacks should say why"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # what is for root alone, or gone meanwhile
        return ""
