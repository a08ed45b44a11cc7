"""Where an export goes, and whether it may: nothing that is there already is ever overwritten. No torch here.

OUT/model.safetensors   the checkpoint's, byte for byte; under timm's names where timm has the architecture itself
OUT/config.json         our card and timm's words for it
OUT/README.md           a model card for the hub, see model_card.py
OUT/model.onnx          and model.onnx.data, where they are too large for one file
OUT/model.pt2           a torch.export program
OUT/export.json         what was made of which weights, by which versions, and how far the graphs' answers are from the model's
OUT/sha256.json         of all of these, written last
"""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from data_prep.publish import make_directory
from data_prep.settings import UserError
from finetune.export.config import ExportSettings
from pretrain.checkpoints.checkpoint import HASHES, fault_of
from pretrain.checkpoints.run import is_begun

README, ONNX, PT2, RECORD = "README.md", "model.onnx", "model.pt2", "export.json"
NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}


def request_of(settings: ExportSettings, *, weights_sha256: str) -> dict[str, Any]:
    """What makes two exports the same."""
    return {
        "weights_sha256": weights_sha256,
        "formats": ["timm", *settings.graphs],
        "with_preprocessing": settings.with_preprocessing,
        "license": settings.license,
    }


def exported_before(out: Path, request: dict[str, Any]) -> bool:
    """Whether this very export stands there, whole. An error where something else does."""
    if not is_begun(out, request, record=RECORD, key="request", what="an export", field="out", alone=True):
        return False
    fault = fault_of(out, needed=tuple(json.loads((out / HASHES).read_text())))
    if fault is not None:
        raise UserError(f"out: {out} holds this export, but {fault} since; name another out, or remove it")
    return True


def check_libraries(settings: ExportSettings) -> None:
    for graph in settings.graphs:
        missing = [name for name in NEEDED[graph] if importlib.util.find_spec(name) is None]
        if missing:
            others = ",".join(each for each in ("timm", *settings.graphs) if each != graph)
            raise UserError(
                f"formats: {graph} needs {', '.join(missing)}, which is not installed; install it, or take --formats {others}"
            )


def check_space(out: Path, *, num_bytes: int) -> None:
    """Before minutes of work end on a full disk."""
    make_directory(out.absolute().parent)
    free = shutil.disk_usage(out.absolute().parent).free
    if free < num_bytes:
        raise UserError(
            f"out: {out} would take {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free; free some, or name another disk"
        )
