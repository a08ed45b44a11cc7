"""Lengths of training as people say them: `90 epochs`, `5000 steps`, `1_000_000 samples`; converted to steps once."""

import re
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BeforeValidator

Unit = Literal["steps", "epochs", "samples"]
_FORM = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*(\w+)\s*")


class Length(NamedTuple):
    amount: float
    unit: Unit

    def steps(self, *, global_batch_size: int, num_samples: int) -> int:
        """Enough steps for the whole length: the last one may reach over its end."""
        match self.unit:
            case "steps":
                return int(self.amount)
            case "samples":
                return -int(-self.amount // global_batch_size)
            case "epochs":
                return -int(-self.amount * num_samples // global_batch_size)


def parse_length(text: str) -> Length:
    form = _FORM.fullmatch(text)
    unit = (form.group(2).rstrip("s") + "s") if form else ""
    if form is None or unit not in get_args(Unit):
        raise ValueError(
            f"{text!r} is not a length; write a number and a unit, such as '90 epochs', '5000 steps' or '1_000_000 samples'"
        )
    count = float(form.group(1))
    if unit == "steps" and count != int(count):
        raise ValueError(f"{text!r} is not a whole number of steps")
    return Length(count, unit)  # type: ignore[arg-type]


def _with_unit(value: object) -> object:
    if isinstance(value, int | float):
        raise ValueError(f"{value} has no unit; write such as '{value} steps' or '{value} epochs'")
    return value


def _checked(text: str) -> str:
    parse_length(text)
    return text


def _nonzero(text: str) -> str:
    if parse_length(text).amount == 0:
        raise ValueError(f"{text!r} is never; write how often, or a length beyond the end of training")
    return text


Duration = Annotated[str, BeforeValidator(_with_unit), AfterValidator(_checked)]
Cadence = Annotated[str, BeforeValidator(_with_unit), AfterValidator(_nonzero)]
