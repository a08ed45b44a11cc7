"""The option `--device`."""

import argparse
from typing import TYPE_CHECKING

from data_prep.errors import UserError

if TYPE_CHECKING:
    import torch


def add_device(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")


def device_of(asked: str | None) -> "torch.device":
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        problem, fix = "torch finds no CUDA device", "leave it out, or give cpu"
        raise UserError("--device", problem, fix, code="missing-device")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
