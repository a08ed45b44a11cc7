"""The cost formulas compared with built modules, torch's counter and the papers' tables."""

import functools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretrain.models.build import build_model
from pretrain.models.cost import (
    Cost,
    cost_of,
    num_features_of,
    num_parameters,
    tokens_for,
    training_flops,
    widest_side,
    width_and_connections,
)
from pretrain.models.presets import PRESETS, spec_of
from pretrain.models.spec import (
    AnySpec,
    MixerSpec,
    MlpSpec,
    SparseMlpSpec,
    StructuredMlpSpec,
    TimmSpec,
)
from tests.errors import fails


def mixer(**fields: Any) -> MixerSpec:
    return MixerSpec(kind="mixer", **{"patch_size": 4, "num_channels": 6, "depth": 2, **fields})


def sparse(**fields: Any) -> SparseMlpSpec:
    return SparseMlpSpec(kind="sw_mlp", **{"num_channels": 3, "depth": 2, **fields})


def in_color(form: Literal["monarch", "kronecker"]) -> StructuredMlpSpec:
    return StructuredMlpSpec(
        kind="structured", form=form, num_rows=5, num_columns=7, grayscale=False
    )


VARIANTS: dict[str, tuple[AnySpec, int]] = {
    "batch norm": (MlpSpec(kind="mlp", depth=3, width=10, norm="batch"), 8),
    "no norm, standard": (
        MlpSpec(kind="mlp", depth=3, width=10, norm="none", bottleneck="none"),
        8,
    ),
    "skip every two": (
        MlpSpec(kind="mlp", depth=4, width=10, skip_every=2, norm_place="before"),
        8,
    ),
    "no bias": (MlpSpec(kind="mlp", depth=3, width=10, bias=False), 8),
    "no bias, Mixer": (mixer(bias=False, num_tokens=7, final_norm=False), 12),
    "no bias, sparse": (sparse(width=40, density=0.04, bias=False, widen="sparse"), 8),
    "fractional expansion": (MlpSpec(kind="mlp", depth=2, width=10, expansion=2.55), 8),
    "one permuted block": (mixer(depth=3, num_tokens=7, permuted_blocks=(1,)), 12),
    "permuted first block": (mixer(num_tokens=5, permuted_blocks=(0,)), 12),
    "a token skip though S = S0": (mixer(num_tokens=9), 12),
    "own hidden sizes": (mixer(token_hidden=5, channel_hidden=11), 12),
    "S-Mixer": (mixer(layers_per_mixing=1), 12),
    "ViT at another size": (TimmSpec(kind="timm", name="vit_b_4"), 12),
    "sparse by its density": (sparse(width=40, density=0.04), 8),
    "sparse, final norm": (sparse(density=0.3, final_norm=True), 8),
    "sparse, hidden layer": (sparse(density=0.3, storage="sparse", expansion=2.0), 8),
    "masked, widened by a masked layer": (
        sparse(width=40, density=0.3, storage="masked", widen="sparse", bias=False),
        8,
    ),
    "masked, hidden layer": (sparse(density=0.3, storage="masked", expansion=2.0), 8),
    "Monarch, in color": (in_color("monarch"), 8),
    "Kronecker, in color": (in_color("kronecker"), 8),
}


@functools.cache
def counted(spec: AnySpec, *, num_classes: int, image_size: int) -> tuple[Cost, int]:
    """Return the built model's cost by torch's counter, and its norms' operations. As in fvcore, an
    entry takes 5 in a layer norm and 2 in a batch norm."""
    norm_operations = 0

    def see_norm(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal norm_operations
        norm_operations += inputs[0].numel() * (5 if isinstance(norm, nn.LayerNorm) else 2)

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build_model(spec, num_classes=num_classes, image_size=image_size).eval()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm1d | nn.BatchNorm2d):
                module.register_forward_pre_hook(see_norm)
        model(torch.empty(1, 3, image_size, image_size))
    return Cost(num_parameters(model), counter.get_total_flops() // 2), norm_operations


@pytest.mark.parametrize("name", PRESETS)
def test_the_formulas_are_what_is_built(name: str) -> None:
    preset, spec = PRESETS[name], spec_of(name)
    size = {"num_classes": preset.num_classes, "image_size": preset.image_size}
    assert counted(spec, **size)[0] == cost_of(spec, **size)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "image_size"), VARIANTS.values(), ids=VARIANTS.keys())
def test_the_formulas_hold_for_any_setting(spec: AnySpec, image_size: int) -> None:
    size = {"num_classes": 3, "image_size": image_size}
    whole = counted(spec, **size)[0]
    assert whole == cost_of(spec, **size)
    more = counted(spec, **size | {"num_classes": 4})[0].multiply_adds - whole.multiply_adds
    assert more == num_features_of(spec, image_size=image_size)


def test_paper_b_pretrained_mlps() -> None:
    """The public checkpoints have 11,230 classes. Scaling MLPs prints 9, 24, 74, 12, 37 and 124
    million, truncated."""
    sizes = {"b6_wi256": 9_188_574, "b6_wi512": 24_657_374, "b6_wi1024": 74_469_342}
    sizes |= {"b12_wi256": 12_345_054, "b12_wi512": 37_261_790, "b12_wi1024": 124_843_998}
    for name, count in sizes.items():
        assert (
            cost_of(spec_of(f"mlp_{name}"), num_classes=11_230, image_size=64).num_parameters
            == count
        )


@pytest.mark.parametrize(
    ("name", "million_parameters", "printed_giga"),
    [
        ("mixer_b_4", 63.82, 19.36),
        ("vit_b_4", 86.06, 23.08),
        ("resnet152_64", 60.19, 13.07),  # without the stem's padding; 14.98 with it
        ("mlp_b12_wi768", 66.89, 0.07),  # printed: 66.8 M, truncated
    ],
)
def test_paper_b_efficiency_with_fvcores_norms(
    name: str, million_parameters: float, printed_giga: float
) -> None:
    cost, norm_operations = counted(spec_of(name), num_classes=1000, image_size=64)
    assert round(cost.num_parameters / 1e6, 2) == million_parameters
    assert round((cost.multiply_adds + norm_operations) / 1e9, 2) == printed_giga


def test_paper_a_connections_of_narrow_mixers() -> None:
    """The Mixer paper prints 255M with C = 487, which would give 276,278,022."""
    assert (
        cost_of(mixer(num_channels=467), num_classes=10, image_size=32).multiply_adds == 255_367_742
    )


@pytest.mark.parametrize(
    ("channels", "patch", "image_size", "depth", "gamma", "memory", "flops"),
    # the printed small row (3.22 GB, 805M) belongs to C = 64; the printed C = 48 gives the last
    # line
    [
        (588, 14, 224, 8, 4, 23.2e12, 5.80e12),
        (64, 4, 32, 3, 2, 3.22e9, 805e6),
        (48, 4, 32, 3, 2, 1.81e9, 453e6),
    ],
)
def test_paper_a_cost_of_sw_mlps(
    channels: int, patch: int, image_size: int, depth: int, gamma: int, memory: float, flops: float
) -> None:
    """A SW-MLP has two blocks for each Mixer block, one for each mixing. In the paper, weights and
    mask take 4 bytes each."""
    fields = {
        "patch_size": patch,
        "num_channels": channels,
        "expansion": gamma,
        "storage": "masked",
    }
    one, more = (
        cost_of(sparse(**fields, depth=n), num_classes=10, image_size=image_size)
        for n in (1, 1 + 2 * depth)
    )
    num_weights = more.multiply_adds - one.multiply_adds
    assert (
        f"{2 * num_weights:.2e}" == f"{flops:.2e}"
        and f"{(4 + 4) * num_weights:.2e}" == f"{memory:.2e}"
    )


@pytest.mark.parametrize(
    ("patch", "image_size", "channels", "depth", "gamma", "weights", "omega"),
    # printed: 26.3 MB and 4.06 G, which is 2 L Omega (the mixings have 4 L Omega MACs); 3.9 MB and
    # 12.5M
    [(14, 224, 588, 8, 4, 26_321_920, 254_091_264), (4, 32, 64, 3, 2, 98_304, 524_288)],
)
def test_paper_a_cost_of_mixers(
    patch: int, image_size: int, channels: int, depth: int, gamma: int, weights: int, omega: int
) -> None:
    spec = mixer(patch_size=patch, num_channels=channels, depth=depth, expansion=gamma)
    tokens = (image_size // patch) ** 2
    assert 2 * depth * gamma * (tokens**2 + channels**2) == weights
    assert width_and_connections(spec, image_size=image_size)[1] == omega
    around = tokens * 3 * patch**2 * channels + channels * 10  # stem and head
    assert (
        cost_of(spec, num_classes=10, image_size=image_size).multiply_adds - around
        == 4 * depth * omega
    )


FIGURE_5 = [
    (2**18, 16, 173),
    (2**18, 32, 113),
    (2**18, 48, 83),
    (2**21, 16, 504),
    (2**21, 32, 346),
    (2**21, 64, 226),
]
FIGURE_5 += [(2**27, 128, 1386), (2**27, 256, 904)]  # Omega, C, S
FIGURE_4_C = [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 64]
FIGURE_4_S = [360, 252, 203, 173, 152, 136, 124, 113, 104, 96, 89, 83, 64]


def test_the_pairs_of_figures_4_and_5_and_the_mirror_images() -> None:
    for omega, fewer, more in FIGURE_5:
        assert (
            tokens_for(omega, num_channels=fewer) == more
            and tokens_for(omega, num_channels=more) == fewer
        )
    for channels, tokens in zip(FIGURE_4_C, FIGURE_4_S, strict=True):
        assert tokens_for(2**19, num_channels=channels, gamma=2) == tokens
        assert tokens * channels * (tokens + channels) == pytest.approx(2**19, rel=7e-3)


@pytest.mark.parametrize(
    ("patch", "tokens"), [(7, 923), (8, 779), (14, 283), (16, 196), (28, 26), (32, 15)]
)
def test_the_sweep_over_patch_sizes_and_its_presets(patch: int, tokens: int) -> None:
    assert tokens_for(290_217_984, num_channels=3 * patch**2, gamma=4) == tokens
    spec = spec_of(f"mixer_p{patch}")
    assert isinstance(spec, MixerSpec)
    assert (spec.num_tokens, spec.num_channels, spec.expansion) == (tokens, 3 * patch**2, 4)


@pytest.mark.parametrize(
    ("zeros", "width"), [(0.1, 540), (0.3, 612), (0.5, 724), (0.7, 935), (0.9, 1619)]
)
def test_the_widths_of_sparse_mlps(zeros: float, width: int) -> None:
    spec = spec_of(f"sw_mlp_{width}")
    assert isinstance(spec, SparseMlpSpec)
    assert spec.density == pytest.approx(1 - zeros)
    assert width_and_connections(spec, image_size=32) == (width, pytest.approx(2**18, rel=2e-3))


def test_the_widest_mixer_has_as_many_tokens_as_channels() -> None:
    assert (widest_side(2**18), widest_side(2**21), widest_side(2**19, gamma=2)) == (64, 128, 64)
    for omega, fewer, more in FIGURE_5:
        assert fewer * more < widest_side(omega) ** 2
    assert tokens_for(2**21, num_channels=128) == 128


@pytest.mark.parametrize(
    ("name", "tokens", "channels", "connections"),
    [
        (
            "mixer_b_16",
            196,
            768,
            260_112_384,
        ),  # 2.6e8 in the paper's table; the hidden sizes are 384 and 3072
        (
            "mixer_b_w",
            256,
            588,
            260_112_384,
        ),  # 2.6e8 in the table; the table's width 6.2e5 is gamma m = 616,380
        ("mixer_b_w_c3", 256, 588, 290_293_248),  # gamma = 4.57
        ("mixer_p16", 196, 768, 290_217_984),  # the sweep's Omega with gamma = 4 for both mixings
        ("mixer_ss_8", 16, 986, 31_615_104),
        ("mixer_ss_w", 64, 487, 34_347_136),
        ("smixer_c128", 128, 128, 2**21),
    ],
)
def test_mixers_of_the_tables(name: str, tokens: int, channels: int, connections: int) -> None:
    size = PRESETS[name].image_size
    assert width_and_connections(spec_of(name), image_size=size) == (tokens * channels, connections)


@pytest.mark.parametrize(
    "spec",
    [
        mixer(num_channels=10, depth=3, expansion=2.7),
        mixer(num_channels=10, depth=3, token_hidden=3, channel_hidden=11),
        mixer(patch_size=2, num_channels=5, layers_per_mixing=1),
        MlpSpec(kind="mlp", depth=3, width=11, expansion=2.7),
        MlpSpec(kind="mlp", depth=2, width=11, bottleneck="none"),
    ],
    ids=["mixer", "own hidden sizes", "s-mixer", "inverted", "standard"],
)
def test_omega_is_the_mean_number_of_connections_of_the_blocks_layers(
    spec: MixerSpec | MlpSpec,
) -> None:
    """A layer's weights are used once per row of its input. The test counts rows during a forward
    pass."""
    model, used = build_model(spec, num_classes=2, image_size=8), []
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda layer, inputs, _output: used.append(
                    layer.weight.numel() * inputs[0][0].numel() // layer.in_features
                )
            )
    model(next(model.parameters()).new_zeros(1, 3, 8, 8))
    assert used
    assert width_and_connections(spec, image_size=8)[1] == sum(used) / len(used)


def test_impossible_sizes_are_named() -> None:
    assert tokens_for(8256, num_channels=128) == 1
    with fails("bad-value", "num_channels") as caught:
        tokens_for(100, num_channels=128)
    assert "8256" in caught.value.fix
    with fails("bad-value", "num_channels"):
        tokens_for(100, num_channels=0)
    with fails("bad-value", "gamma"):
        widest_side(100, gamma=float("nan"))


@pytest.mark.parametrize(
    "spec",
    [
        MlpSpec(kind="mlp", depth=2, width=16),
        MixerSpec(kind="mixer", patch_size=4, num_channels=8, depth=2),
        SparseMlpSpec(
            kind="sw_mlp",
            patch_size=4,
            num_channels=8,
            width=24,
            density=0.5,
            depth=1,
            widen="dense",
        ),
    ],
    ids=lambda spec: spec.label,
)
def test_a_step_costs_what_torch_counts_without_the_gradient_of_the_pictures(spec: AnySpec) -> None:
    model = build_model(spec, num_classes=5, image_size=8).train()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 3, 8, 8)).sum().backward()
    assert counter.get_total_flops() == 2 * training_flops(spec, num_classes=5, image_size=8)
