"""Writes a safetensors file in pieces, and hashes what it writes: no second reading, and hardly a moment of Python's lock.

`safetensors.save_file` holds the lock for the whole file, which would stop training for as long. Here each piece of a few MB is
hashed and written by C code without the lock. The bytes are those that safetensors itself would write.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

PIECE_BYTES = 4 << 20
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
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for piece in _pieces(tensors):
            digest.update(piece)
            left = piece
            while left:
                left = left[file.write(left) :]
    return digest.hexdigest()


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
