"""Tensors by name from a safetensors or torch file that anybody may have written.

No pickled code is run: `torch.load` rebuilds only tensors and plain containers.
"""

import argparse
import pickle
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data_prep.errors import UserError
from pretrain.checkpoints.weights import first

AVERAGES = ("state_dict_ema", "model_ema")
"""Where training files keep the running average beside the weights themselves; looked at in timm's
order."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "net")
PREFIXES = ("module.", "_orig_mod.", "model.")
_FAULTS = (
    pickle.UnpicklingError,
    struct.error,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
"""What torch's reader raises at bytes that are no checkpoint, depending on where it stumbles."""
_SIGNS_OF_CODE = ("Unsupported global", "unsupported GLOBAL", "TorchScript")

Kind = Literal["ema", "raw"]


@dataclass(frozen=True)
class Stored:
    """The weights of a file."""

    weights: dict[str, Tensor]
    average: str = ""
    """Where the file keeps a running average, if it does; it was taken if `Kind` was ema."""


def read_weights(path: Path, *, kind: Kind = "ema") -> Stored:
    """The tensors of a safetensors or torch file by name, without the dictionaries and prefixes
    that tools wrap around them.

    `kind` chooses where a file holds both the running average and the weights themselves.
    """
    if path.is_dir():
        raise UserError(
            f"{path}: is a directory; give the file of weights in it, such as"
            f" {path / 'model.safetensors'}"
        )
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if path.suffix == ".safetensors" or head[8:] == b"{":
        try:
            return Stored(_without_prefixes(load_file(path)))
        except SafetensorError as error:
            raise UserError(f"{path}: {_no_weights(error)}") from None
    stored = _read_torch(path, is_pickle=head[:1] == b"\x80")
    held = [
        key
        for key in AVERAGES
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping)
    ]
    chosen = stored[held[0]] if held and kind == "ema" and isinstance(stored, Mapping) else stored
    return Stored(_without_prefixes(_unwrapped(chosen, path)), held[0] if held else "")


def _read_torch(path: Path, *, is_pickle: bool) -> object:
    try:
        # timm's trainer stores its command line, a Namespace of plain values, in every checkpoint
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter(
                "ignore", UserWarning
            )  # of a pickle protocol that torch does not expect
            return torch.load(path, map_location="cpu", weights_only=True)
    except _FAULTS as error:
        text = str(error)
        if any(sign in text for sign in _SIGNS_OF_CODE) or (
            is_pickle and "Unsupported operand" in text
        ):
            raise UserError(
                f"{path}: holds pickled code beside weights, and none is run here; save the weights"
                " alone where you trust the file: torch.save(model.state_dict(), ...)"
            ) from None
        raise UserError(f"{path}: {_no_weights(error)}") from None


def _no_weights(error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0][:120]
    # torch's advice on what cannot be unpickled is to run the pickle
    detail = "" if isinstance(error, pickle.UnpicklingError) else f" ({reason})"
    return (
        f"is not a whole file of weights (safetensors or torch); download or copy it again{detail}"
    )


def _unwrapped(stored: object, path: Path) -> dict[str, Tensor]:
    while isinstance(stored, Mapping) and (
        inner := [stored[key] for key in WRAPPERS if isinstance(stored.get(key), Mapping)]
    ):
        stored = inner[0]
    if not isinstance(stored, Mapping):
        raise UserError(
            f"{path}: holds a {type(stored).__name__}, not tensors by name; save model.state_dict()"
        )
    others = [str(key) for key, value in stored.items() if not isinstance(value, Tensor)]
    if others or not stored:
        held = first(others) if others else "nothing"
        raise UserError(
            f"{path}: holds {held} where tensors by name are needed; save model.state_dict()"
        )
    # torch's AveragedModel, such as torchvision's trainer stores, counts its updates beside its
    # weights
    return {str(name): tensor for name, tensor in stored.items() if name != "n_averaged"}


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """DistributedDataParallel, torch.compile and wrapping modules put a word before every name."""
    weights = {name.replace("._orig_mod.", "."): tensor for name, tensor in weights.items()}
    while weights and (
        found := [prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in weights)]
    ):
        weights = {name.removeprefix(found[0]): tensor for name, tensor in weights.items()}
    return weights
