"""Models of timm with the interface of `ImageModel`: the baselines of Scaling MLPs, any pretrained
model (`pretrained: timm:NAME`), and your own class (`model: {import: module:Class}`).

The timm model computes and pools the features, and `ImageModel` adds the head.

The stem of ResNet-152 at 64 px has stride 1 and no pooling, as Scaling MLPs says, and no padding.
Only without padding does the model have the 13.07 G MACs that the paper prints (14.98 G with the
usual padding of 3).
"""

import inspect
import json
from contextlib import suppress
from typing import Any

import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn

from data_prep.errors import SettingsError
from pretrain.models.image_model import ImageModel, classifier
from pretrain.models.imported import import_class
from pretrain.models.layers.batch_norm import BatchNorm2d
from pretrain.models.spec import ImportSpec, TimmModelSpec, TimmSpec


class TimmModel(ImageModel):
    def __init__(
        self, spec: TimmSpec | TimmModelSpec | ImportSpec, *, num_classes: int, image_size: int
    ):
        if isinstance(spec, ImportSpec):
            body = own_body(spec, num_classes=num_classes, image_size=image_size)
        elif isinstance(spec, TimmModelSpec):
            body = timm.create_model(spec.name, num_classes=0, **json.loads(spec.arguments))
        elif spec.name == "resnet152_64":
            body = timm.create_model("resnet152", num_classes=0, norm_layer=BatchNorm2d)
            body.conv1.stride, body.conv1.padding = (1, 1), (0, 0)
            body.maxpool = nn.Identity()
        elif spec.name == "resnet18_224":
            body = timm.create_model("resnet18", num_classes=0, norm_layer=BatchNorm2d)
        elif spec.name == "resnet18_32":
            body = timm.create_model("resnet18", num_classes=0, norm_layer=BatchNorm2d)
            body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            # timm's initialization of convolutions
            nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")
            body.maxpool = nn.Identity()
        else:
            body = timm.create_model(
                "vit_base_patch16_224", img_size=image_size, patch_size=4, num_classes=0
            )
        super().__init__(
            num_features=getattr(body, "head_hidden_size", body.num_features),
            num_classes=num_classes,
            pixels_per_place=1,
        )
        self.body = body
        self.blocks = nn.ModuleList()  # the body has its own blocks
        self.norm = nn.Identity()
        self.head = classifier(self.num_features, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return self.body.forward_features(x_BCHW)

    def pool(self, x_BF: Tensor) -> Tensor:
        return self.body.forward_head(x_BF, pre_logits=True).flatten(1)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [{**info, "module": f"body.{info['module']}"} for info in self.body.feature_info]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.body.forward_intermediates(x, *args, **kwargs)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        self.reset_classifier(0)
        return self.body.prune_intermediate_layers(*args, **kwargs)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        of_body: dict[str, Any] = self.body.group_matcher(coarse=coarse)
        return {group: _within_body(names) for group, names in of_body.items()}

    def layers(self) -> dict[str, int]:
        """Return the layer number of each weight from timm's parameter groups, or {} if the model
        has no groups."""
        matcher = getattr(self.body, "group_matcher", None)
        if matcher is None:
            return {}
        found: dict[str, int] = group_parameters(self.body, matcher(), reverse=True)
        return {f"body.{name}": number for name, number in found.items()}

    def no_weight_decay(self) -> set[str]:
        return {f"body.{name}" for name in getattr(self.body, "no_weight_decay", set)()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        self.body.set_grad_checkpointing(enable)


def _within_body(names: Any) -> Any:
    if isinstance(names, str):
        return rf"body\.(?:{names.removeprefix('^')})"
    return [(_within_body(pattern), order) for pattern, order in names]


INTERFACE = ("forward_features", "forward_head", "reset_classifier", "num_features")


def own_body(spec: ImportSpec, *, num_classes: int, image_size: int) -> Any:
    """Build the user's model without its head, and check its interface and output shapes."""
    own_class, arguments = import_class(spec), json.loads(spec.arguments)
    words = {"num_classes": num_classes, "img_size": image_size} | arguments
    try:
        inspect.signature(own_class).bind(**words)
    except TypeError as error:
        raise _misfit(spec, str(error)) from error
    with torch.device("cpu"):
        body: Any = own_class(**words)
    if missing := [name for name in INTERFACE if not hasattr(body, name)]:
        raise _misfit(spec, f"has no {', '.join(missing)}")
    with suppress(RuntimeError), torch.device("meta"), torch.no_grad():  # some need real tensors
        trial: Any = own_class(**words).eval()
        width = getattr(body, "head_hidden_size", body.num_features)
        for count in (num_classes, 0):
            trial.reset_classifier(count)
            x_BF = trial.forward_features(torch.empty(2, 3, image_size, image_size))
            outputs = [trial.forward_head(x_BF, pre_logits=pools) for pools in (True, False)]
            given = [tuple(each.shape) for each in outputs]
            if given != [(2, width), (2, count or width)]:
                raise _misfit(spec, f"returns shapes {given} after reset_classifier({count})")
    body.reset_classifier(0)
    return body


def _misfit(spec: ImportSpec, problem: str) -> SettingsError:
    fix = f"implement num_classes, img_size and timm's {', '.join(INTERFACE)}"
    return SettingsError("model.import", f"{spec.label} {problem}", fix, code="mismatch")
