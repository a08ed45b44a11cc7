"""Our models in timm's tools: the registry, features, heads, layer-wise groups, checkpointed
blocks."""

from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.optim import param_groups_layer_decay
from torch import Tensor

import pretrain.models.timm_names  # noqa: F401  (registers the names)
from pretrain.models.presets import PRESETS
from tests.errors import fails

TINY = {"num_channels": 12, "depth": 3}


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_every_name_is_registered_with_its_image_size() -> None:
    assert len(PRESETS) >= 30
    for name, preset in PRESETS.items():
        assert timm.is_model(name)
        cfg = timm.get_pretrained_cfg(name)
        assert cfg.input_size == (3, preset.image_size, preset.image_size)
        assert cfg.num_classes == preset.num_classes


def test_a_model_is_made_for_other_classes_and_images_and_with_other_fields() -> None:
    model = timm.create_model("mlp_b6_wi256", num_classes=7, img_size=16, depth=2, drop_rate=0.25)
    assert model(images(16)).shape == (2, 7)
    assert len(model.blocks) == 2 and model.blocks[0].dropout.p == 0.25
    assert resolve_model_data_config(model)["crop_pct"] == 1.0


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("mlp_b6_wi256", {"in_chans": 1}, "in_chans: "),
        ("mlp_b6_wi256", {"img_size": (16, 32)}, "img_size: "),
        ("mlp_b6_wi256", {"dpth": 3}, "model.dpth: unknown key"),
        ("mixer_ss_w", {"img_size": 30}, "model.patch_size: 4 does not divide image size 30"),
    ],
)
def test_what_does_not_fit_is_a_message(name: str, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **words)


def test_features_only_gives_maps_of_the_chosen_blocks() -> None:
    model = timm.create_model("mixer_ss_w", features_only=True, out_indices=(0, -1), **TINY)
    maps = model(images())
    assert [each.shape for each in maps] == [(2, 12, 8, 8)] * 2
    assert model.feature_info.channels() == [12, 12]
    assert model.feature_info.reduction() == [4, 4]
    assert model.feature_info.module_name() == ["blocks.0", "blocks.2"]


def test_intermediates_are_what_hooks_see_and_lie_as_the_patches_lie() -> None:
    model = timm.create_model("mixer_ss_w", **TINY)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    final, maps = model.forward_intermediates(images())
    assert len(seen) == len(maps) == 3
    for tokens_BSC, map_BCHW in zip(seen, maps, strict=True):
        assert torch.equal(tokens_BSC[:, 8 * 2 + 5], map_BCHW[:, :, 2, 5])
    torch.testing.assert_close(final, model.forward_features(images()))
    (rows,) = model.forward_intermediates(
        images(), indices=[1], output_fmt="NLC", intermediates_only=True
    )
    assert torch.equal(rows, maps[1].flatten(2).transpose(1, 2))
    with fails("bad-value", "indices"):
        model.forward_intermediates(images(), indices=[3])


def test_tokens_that_form_no_square_are_one_column_and_all_blocks_are_given_by_default() -> None:
    model = timm.create_model("smixer_c32", depth=2, features_only=True)
    assert [each.shape for each in model(images())] == [(2, 32, 113, 1)] * 2


@pytest.mark.parametrize("name", ["mlp_b6_wi256", "mixer_ss_w"])
def test_heads(name: str) -> None:
    model = timm.create_model(name, num_classes=5, img_size=8, depth=1)
    pooled = model.forward_head(model.forward_features(images(8)), pre_logits=True)
    torch.testing.assert_close(model(images(8)), model.get_classifier()(pooled))
    model.reset_classifier(3)
    assert model.num_classes == 3 and not model(images(8)).any()
    model.reset_classifier(0)
    torch.testing.assert_close(model(images(8)), pooled)
    bare = timm.create_model(name, num_classes=0, img_size=8, depth=1)
    assert bare(images(8)).shape == (2, bare.num_features)


def test_checkpointed_blocks_have_the_same_gradients() -> None:
    model = timm.create_model("rp_mixer_ss_w", **TINY)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(images()).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    assert gradients[0] and all(
        torch.equal(one, other) for one, other in zip(*gradients, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "changes"), [("mlp_b6_wi256", {"norm": "batch"}), ("resnet18_32", {})]
)
def test_batch_norm_refuses_to_be_computed_twice(name: str, changes: dict[str, str]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **changes)
    with fails("conflict", "set_grad_checkpointing"):
        model.set_grad_checkpointing()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mixer_ss_w", ("stem", "blocks.0.token_norm", "blocks.1.token_norm", "head")),
        ("sw_mlp_540", ("stem", "blocks.0.linear", "blocks.7.linear", "head")),
        (
            "vit_b_4",
            ("body.patch_embed.proj", "body.blocks.0.mlp.fc1", "body.blocks.11.mlp.fc1", "head"),
        ),
        ("resnet152_64", ("body.conv1", "body.layer1.0.conv1", "body.layer4.2.conv1", "head")),
    ],
)
def test_layer_wise_learning_rates_know_every_family(name: str, layers: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    names, scales = {weight: name for name, weight in model.named_parameters()}, {}
    for group in param_groups_layer_decay(
        model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    ):
        scales |= {names[weight]: group["lr_scale"] for weight in group["params"]}
        decayed = [names[weight] for weight in group["params"]] if group["weight_decay"] else []
        assert not {"body.cls_token", "body.pos_embed"} & set(decayed)
    order = [scales[f"{layer}.weight"] for layer in layers]
    assert order == sorted(order) and len(set(order)) == 4
    if name == "sw_mlp_540":
        assert scales["widen.weight"] == scales["stem.weight"]
