"""Writes a safetensors file in pieces, and hashes what it writes: no second reading, and hardly a moment of Python's lock.
And reads one.

`safetensors.save_file` holds the lock for the whole file, which would stop training for as long. Here each piece of a few MB is
hashed and written by C code without the lock. The bytes are those that safetensors itself would write.

Both say that they get on (hangs.py) whenever the file system has done some more, so a slow one is not taken for a hang.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from pretrain.checkpoints.flushing import FLUSHED_BYTES, Flusher, flush
from pretrain.ranks.hangs import PROGRESS

PIECE_BYTES = 4 << 20
_PAGE_BYTES = 4096
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL")
"""Wide types come first, so that every tensor lies aligned."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """The file's sha256. The tensors are on the CPU."""
    digest, flusher = hashlib.sha256(), Flusher(FLUSHED_BYTES)
    with open(path, "xb", buffering=0) as file:
        for piece in _pieces(tensors):
            PROGRESS.touch()
            digest.update(piece)
            left = piece
            while left:
                left = left[file.write(left) :]
            flusher.wrote(len(piece), file.fileno())
        flush(file.fileno())
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """As safetensors itself does: mapped into memory, so the ranks of a node share what they read."""
    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            tensors[name] = file.get_tensor(name)
            _bring_in(tensors[name])
    return tensors


def _bring_in(mapped: Tensor) -> None:
    """What is merely mapped is read when it is first looked at: now, where it is said that this gets on."""
    PROGRESS.touch()
    whole = mapped.reshape(-1).view(torch.uint8)
    for start in range(0, len(whole), PIECE_BYTES):
        whole[start : start + PIECE_BYTES : _PAGE_BYTES].sum()
        PROGRESS.touch()


def _pieces(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    assert sys.byteorder == "little"
    ordered = sorted(tensors, key=lambda name: (_ORDER.index(_NAMES[tensors[name].dtype]), name))
    header, end = {}, 0
    for name in ordered:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        whole = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(whole), PIECE_BYTES):
            yield whole[start : start + PIECE_BYTES]
