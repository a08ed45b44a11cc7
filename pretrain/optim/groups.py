"""Groups of parameters that an optimizer treats alike. Weight decay falls on matrices only, sparse ones included."""

from typing import Any

from torch import nn

from pretrain.config import OptimizerSettings


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Groups by (decayed or not) x (head or body); `lr_scale` is what `set_lr` multiplies with, `is_decayed` holds with a
    decay of 0, too."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((_is_decayed(model, name, parameter), name.startswith("head.")), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "is_decayed": decayed,
            "lr_scale": settings.head_lr_scale if is_head else 1.0,
        }
        for (decayed, is_head), parameters in sorted(groups.items())
    ]


def _is_decayed(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Entries of matrices, also the `values` of a `SparseLinear`; not what the model excepts (a ViT its position embeddings)."""
    is_of_matrix = parameter.ndim >= 2 or name.endswith(".values")
    return is_of_matrix and name not in getattr(model, "no_weight_decay", set)()


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
