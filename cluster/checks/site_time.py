"""SLURM's ways to write a duration."""

import re

_FORM = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def minutes_of(text: str) -> float | None:
    """Minutes of `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`; inf without a limit; None if it is none of these."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None or third is not None:  # hours come first
        return (days or 0) * 1440 + (first or 0) * 60 + (second or 0) + (third or 0) / 60
    return (first or 0) + (second or 0) / 60


def in_words(minutes: float) -> str:
    if minutes == float("inf"):
        return "no limit"
    for unit, size in (("d", 1440), ("h", 60)):
        if minutes >= 2 * size:
            return f"{minutes / size:.3g} {unit}"
    return f"{minutes:.3g} min"
