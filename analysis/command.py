"""Add and run commands (functions from options to a `Result`), and add the options that several
commands have."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.output import Result, show, write
from data_prep.errors import UserError
from data_prep.exit_codes import OK
from data_prep.explain import Parser, Verbs
from pretrain.checkpoints.run import check_place

if TYPE_CHECKING:
    import torch


def add_command(
    verbs: Verbs, name: str, make: Callable[[Any], Result], *, out: str = "", **about: str
) -> Parser:
    """Add a command. `out`: default of --out; {NAME} means the value of option NAME. `about`:
    help and epilog for argparse."""
    command = verbs.add_parser(name, **about)
    command.set_defaults(run=run, make=make, default_out=out or name)
    words = f"path of the outputs, without an ending (default: {out or name})"
    command.add_argument("--out", type=Path, help=words)
    return command


def run(options: argparse.Namespace) -> int:
    out = options.out or Path(options.default_out.format(**vars(options)))
    out = out.with_suffix("") if out.suffix == ".parquet" else out
    if out.suffix in (".png", ".svg", ".pdf", ".json", ".md"):
        problem = f"{out} has an extension, but it gets several"
        raise UserError("--out", problem, f"give {out.with_suffix('')}", code="bad-value")
    if not out.parent.is_file():  # otherwise RUNS is a file, and its check has the better message
        check_place(out.absolute().parent, field="--out")
    options.out = out
    result = options.make(options)
    show(result)
    files = write(result, options.out, getattr(options, "points", None) or ())
    print(f"written: {', '.join(map(str, files))}")
    return OK


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if available")


def device_of(name: str | None) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        problem, fix = "torch finds no CUDA device", "remove --device, or give cpu"
        raise UserError("--device", problem, fix, code="missing-device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def add_points(command: argparse.ArgumentParser, *names: str, **about: Any) -> None:
    """Add the option or argument `points`: results files. NAME.json contains their hashes."""
    about = {"help": "files of `analysis collect`", **about}
    command.add_argument(*(names or ("points",)), type=Path, nargs="+", **about)
