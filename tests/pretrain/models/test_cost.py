"""Costs: every named model's as literals, the formulas against built modules and torch's counter, and the papers' tables."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pretrain.models.baseline_cost import body_cost, resnet152
from pretrain.models.build import build_model
from pretrain.models.cost import cost_of, num_parameters
from pretrain.models.presets import PRESETS, spec_of
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, StructuredMlpSpec, TimmSpec
from pretrain.models.widths import average_connections, mixer_connections

KNOWN = {  # name: (parameters, multiply-adds), with the preset's own classes and image size
    "mlp_b6_wi256": (6_559_464, 6_547_456),
    "mlp_b6_wi512": (19_409_384, 19_386_368),
    "mlp_b6_wi1024": (63_983_592, 63_938_560),
    "mlp_b12_wi256": (9_715_944, 9_693_184),
    "mlp_b12_wi512": (32_013_800, 31_969_280),
    "mlp_b12_wi768": (66_894_568, 66_828_288),
    "mlp_b12_wi1024": (114_358_248, 114_270_208),
    "mlp_l6_wi1024": (19_918_824, 19_898_368),
    "mixer_b_16": (59_880_472, 12_601_767_936),
    "mixer_b_4": (63_821_032, 19_337_558_016),
    "mixer_b_w": (31_064_548, 9_378_482_400),
    "mixer_ss_8": (15_779_280, 255_959_684),
    "mixer_ss_w": (3_899_363, 276_278_022),
    "rp_mixer_b_w": (31_064_548, 9_378_482_400),
    "rp_mixer_ss_w": (3_899_363, 276_278_022),
    "mixer_p7": (57_442_324, 9_507_461_964),
    "mixer_p8": (42_099_244, 9_444_099_840),
    "mixer_p14": (28_286_536, 9_389_750_832),
    "mixer_p16": (41_671_576, 9_432_852_480),
    "mixer_p28": (362_157_784, 9_676_447_872),
    "mixer_p32": (616_744_279, 9_577_952_256),
    "smixer_c32": (116_249, 4_347_424),
    "rp_smixer_c32": (116_249, 4_347_424),
    "smixer_c128": (276_362, 33_948_928),
    "rp_smixer_c128": (276_362, 33_948_928),
    "sw_mlp_540": (4_014_022, 4_144_536),
    "sw_mlp_612": (4_901_422, 5_029_992),
    "sw_mlp_724": (6_446_686, 6_572_232),
    "sw_mlp_935": (9_903_077, 10_022_926),
    "sw_mlp_1619": (26_005_121, 26_106_502),
    "monarch_mnist": (95_658, 95_648),
    "kronecker_mnist": (10_986, 95_648),
    "resnet152_64": (60_192_808, 13_023_718_144),
    "vit_b_4": (86_060_776, 23_055_826_944),
}
NOT_BUILT_YET = ("sw_mlp", "structured")
"""Kinds whose modules are being written on another branch: nothing but their formulas is tested here."""

VARIANTS: dict[str, tuple[AnySpec, int]] = {
    "batch norm": (MlpSpec(kind="mlp", depth=3, width=10, norm="batch"), 8),
    "no norm, standard": (MlpSpec(kind="mlp", depth=3, width=10, norm="none", bottleneck="none"), 8),
    "fractional expansion": (MlpSpec(kind="mlp", depth=2, width=10, expansion=2.55), 8),
    "one permuted block": (
        MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=3, num_tokens=7, permuted_blocks=(1,)),
        12,
    ),
    "permuted first block": (
        MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=2, num_tokens=5, permuted_blocks=(0,)),
        12,
    ),
    "a token skip though S = S0": (MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=2, num_tokens=9), 12),
    "own hidden sizes": (
        MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=2, token_hidden=5, channel_hidden=11),
        12,
    ),
    "ViT at another size": (TimmSpec(kind="timm", name="vit_b_4"), 12),
    "ResNet at another size": (TimmSpec(kind="timm", name="resnet152_64"), 25),
    "sparse by its density": (SparseMlpSpec(kind="sw_mlp", num_channels=3, width=40, depth=2, density=0.04), 8),
    "sparse, hidden layer": (
        SparseMlpSpec(kind="sw_mlp", num_channels=3, depth=2, density=0.3, storage="sparse", expansion=2.0),
        8,
    ),
    "masked, hidden layer": (
        SparseMlpSpec(kind="sw_mlp", num_channels=3, depth=2, density=0.3, storage="masked", expansion=2.0),
        8,
    ),
    "Monarch, in colour": (
        StructuredMlpSpec(kind="structured", form="monarch", num_rows=5, num_columns=7, greyscale=False),
        8,
    ),
    "Kronecker, in colour": (
        StructuredMlpSpec(kind="structured", form="kronecker", num_rows=5, num_columns=7, greyscale=False),
        8,
    ),
    "S-Mixer": (MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=2, layers_per_mixing=1), 12),
}


def counted(spec: AnySpec, *, num_classes: int, image_size: int) -> tuple[int, int, int]:
    """(parameters, multiply-adds, bytes of buffers) of the built model, by torch."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build_model(spec, num_classes=num_classes, image_size=image_size).eval()
        model(torch.empty(1, 3, image_size, image_size))
    return num_parameters(model), counter.get_total_flops() // 2, sum(buffer.nbytes for buffer in model.buffers())


def test_every_named_model_has_its_literals() -> None:
    found = {
        name: cost_of(spec_of(name), num_classes=preset.num_classes, image_size=preset.image_size)
        for name, preset in PRESETS.items()
    }
    assert {name: (cost.num_parameters, cost.multiply_adds) for name, cost in found.items()} == KNOWN


@pytest.mark.parametrize("name", [name for name in PRESETS if spec_of(name).kind not in NOT_BUILT_YET])
def test_the_formulas_are_what_is_built(name: str) -> None:
    preset, spec = PRESETS[name], spec_of(name)
    size = {"num_classes": preset.num_classes, "image_size": preset.image_size}
    parameters, products, buffers = counted(spec, **size)
    assert (parameters, products) == KNOWN[name]
    assert buffers == cost_of(spec, **size).buffer_bytes


@pytest.mark.parametrize("name", [name for name, (spec, _) in VARIANTS.items() if spec.kind not in NOT_BUILT_YET])
def test_the_formulas_hold_for_any_setting(name: str) -> None:
    spec, image_size = VARIANTS[name]
    cost = cost_of(spec, num_classes=3, image_size=image_size)
    ours = (cost.num_parameters, cost.multiply_adds, cost.buffer_bytes)
    assert ours == counted(spec, num_classes=3, image_size=image_size)


@pytest.mark.parametrize(
    ("name", "count", "printed"),
    [  # with the 11,230 classes of the public checkpoints; paper B cuts, it does not round
        ("mlp_b6_wi256", 9_188_574, 9),
        ("mlp_b6_wi512", 24_657_374, 24),
        ("mlp_b6_wi1024", 74_469_342, 74),
        ("mlp_b12_wi256", 12_345_054, 12),
        ("mlp_b12_wi512", 37_261_790, 37),
        ("mlp_b12_wi1024", 124_843_998, 124),
    ],
)
def test_paper_b_pretrained_mlps(name: str, count: int, printed: int) -> None:
    assert cost_of(spec_of(name), num_classes=11_230, image_size=64).num_parameters == count
    assert count // 1_000_000 == printed


@pytest.mark.parametrize(
    ("name", "million_parameters", "giga_operations"),
    [("mixer_b_4", 63.82, 19.36), ("resnet152_64", 60.19, 13.07), ("vit_b_4", 86.06, 23.08)],
)
def test_paper_b_efficiency_with_fvcores_norms(name: str, million_parameters: float, giga_operations: float) -> None:
    cost = cost_of(spec_of(name), num_classes=1000, image_size=64)
    assert round(cost.num_parameters / 1e6, 2) == million_parameters
    assert round(cost.printed_flops / 1e9, 2) == giga_operations


def test_paper_b_efficiency_of_the_mlp() -> None:
    cost = cost_of(spec_of("mlp_b12_wi768"), num_classes=1000, image_size=64)
    assert round(cost.num_parameters / 1e6, 2) == 66.89
    assert round(cost.multiply_adds / 1e6, 1) == 66.8  # 66.87 with norms: cut, that is 66.8, too
    assert (cost.flops, cost.printed_flops, cost.weight_bytes) == (133_656_576, 66_874_368, 267_578_272)


@pytest.mark.parametrize(
    ("name", "fvcore"),
    [  # FlopCountAnalysis of fvcore 0.1.5, run by us on these models, without its pooling
        ("mlp_b12_wi768", 66_874_368),
        ("mixer_b_4", 19_362_134_016),
        ("vit_b_4", 23_080_498_944),
    ],
)
def test_printed_flops_are_fvcores(name: str, fvcore: int) -> None:
    assert cost_of(spec_of(name), num_classes=1000, image_size=64).printed_flops == fvcore


def test_resnet_152_has_the_printed_count_only_without_the_stems_padding() -> None:
    assert body_cost("resnet152_64", image_size=64) == resnet152(64, padding=0)
    fvcore = 14_979_448_832 - 2_048_000 - 131_072  # with padding 3, run by us; less the head and the pooling
    assert resnet152(64, padding=3).printed_flops == fvcore


def test_paper_a_connections() -> None:
    def connections(spec: AnySpec) -> int:
        return cost_of(spec, num_classes=10, image_size=32).connections

    assert connections(spec_of("mixer_ss_8")) == 255_959_684  # printed: 256M
    narrower = MixerSpec(kind="mixer", patch_size=4, num_channels=467, depth=2)
    assert connections(spec_of("mixer_ss_w")) == 276_278_022  # printed: 255M, with C = 487
    assert connections(narrower) == 255_367_742


def test_paper_a_omegas_that_disagree() -> None:
    b_w = spec_of("mixer_b_w")
    assert average_connections(spec_of("mixer_b_16"), image_size=224) == 260_112_384  # printed: 2.6e8
    assert average_connections(b_w, image_size=224) == 290_293_248  # printed: 2.6e8
    assert average_connections(b_w.model_copy(update={"expansion": 4.0}), image_size=224) == 254_091_264


@pytest.mark.parametrize(
    ("channels", "patch", "image_size", "depth", "gamma", "memory", "flops"),
    [  # the printed small row, 3.22 GB and 805M, is of C = 64; its printed C = 48 gives the last line
        (588, 14, 224, 8, 4, 23.2e12, 5.80e12),
        (64, 4, 32, 3, 2, 3.22e9, 805e6),
        (48, 4, 32, 3, 2, 1.81e9, 453e6),
    ],
)
def test_paper_a_cost_of_sw_mlps(
    channels: int, patch: int, image_size: int, depth: int, gamma: int, memory: float, flops: float
) -> None:
    """Two blocks of a SW-MLP for each of a Mixer: one for each mixing. Weights and mask take 4 bytes each in the paper."""
    one, more = (
        cost_of(
            SparseMlpSpec(
                kind="sw_mlp", patch_size=patch, num_channels=channels, depth=blocks, expansion=gamma, storage="masked"
            ),
            num_classes=10,
            image_size=image_size,
        )
        for blocks in (1, 1 + 2 * depth)
    )
    assert f"{more.flops - one.flops:.2e}" == f"{flops:.2e}"
    num_weights = (more.flops - one.flops) // 2
    assert f"{(4 + 4) * num_weights:.2e}" == f"{memory:.2e}"
    assert more.buffer_bytes - one.buffer_bytes == num_weights  # our masks take one byte


def test_paper_a_cost_of_mixers() -> None:
    def weights(*, tokens: int, channels: int, depth: int, gamma: int) -> int:
        return 2 * depth * gamma * (tokens**2 + channels**2)

    large = mixer_connections(num_tokens=256, num_channels=588, gamma=4)
    small = mixer_connections(num_tokens=64, num_channels=64, gamma=2)
    assert weights(tokens=256, channels=588, depth=8, gamma=4) == 26_321_920  # printed: 26.3 MB
    assert 2 * 8 * large == 4_065_460_224  # printed: 4.06 G; the mixings have 4 L Omega multiply-adds
    assert weights(tokens=64, channels=64, depth=3, gamma=2) == 98_304  # printed: 3.9 MB
    assert 8 * 3 * small == 12_582_912  # printed: 12.5M
    spec = MixerSpec(kind="mixer", patch_size=14, num_channels=588, depth=8, permuted_blocks="all")
    found = cost_of(spec, num_classes=1000, image_size=224)
    around = 256 * 588 * 588 + 588 * 1000  # stem and head
    assert found.multiply_adds - around == 4 * 8 * large == 8_130_920_448
    assert found.buffer_bytes == 38_535_168


def test_a_sparse_layer_counts_what_is_expected_to_exist() -> None:
    masked, sparse = (
        cost_of(
            SparseMlpSpec(kind="sw_mlp", num_channels=2, width=100, depth=1, density=0.25, storage=storage),
            num_classes=10,
            image_size=8,
        )
        for storage in ("masked", "sparse")
    )
    assert masked.num_parameters - sparse.num_parameters == masked.multiply_adds - sparse.multiply_adds == 7_500
    assert masked.connections == sparse.connections == sparse.multiply_adds
