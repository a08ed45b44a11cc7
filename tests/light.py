"""A process that has imported our programs without heavy libraries. Each command runs in a fork, so
its time and its imports are its own.

Its stdin has lines of JSON (the folder, then the words). It prints a line of JSON for each.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

from tests.budgets import REPOSITORY

PROGRAMS = {
    **{name: f"{name}.cli" for name in ("data_prep", "pretrain", "finetune", "analysis")},
    "cluster/submit": "cluster.queue_jobs",
    "wide-mlps": "cluster.cli",
}
HEAVY = [
    "torch", "torchvision", "timm", "deepspeed", "accelerate", "mlflow", "matplotlib", "scipy", "safetensors", "pandas", "pyarrow",
]  # fmt: skip


class Answer(NamedTuple):
    code: int
    said: str
    """Output of both streams."""
    cpu_s: float
    heavy: list[str]
    """Slow libraries that the command imported."""


class Light:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.light"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, place: Path, *words: str) -> Answer:
        self._process.stdin.write(json.dumps([str(place), *words]) + "\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


def main() -> None:
    modules = {name: __import__(module, fromlist=["main"]) for name, module in PROGRAMS.items()}
    for line in sys.stdin:
        place, program, *words = json.loads(line)
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                os.chdir(place)
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                code = 99
                try:
                    code = modules[program].main(words)
                except SystemExit as ended:
                    code = ended.code if isinstance(ended.code, int) else 1
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                print(
                    end="\0" + " ".join(name for name in HEAVY if name in sys.modules), flush=True
                )
                os._exit(code)
            _, status, used = os.wait4(child, 0)
            output.seek(0)
            said, _, heavy = output.read().rpartition("\0")
        answer = Answer(
            os.waitstatus_to_exitcode(status),
            said.strip(),
            used.ru_utime + used.ru_stime,
            heavy.split(),
        )
        print(json.dumps(answer._asdict()), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
