"""Models of timm's behind the methods that all our models have: paper B's, and any that comes with
weights of its own (`pretrained: timm:NAME`). Imported only where one is built.

timm's model makes the features and pools them; the head is ours, so it starts, is replaced and gets
its own learning rate as everywhere. What is not timm's is the stem of paper B's ResNet-152 at 64
px: stride 1, no padding (cost.py says why), and no pooling after it.
"""

import json
from typing import Any

import timm
from timm.models._manipulate import group_with_matcher
from torch import Tensor, nn

from pretrain.models.cost import RESNET_STEM_PADDING
from pretrain.models.image_model import ImageModel, classifier
from pretrain.models.layers.batch_norm import BatchNorm2d
from pretrain.models.spec import TimmModelSpec, TimmSpec


class TimmModel(ImageModel):
    def __init__(self, spec: TimmSpec | TimmModelSpec, *, num_classes: int, image_size: int):
        if isinstance(spec, TimmModelSpec):
            body = timm.create_model(spec.name, num_classes=0, **json.loads(spec.arguments))
        elif spec.name == "resnet152_64":
            body = timm.create_model("resnet152", num_classes=0, norm_layer=BatchNorm2d)
            body.conv1.stride, body.conv1.padding = (
                (1, 1),
                (RESNET_STEM_PADDING, RESNET_STEM_PADDING),
            )
            body.maxpool = nn.Identity()
        elif spec.name == "resnet18_32":
            body = timm.create_model("resnet18", num_classes=0, norm_layer=BatchNorm2d)
            body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(
                body.conv1.weight, mode="fan_out", nonlinearity="relu"
            )  # as timm does
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
        self.blocks = nn.ModuleList()  # they are within the body
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
        """The body's, under the names that its weights have here."""
        of_body: dict[str, Any] = self.body.group_matcher(coarse=coarse)
        return {group: _within_body(names) for group, names in of_body.items()}

    def layers(self) -> dict[str, int]:
        """The number of each weight's layer, from the pictures on, as timm splits it; {} where it
        does not."""
        matcher = getattr(self.body, "group_matcher", None)
        if matcher is None:
            return {}
        found: dict[str, int] = group_with_matcher(
            self.body.named_parameters(), matcher(), reverse=True
        )
        return {f"body.{name}": number for name, number in found.items()}

    def no_weight_decay(self) -> set[str]:
        return {f"body.{name}" for name in getattr(self.body, "no_weight_decay", set)()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.body.set_grad_checkpointing(enable)


def _within_body(names: Any) -> Any:
    """The same regular expressions behind `body.`."""
    if isinstance(names, str):
        return rf"body\.(?:{names.removeprefix('^')})"
    return [(_within_body(pattern), order) for pattern, order in names]
