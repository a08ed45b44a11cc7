"""What a check of the doctor finds, and the table of it. The doctor imports nothing that must be installed: that may be missing."""

import os
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "FAULT"]
_INDENT = 21


@dataclass(frozen=True)
class Finding:
    check: str
    """What was looked at, in a word or two."""
    verdict: Verdict
    """A FAULT stops jobs or spoils them; a warning may be meant."""
    found: str
    remedy: str = ""
    """What to do about it; every FAULT has one."""


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    errors: str

    @property
    def last_error(self) -> str:
        """Its own words for what is wrong, without what SLURM repeats in front of them."""
        lines = [line.strip() for line in (self.errors or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with exit code {self.code} and said nothing"


def ask(words: Sequence[str], *, environment: Mapping[str, str] = os.environ, timeout_s: float = 30.0) -> Answer:
    """The answer of a command; one that is missing or hangs is an answer, too."""
    try:
        done = subprocess.run(
            list(words),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{words[0]} gave no answer for {timeout_s:.0f} s")
    except OSError as error:
        return Answer(127, "", f"{words[0]} cannot be started ({error.strerror})")
    return Answer(done.returncode, done.stdout, done.stderr)


def table(findings: Sequence[Finding], *, width: int) -> str:
    """One block for each finding: verdict, check, what was found, and below it the remedy."""
    lines = []
    for finding in findings:
        head = f"{finding.verdict:<8} {finding.check:<{_INDENT - 10}} "
        lines += _wrapped(finding.found, first=head, width=width)
        if finding.remedy:
            lines += _wrapped(finding.remedy, first=" " * _INDENT + "-> ", width=width)
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    faults, warnings = (sum(finding.verdict == verdict for finding in findings) for verdict in ("FAULT", "warning"))
    if faults:
        return f"{_count(faults, 'fault')}, {_count(warnings, 'warning')}: jobs will not run well until the faults are mended."
    if warnings:
        return f"No fault, {_count(warnings, 'warning')}: jobs can run; read the warnings once."
    return "No fault: jobs can run."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _wrapped(text: str, *, first: str, width: int) -> list[str]:
    later = " " * max(_INDENT, len(first) if first.isspace() or "->" in first else _INDENT)
    return textwrap.wrap(
        " ".join(text.split()),
        width=width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
