"""The process that touches GPU, disks and network for a rank, so that the rank itself can always speak.

A hung driver, file system or collective hangs this process, in the kernel even. Its rank notices that no answer comes, says what
was being touched, and kills it; a fresh one takes the next task. Rank and worker talk in lines of JSON over two pipes.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from cluster.preflight.figures import DIED, SILENT, UNCHECKED, Fault

_PR_SET_PDEATHSIG = 1
TICK_S = 0.02
"""How often the rank does something else while it waits."""

Task = dict[str, Any]


class Tell(Protocol):
    """Says what is about to be touched: the last such word is what hangs. `kind`: of the fault that this would be."""

    def __call__(self, doing: str, kind: str = SILENT) -> None: ...


Do = Callable[[Task, Tell], dict[str, Any]]
"""What the worker makes of a task."""


class NoAnswerError(Exception):
    """The worker hung, died or failed: `fault` says what its rank reports."""

    def __init__(self, fault: Fault):
        super().__init__(fault.text)
        self.fault = fault


class Worker:
    """Forked from a process that has imported torch and used nothing of it: CUDA does not live through a fork."""

    def __init__(self, do: Do):
        self._do = do
        self._pid: int | None = None

    def ask(self, task: Mapping[str, Any], *, timeout_s: float, meanwhile: Callable[[], None]) -> dict[str, Any]:
        """The answer; `meanwhile` is called every TICK_S until it has come."""
        if self._pid is None:
            self._start()
        deadline_s, rest = time.monotonic() + timeout_s, b""
        doing, kind = "its start", SILENT
        with suppress(BrokenPipeError):
            os.write(self._tasks, json.dumps(task).encode() + b"\n")
        while time.monotonic() < deadline_s:
            meanwhile()
            if not select.select([self._answers], [], [], TICK_S)[0]:
                continue
            received = os.read(self._answers, 65536)
            if not received:
                raise NoAnswerError(self._death(doing))
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "answer" in said:
                    return dict(said["answer"])
                if "failed" in said:
                    self.stop()
                    raise NoAnswerError(Fault(UNCHECKED, f"{doing} could not be checked: {said['failed']}"))
                doing, kind = said["doing"], said["kind"]
        self.stop()
        raise NoAnswerError(Fault(kind, f"no answer from {doing} for {timeout_s:g} s"))

    def stop(self, *, grace_s: float = 0.0) -> None:
        """In its own time it gives the GPU's memory back before training asks for it. Killed, it is not waited for: a process that
        hangs in a driver stays until the driver lets it go."""
        if self._pid is None:
            return
        pid, deadline_s = self._forget(), time.monotonic() + grace_s
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() >= deadline_s:
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(TICK_S)

    def _forget(self) -> int:
        """Its number; it ends by itself when its tasks do."""
        assert self._pid is not None
        os.close(self._tasks)
        os.close(self._answers)
        pid, self._pid = self._pid, None
        return pid

    def _death(self, doing: str) -> Fault:
        _, status = os.waitpid(self._forget(), 0)
        if os.WIFSIGNALED(status):
            return Fault(DIED, f"a process that used {doing} was ended by {signal.Signals(os.WTERMSIG(status)).name}")
        return Fault(
            UNCHECKED, f"{doing} could not be checked: the process ended with {os.waitstatus_to_exitcode(status)}"
        )

    def _start(self) -> None:
        tasks, self._tasks = os.pipe()
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._tasks)
                os.close(self._answers)
                _serve(self._do, tasks, answers)
            finally:
                os._exit(1)
        os.close(tasks)
        os.close(answers)


def _serve(do: Do, tasks: int, answers: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def say(**message: object) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    def tell(doing: str, kind: str = SILENT) -> None:
        say(doing=doing, kind=kind)

    with open(tasks) as lines:
        for line in lines:
            try:
                say(answer=do(json.loads(line), tell))
            except Exception as error:  # noqa: BLE001 (whatever it is, the rank must hear of it)
                say(failed=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}")
    os._exit(0)
