"""Read tensors from a safetensors or torch file from an untrusted source.

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
"""Keys of averaged (EMA) weights in training checkpoints, in the order that timm tries."""
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
    SafetensorError,
)
"""Errors that torch and safetensors raise for bytes that are not weights."""
_SIGNS_OF_CODE = ("Unsupported global", "unsupported GLOBAL", "TorchScript")

Kind = Literal["ema", "raw"]


@dataclass(frozen=True)
class Stored:
    weights: dict[str, Tensor]
    average: str = ""
    """Key of the averaged weights, if the file has them."""


def read_weights(path: Path, *, kind: Kind = "ema") -> Stored:
    """Return tensors by name, without enclosing dictionaries and prefixes such as `module.`.
    `kind`: averaged or plain weights, if the file has both."""
    head = b""
    try:
        with path.open("rb") as file:
            head = file.read(9)
        if path.suffix == ".safetensors" or head[8:] == b"{":
            return Stored(_without_prefixes(load_file(path)))
        # timm's trainer stores its command line, a Namespace of plain values, in every checkpoint
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore", UserWarning)  # about unexpected pickle protocols
            stored: object = torch.load(path, map_location="cpu", weights_only=True)
    except _FAULTS as error:
        raise _unreadable(path, error, is_pickle=head[:1] == b"\x80") from None
    tree = stored if isinstance(stored, Mapping) else {}
    held = [key for key in AVERAGES if isinstance(tree.get(key), Mapping)]
    chosen = tree[held[0]] if held and kind == "ema" else stored
    return Stored(_without_prefixes(_unwrapped(chosen, path)), held[0] if held else "")


def _unreadable(path: Path, error: Exception, *, is_pickle: bool) -> UserError:
    text = str(error) or type(error).__name__
    if isinstance(error, IsADirectoryError | FileNotFoundError | PermissionError):
        fix = f"give a file of weights, for example {path / 'model.safetensors'}"
        return UserError(str(path), f"cannot be read ({error.strerror})", fix, code="unreadable")
    is_code = is_pickle and "Unsupported operand" in text
    if is_code or any(sign in text for sign in _SIGNS_OF_CODE):
        fix = "if you trust the file, save the weights only: torch.save(model.state_dict(), ...)"
        return UserError(str(path), "holds pickled code, which is not run", fix, code="unsafe")
    # torch's advice for bytes that cannot be unpickled is to run the pickle
    is_advice = isinstance(error, pickle.UnpicklingError)
    reason = "" if is_advice else f" ({text.splitlines()[0][:120]})"
    problem = f"is not a complete file of weights (safetensors or torch){reason}"
    return UserError(str(path), problem, "download or copy it again", code="damaged")


def _unwrapped(stored: object, path: Path) -> dict[str, Tensor]:
    while isinstance(stored, Mapping):
        inner = [stored[key] for key in WRAPPERS if isinstance(stored.get(key), Mapping)]
        if not inner:
            break
        stored = inner[0]
    tensors = stored if isinstance(stored, Mapping) else {}
    others = [str(key) for key, value in tensors.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        kind = type(stored).__name__
        held = f"non-tensors ({first(others)})" if others else f"a {kind} without tensors"
        fix = "save model.state_dict()"
        raise UserError(str(path), f"holds {held}", fix, code="unknown-format")
    # torch's AveragedModel stores its number of updates next to its weights
    return {str(name): tensor for name, tensor in tensors.items() if name != "n_averaged"}


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of DistributedDataParallel, torch.compile and wrapping modules."""
    weights = {name.replace("._orig_mod.", "."): tensor for name, tensor in weights.items()}
    while weights:
        found = [each for each in PREFIXES if all(name.startswith(each) for name in weights)]
        if not found:
            break
        weights = {name.removeprefix(found[0]): tensor for name, tensor in weights.items()}
    return weights
