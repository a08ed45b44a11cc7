"""Where an analysis computes: `--device`."""

import argparse
from typing import TYPE_CHECKING

from data_prep.errors import UserError

if TYPE_CHECKING:
    import torch


def add_device(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")


def device_of(asked: str | None) -> "torch.device":
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch finds no CUDA device here; leave it out, or give cpu")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
