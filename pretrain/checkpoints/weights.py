"""Compare weights with a model by name, and load all weights or none."""

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
    """Return the shapes of the model's state dict. Sparse layers get the storage format and number
    of connections of `given`."""
    needed = dict(shapes(model.state_dict()))
    for name, layer in model.named_modules():
        if not isinstance(layer, MaskedLinear | SparseLinear):
            continue
        matrix = (layer.out_features, layer.in_features)
        count = (math.prod(given.get(f"{name}.columns", ())),)
        if f"{name}.mask" in given:
            stored: Shapes = {"weight": matrix, "mask": matrix}
        elif f"{name}.columns" in given:
            stored = {"values": count, "row_starts": (layer.out_features + 1,), "columns": count}
        else:
            continue
        own = [key for key in needed if key.rpartition(".")[0] == name and key != f"{name}.bias"]
        for key in own:
            del needed[key]
        needed |= {f"{name}.{key}": shape for key, shape in stored.items()}
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


def check_weights(
    model: nn.Module, weights: Mapping[str, Tensor], *, source: object, label: str
) -> None:
    """Raise WeightsError unless the weights are finite and have exactly the model's names and
    shapes."""
    given = shapes(weights)
    check_fit(given, needed_shapes(model, given), source=source, label=label)
    check_finite(weights, source=source)


def load_strictly(
    model: nn.Module, weights: Mapping[str, Tensor], *, source: object, label: str
) -> None:
    check_weights(model, weights, source=source, label=label)
    model.load_state_dict(dict(weights))


def first(names: Sequence[str]) -> str:
    return ", ".join(names[:NUM_SHOWN]) + (", ..." if len(names) > NUM_SHOWN else "")


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"
