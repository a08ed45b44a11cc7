"""Weights by name: compared with a model, and loaded completely or not at all.

Weights that do not fit are one message, which counts the differences and names the first of each
kind.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pretrain.checkpoints.card import WeightsError
from pretrain.models.layers.sparse import MaskedLinear, SparseLinear

NUM_SHOWN = 3

Shapes = Mapping[str, Sequence[int]]


def shapes(weights: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def check_fit(given: Shapes, needed: Shapes, *, source: object, label: str) -> None:
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in needed]
    changed = [
        f"{name}: {_by(given[name])}, needed {_by(shape)}"
        for name, shape in needed.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", changed))
    found = [f"{len(names)} {kind} ({first(names)})" for kind, names in kinds if names]
    if found:
        problem = f"its weights do not fit {label}: {', '.join(found)}"
        raise WeightsError(str(source), problem, "Choose other weights", code="mismatch")


def needed_shapes(model: nn.Module, given: Shapes) -> Shapes:
    """Of the model's state dict. A sparse layer takes either storage and any number of
    connections."""
    needed = dict(shapes(model.state_dict()))
    for name, layer in model.named_modules():
        if not isinstance(layer, MaskedLinear | SparseLinear):
            continue
        matrix, count = (
            (layer.out_features, layer.in_features),
            (math.prod(given.get(f"{name}.columns", ())),),
        )
        forms: dict[str, Shapes] = {
            "mask": {"weight": matrix, "mask": matrix},
            "columns": {"values": count, "row_starts": (layer.out_features + 1,), "columns": count},
        }
        stored = next((form for mark, form in forms.items() if f"{name}.{mark}" in given), None)
        if stored is not None:
            needed = {
                key: shape
                for key, shape in needed.items()
                if key.rpartition(".")[0] != name or key.endswith(".bias")
            }
            needed |= {f"{name}.{entry}": shape for entry, shape in stored.items()}
    return needed


def check_finite(weights: Mapping[str, Tensor], *, source: object) -> None:
    bad = [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise WeightsError(
            str(source),
            f"{len(bad)} of {len(weights)} tensors have NaN or infinite numbers ({first(bad)})",
            "Use an earlier checkpoint",
            code="not-finite",
        )


def load_strictly(
    model: nn.Module, weights: Mapping[str, Tensor], *, source: object, label: str
) -> None:
    """Every weight of the model from a finite tensor of its name and shape, and nothing left
    over."""
    given = shapes(weights)
    check_fit(given, needed_shapes(model, given), source=source, label=label)
    check_finite(weights, source=source)
    model.load_state_dict(dict(weights))


def first(names: Sequence[str]) -> str:
    return ", ".join(names[:NUM_SHOWN]) + (", ..." if len(names) > NUM_SHOWN else "")


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"
