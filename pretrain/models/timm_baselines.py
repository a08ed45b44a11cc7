"""timm's models with the methods that all our models have: the baselines of paper B, and any model
with weights of its own (`pretrained: timm:NAME`). The module is imported only to build one.

timm's model makes and pools the features; the head is ours. The stem of ResNet-152 at 64 px has
stride 1 and no pooling, as paper B says, and no padding: only then does it have the 13.07 G MACs
that paper B prints (14.98 G with the usual padding of 3).
"""

import json
from typing import Any

import timm
from timm.models import group_parameters
from torch import Tensor, nn

from pretrain.models.image_model import ImageModel, classifier
from pretrain.models.layers.batch_norm import BatchNorm2d
from pretrain.models.spec import TimmModelSpec, TimmSpec


class TimmModel(ImageModel):
    def __init__(self, spec: TimmSpec | TimmModelSpec, *, num_classes: int, image_size: int):
        if isinstance(spec, TimmModelSpec):
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
            # as timm initializes convolutions
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
        self.blocks = nn.ModuleList()  # the body has its own
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
        """Return the body's groups, with the names of its weights in this model."""
        of_body: dict[str, Any] = self.body.group_matcher(coarse=coarse)
        return {group: _within_body(names) for group, names in of_body.items()}

    def layers(self) -> dict[str, int]:
        """Return the layer number of each weight, as timm groups weights; {} if it does not."""
        matcher = getattr(self.body, "group_matcher", None)
        if matcher is None:
            return {}
        found: dict[str, int] = group_parameters(self.body, matcher(), reverse=True)
        return {f"body.{name}": number for name, number in found.items()}

    def no_weight_decay(self) -> set[str]:
        return {f"body.{name}" for name in getattr(self.body, "no_weight_decay", set)()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.body.set_grad_checkpointing(enable)


def _within_body(names: Any) -> Any:
    """Return the same regular expressions after `body.`."""
    if isinstance(names, str):
        return rf"body\.(?:{names.removeprefix('^')})"
    return [(_within_body(pattern), order) for pattern, order in names]
