"""Widths: every (C, S, m) pair that paper A prints, as literals; what a spec's matrices hold, counted from the built modules."""

import subprocess
import sys

import pytest
from torch import nn

from pretrain.models.build import build_model
from pretrain.models.presets import PRESETS, spec_of
from pretrain.models.spec import MixerSpec, MlpSpec, SparseMlpSpec
from pretrain.models.widths import (
    Widest,
    average_connections,
    channels_for,
    effective_width,
    mixer_connections,
    sparse_width,
    tokens_for,
    widest,
)

FIGURE_5 = [  # Omega, C, S
    (2**18, 16, 173),
    (2**18, 32, 113),
    (2**18, 48, 83),
    (2**21, 16, 504),
    (2**21, 32, 346),
    (2**21, 64, 226),
    (2**27, 128, 1386),
    (2**27, 256, 904),
]
FIGURE_4_C = [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 64]
FIGURE_4_S = [360, 252, 203, 173, 152, 136, 124, 113, 104, 96, 89, 83, 64]


@pytest.mark.parametrize(("omega", "fewer", "more"), FIGURE_5)
def test_the_pairs_of_figure_5_and_their_mirror_images(omega: int, fewer: int, more: int) -> None:
    assert tokens_for(omega, num_channels=fewer) == channels_for(omega, num_tokens=fewer) == more
    assert tokens_for(omega, num_channels=more) == channels_for(omega, num_tokens=more) == fewer


@pytest.mark.parametrize(("channels", "tokens"), list(zip(FIGURE_4_C, FIGURE_4_S, strict=True)))
def test_the_pairs_of_figure_4(channels: int, tokens: int) -> None:
    assert tokens_for(2**19, num_channels=channels, gamma=2) == tokens
    assert mixer_connections(num_tokens=tokens, num_channels=channels, gamma=2) == pytest.approx(2**19, rel=7e-3)


@pytest.mark.parametrize(("patch", "tokens"), [(7, 923), (8, 779), (14, 283), (16, 196), (28, 26), (32, 15)])
def test_the_sweep_over_patch_sizes_and_its_presets(patch: int, tokens: int) -> None:
    assert tokens_for(290_217_984, num_channels=3 * patch**2, gamma=4) == tokens
    spec = spec_of(f"mixer_p{patch}")
    assert isinstance(spec, MixerSpec)
    assert (spec.num_tokens, spec.num_channels, spec.expansion) == (tokens, 3 * patch**2, 4)


@pytest.mark.parametrize(("zeros", "width"), [(0.1, 540), (0.3, 612), (0.5, 724), (0.7, 935), (0.9, 1619)])
def test_the_widths_of_sparse_mlps(zeros: float, width: int) -> None:
    assert sparse_width(2**18, density=1 - zeros) == width
    assert sparse_width(2**20, density=1 - zeros, gamma=4) == width
    spec = spec_of(f"sw_mlp_{width}")
    assert isinstance(spec, SparseMlpSpec)
    assert spec.density == pytest.approx(1 - zeros)
    assert effective_width(spec, image_size=32) == width
    assert average_connections(spec, image_size=32) == pytest.approx(2**18, rel=2e-3)


def test_the_widest_mixer_has_as_many_tokens_as_channels() -> None:
    assert widest(2**18) == Widest(64, 64, 4096)
    assert widest(2**21) == Widest(128, 128, 16384)
    assert widest(2**19, gamma=2) == Widest(64, 64, 4096)
    for omega, fewer, more in FIGURE_5:
        assert fewer * more < widest(omega).width
    assert tokens_for(2**21, num_channels=128) == 128


@pytest.mark.parametrize(
    ("name", "tokens", "channels", "connections"),
    [
        ("mixer_b_16", 196, 768, 260_112_384),  # the 2.6e8 of the paper's table: its hidden sizes are 384 and 3072
        ("mixer_b_w", 256, 588, 290_293_248),  # the table says 2.6e8, its own gamma = 4.57 is 2.9e8
        ("mixer_p16", 196, 768, 290_217_984),  # Omega of the sweep: gamma = 4 for both
        ("mixer_ss_8", 16, 986, 31_615_104),
        ("mixer_ss_w", 64, 487, 34_347_136),
        ("smixer_c128", 128, 128, 2**21),
    ],
)
def test_mixers_of_the_tables(name: str, tokens: int, channels: int, connections: int) -> None:
    size = PRESETS[name].image_size
    assert effective_width(spec_of(name), image_size=size) == tokens * channels
    assert average_connections(spec_of(name), image_size=size) == connections


def test_the_papers_own_disagreement() -> None:
    """Mixer-B-W: width 6.2e5 is printed, and no reading of gamma gives the printed 2.6e8."""
    sizes = {"num_tokens": 256, "num_channels": 588}
    assert f"{mixer_connections(**sizes, gamma=4.57):.2g}" == "2.9e+08"
    assert mixer_connections(**sizes, gamma=4) == 254_091_264


@pytest.mark.parametrize(
    "spec",
    [
        MixerSpec(kind="mixer", patch_size=4, num_channels=10, depth=3, expansion=2.7),
        MixerSpec(kind="mixer", patch_size=4, num_channels=10, depth=3, token_hidden=3, channel_hidden=11),
        MixerSpec(kind="mixer", patch_size=2, num_channels=5, depth=2, layers_per_mixing=1),
        MlpSpec(kind="mlp", depth=3, width=11, expansion=2.7),
        MlpSpec(kind="mlp", depth=2, width=11, bottleneck="none"),
    ],
    ids=["mixer", "own hidden sizes", "s-mixer", "inverted", "standard"],
)
def test_omega_is_the_mean_number_of_connections_of_the_blocks_layers(spec: MixerSpec | MlpSpec) -> None:
    """A layer's weights are used once per row that it is applied to; rows are counted while an image passes."""
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
    assert average_connections(spec, image_size=8) == sum(used) / len(used)


def test_models_without_such_sizes_have_none() -> None:
    assert average_connections(spec_of("vit_b_4"), image_size=64) is None
    assert effective_width(spec_of("vit_b_4"), image_size=64) is None
    assert effective_width(spec_of("monarch_mnist"), image_size=28) == 28 * 28
    assert average_connections(spec_of("monarch_mnist"), image_size=28) is None


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"omega: 100 is too small for num_channels 128 .* give 8256 or more"):
        tokens_for(100, num_channels=128)
    assert tokens_for(8256, num_channels=128) == 1
    with pytest.raises(ValueError, match=r"num_tokens: 0 will not do; give a number greater than 0"):
        channels_for(100, num_tokens=0)
    with pytest.raises(ValueError, match=r"density: nan"):
        sparse_width(100, density=float("nan"))


def test_no_torch_is_imported() -> None:
    check = "import sys, pretrain.models.widths; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
