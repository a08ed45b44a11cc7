"""A drawn plan on pictures: per layer, the pictures of one kind of operation are taken out, changed together and written back.

Who gets what is known on the host, so no step looks at the device; all numbers of a plan go over in one copy. Every picture stands
alone and no sum depends on an order, so the result does not depend on how a global batch is cut. n pictures of a kind.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment import colour, geometry
from pretrain.augment.plan import Operation, Plan
from pretrain.augment.transfer import send

Arrays = dict[str, NDArray[Any]]


def apply_plan(pictures_BHWC: Tensor, plan: Plan, *, fill_C: Tensor) -> Tensor:
    """Changes the uint8 pictures in place, layer after layer; `fill_C` is the colour of what comes in from outside."""
    _, height, width, _ = pictures_BHWC.shape
    layers = [_arrays(plan, layer, height=height, width=width) for layer in range(len(plan.operations_LB))]
    together = {f"{layer}.{name}": array for layer, arrays in enumerate(layers) for name, array in arrays.items()}
    if not together:
        return pictures_BHWC
    sent = send(together, pictures_BHWC.device)
    for layer, arrays in enumerate(layers):
        _apply_layer(pictures_BHWC, {name: sent[f"{layer}.{name}"] for name in arrays}, fill_C=fill_C)
    return pictures_BHWC


def _arrays(plan: Plan, layer: int, *, height: int, width: int) -> Arrays:
    """The rows of each kind that occurs, and what the kind needs to know about them."""
    operations, strengths = plan.operations_LB[layer], plan.strengths_LB[layer]
    arrays: Arrays = {}
    fixed = np.flatnonzero(np.isin(operations, colour.FIXED))
    if len(fixed):
        arrays["fixed"] = fixed
        arrays["fixed.tables"] = colour.fixed_tables(operations[fixed], strengths[fixed])
    for operation in (
        Operation.AUTOCONTRAST,
        Operation.EQUALIZE,
        Operation.CONTRAST,
        Operation.COLOR,
        Operation.SHARPNESS,
    ):
        rows = np.flatnonzero(operations == operation)
        if len(rows):
            arrays[operation.name] = rows
            arrays[f"{operation.name}.factors"] = strengths[rows].astype(np.float32)
    moved = np.isin(operations, geometry.GEOMETRIC)
    for name, chosen in (("linear", moved & ~plan.cubic_LB[layer]), ("cubic", moved & plan.cubic_LB[layer])):
        rows = np.flatnonzero(chosen)
        if len(rows):
            arrays[name] = rows
            arrays[f"{name}.matrices"] = geometry.matrices(
                operations[rows], strengths[rows], height=height, width=width
            )
    return arrays


def _apply_layer(pictures_BHWC: Tensor, sent: dict[str, Tensor], *, fill_C: Tensor) -> None:
    """The kinds have different rows, so their order does not matter."""
    _apply_tables(pictures_BHWC, sent)
    for operation, change in ((Operation.COLOR, colour.saturate), (Operation.SHARPNESS, colour.sharpen)):
        if operation.name in sent:
            rows = sent[operation.name]
            changed = change(pictures_BHWC.index_select(0, rows), sent[f"{operation.name}.factors"])
            pictures_BHWC.index_copy_(0, rows, changed)
    for name in ("linear", "cubic"):
        if name in sent:
            matrices_n6, cubic = sent[f"{name}.matrices"], name == "cubic"
            taken = pictures_BHWC.index_select(0, sent[name])
            pictures_BHWC.index_copy_(0, sent[name], geometry.sample(taken, matrices_n6, cubic=cubic, fill_C=fill_C))


def _apply_tables(pictures_BHWC: Tensor, sent: dict[str, Tensor]) -> None:
    """All that looks levels up, in one go."""
    rows, tables = [], []
    if "fixed" in sent:
        rows.append(sent["fixed"])
        tables.append(sent["fixed.tables"].unsqueeze(1).expand(-1, pictures_BHWC.shape[-1], -1))
    for operation, make in (
        (Operation.AUTOCONTRAST, colour.autocontrast_tables),
        (Operation.EQUALIZE, colour.equalize_tables),
    ):
        if operation.name in sent:
            rows.append(sent[operation.name])
            tables.append(make(pictures_BHWC.index_select(0, rows[-1])))
    if Operation.CONTRAST.name in sent:
        rows.append(sent[Operation.CONTRAST.name])
        factors = sent[f"{Operation.CONTRAST.name}.factors"]
        tables.append(colour.contrast_tables(pictures_BHWC.index_select(0, rows[-1]), factors))
    if rows:
        chosen = torch.cat(rows)
        changed = colour.look_up(pictures_BHWC.index_select(0, chosen), torch.cat(tables))
        pictures_BHWC.index_copy_(0, chosen, changed)
