"""ResNet-152 and ViT-B/4 of timm with our models' methods: shapes, seeds, heads, and timm's own
outputs."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from pretrain.models.build import build, pooled_features
from pretrain.models.layers.batch_norm import BatchNorm2d

SHALLOW: dict[str, tuple[str, dict[str, int]]] = {
    "resnet152": ("resnet26", {}),
    "vit_base_patch16_224": ("vit_base_patch16_224", {"depth": 1}),
}
"""Smaller models for tests that initialize weights, because the full models take seconds."""


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def create_shallow(name: str, **kwargs: Any) -> nn.Module:
        other, fewer = SHALLOW[name]
        model: nn.Module = create(other, **kwargs, **fewer)
        return model

    monkeypatch.setattr(timm, "create_model", create_shallow)


def test_the_resnet_has_the_stages_of_a_stem_without_padding_and_the_vit_a_token_for_every_patch_and_one_more() -> (
    None
):
    with torch.device("meta"):
        body: Any = build("resnet152_64").body
        sizes = [
            features.shape[1:]
            for features in body.forward_intermediates(torch.empty(1, 3, 64, 64))[1]
        ]
        assert build("vit_b_4").forward_features(torch.empty(1, 3, 64, 64)).shape == (1, 257, 768)
    assert sizes == [(64, 58, 58), (256, 58, 58), (512, 29, 29), (1024, 15, 15), (2048, 8, 8)]
    norms = [
        module for module in body.modules() if isinstance(module, nn.BatchNorm2d)
    ]  # bf16 weights and fp32 statistics
    assert len(norms) == 155 and all(isinstance(norm, BatchNorm2d) for norm in norms)


@pytest.mark.parametrize(("name", "num_features"), [("resnet152_64", 2048), ("vit_b_4", 768)])
def test_they_answer_like_ours(name: str, num_features: int, shallow: None) -> None:
    model = build(name, num_classes=5, image_size=16, seed=0).eval()
    images = torch.randn(2, 3, 16, 16)
    pooled = pooled_features(model, images)
    assert pooled.shape == (2, model.num_features) == (2, num_features)
    assert isinstance(model.head, nn.Linear)
    torch.testing.assert_close(model(images), pooled @ model.head.weight.T + model.head.bias)
    heads = [key for key, _ in model.named_parameters() if not key.startswith("body.")]
    assert heads == ["head.weight", "head.bias"]  # these have the head's learning rate
    model.reset_classifier(7)
    assert torch.equal(model(images), torch.zeros(2, 7)) and model.get_classifier() is model.head
    model.reset_classifier(0)
    assert torch.equal(model(images), pooled)


def test_the_vit_computes_what_timms_own_does(shallow: None) -> None:
    model = build("vit_b_4", num_classes=3, image_size=8, seed=0).eval()
    theirs = timm.create_model(
        "vit_base_patch16_224", img_size=8, patch_size=4, num_classes=3
    ).eval()
    theirs.load_state_dict(
        {key.removeprefix("body."): weight for key, weight in model.state_dict().items()}
    )
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert model(images).abs().max() > 0
        torch.testing.assert_close(model(images), theirs(images))
