"""Mixers, S-Mixers and RP variants in float64, compared with dense matrices on vec(X), independent
code, and each other."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from pretrain.models.build import build_model, pooled_features
from pretrain.models.mixer import Mixer, MixerBlock, TwoLayer
from pretrain.models.spec import MixerSpec
from tests.pretrain.models.test_permutation import matrix_of

IMAGE, PATCHES, TOKENS, CHANNELS = 12, 9, 7, 5  # S0 = 9, S = 7 where it is given


def spec_with(**fields: object) -> MixerSpec:
    has_gamma = (
        fields.get("layers_per_mixing", 2) == 2
        and not {"token_hidden", "channel_hidden"} <= fields.keys()
    )
    gamma = {"expansion": 2.4} if has_gamma else {}
    return MixerSpec(
        kind="mixer", **{"patch_size": 4, "num_channels": CHANNELS, "depth": 3, **gamma, **fields}
    )  # type: ignore[arg-type]


KINDS: dict[str, dict[str, object]] = {
    "mixer": {},
    "own hidden sizes": {"token_hidden": 4, "channel_hidden": 11},
    "s0": {"num_tokens": TOKENS},
    "s-mixer": {"layers_per_mixing": 1},
    "s-mixer s0": {"layers_per_mixing": 1, "num_tokens": TOKENS},
}
RANDOM = {f"rp {name}": {**fields, "permuted_blocks": "all"} for name, fields in KINDS.items()}


def built(spec: MixerSpec, *, seed: int = 0) -> Mixer:
    """Return a float64 model without biases of 0 and scales of 1, which would hide a wrong
    place."""
    model = build_model(spec, num_classes=3, image_size=IMAGE, seed=seed).double()
    generator = torch.Generator().manual_seed(99)
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data.add_(noise, alpha=0.3)
    assert isinstance(model, Mixer)
    return model


def images(count: int = 2) -> Tensor:
    return torch.randn(
        count, 3, IMAGE, IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )


def norm(x: Tensor, module: nn.Module) -> Tensor:
    weight, bias = module.parameters()
    return layer_norm(x, weight.shape, weight, bias)


def on_columns(module: nn.Module, x_BSC: Tensor) -> Tensor:
    """Return W2 act(W1 X) or act(W X) on the tokens, with the paper's weights on the left."""
    w = list(module.parameters())
    hidden_BHC = gelu(w[0] @ x_BSC + w[1][:, None])
    return hidden_BHC if len(w) == 2 else w[2] @ hidden_BHC + w[3][:, None]


def on_rows(module: nn.Module, x_BSC: Tensor) -> Tensor:
    """Return act(X V1') V2' or act(X V') on the channels."""
    return on_columns(module, x_BSC.mT).mT


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
def test_the_model_is_the_papers_formula(fields: dict[str, object]) -> None:
    """U = X + mix(LN X), Y = U + mix(LN U). If S is set, block 0 is U = LN(W~ X) + mix(LN X). At
    the end: LN, mean, linear."""
    spec = spec_with(**fields)
    model, x = built(spec), images()
    corners = [(i, j) for i in (0, 4, 8) for j in (0, 4, 8)]
    patches = torch.stack([x[:, :, i : i + 4, j : j + 4].reshape(2, -1) for i, j in corners], dim=1)
    z = patches @ model.stem.weight.T + model.stem.bias
    for number, block in enumerate(model.blocks):
        assert isinstance(block, MixerBlock)
        skip = z
        if number == 0 and spec.num_tokens:
            weight, scale, shift = block.skip.parameters()
            skip = layer_norm(weight @ z, (CHANNELS,), scale, shift)
        u = skip + on_columns(block.token_mixing, norm(z, block.token_norm))
        z = u + on_rows(block.channel_mixing, norm(u, block.channel_norm))
    pooled = norm(z, model.norm).mean(dim=1)
    torch.testing.assert_close(pooled_features(model, x), pooled)
    expected = pooled @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), expected)
    gradients = [
        torch.autograd.grad(logits.square().sum(), [*model.parameters()])
        for logits in (model(x), expected)
    ]
    torch.testing.assert_close(*gradients)
    if spec.num_tokens and spec.layers_per_mixing == 2:
        assert model.blocks[0].token_mixing.inner.weight.shape == (
            round(2.4 * TOKENS),
            PATCHES,
        )  # hidden x S0
        assert model.blocks[0].skip.linear.weight.shape == (TOKENS, PATCHES)  # S x S0


def test_the_epsilon_of_every_norm_is_the_specs() -> None:
    for fields in ({}, {"num_tokens": TOKENS}):
        for epsilon in (1e-5, 1e-6):
            modules = built(
                spec_with(**fields, **({} if epsilon == 1e-5 else {"norm_eps": epsilon}))
            ).modules()
            found = [module.eps for module in modules if isinstance(module, nn.LayerNorm)]
            assert found == [epsilon] * (8 if fields else 7)
    model = built(spec_with(num_tokens=PATCHES))  # the skip path, even for S = S0
    assert [
        sum(weight.numel() for weight in block.skip.parameters()) for block in model.blocks
    ] == [91, 0, 0]


def kron(a: Tensor, b: Tensor) -> Tensor:
    return torch.kron(a.contiguous(), b.contiguous())


def dense_mixing(module: nn.Module, *, copies: int, across: bool) -> list[tuple[Tensor, Tensor]]:
    """Return (matrix, bias) of every layer on vec(X), token by token: W (x) I across tokens, I (x)
    W along channels."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    eye, ones = torch.eye(copies, dtype=torch.float64), torch.ones(copies, dtype=torch.float64)
    if across:
        return [(kron(layer.weight, eye), torch.kron(layer.bias, ones)) for layer in layers]
    return [(kron(eye, layer.weight), torch.kron(ones, layer.bias)) for layer in layers]


def wide(x_BM: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    x_BM = gelu(x_BM @ layers[0][0].T + layers[0][1])
    return x_BM if len(layers) == 1 else x_BM @ layers[1][0].T + layers[1][1]


@pytest.mark.parametrize("fields", [*KINDS.values(), *RANDOM.values()], ids=[*KINDS, *RANDOM])
def test_a_block_is_a_wide_and_sparse_mlp(fields: dict[str, object]) -> None:
    """Every block on vec(X) by Kronecker matrices. RP blocks are J2 [I (x) W2] act([I (x) W1] J1 x)
    with matrices J."""
    model = built(spec_with(**fields))
    for number, block in enumerate(model.blocks):
        assert isinstance(block, MixerBlock)
        tokens_in = PATCHES if number == 0 or not fields.get("num_tokens") else TOKENS
        x = torch.randn(2, tokens_in, CHANNELS, dtype=torch.float64)
        skip, first = block.skip(x).flatten(1), norm(x, block.token_norm).flatten(1)
        tokens = skip.shape[1] // CHANNELS
        if block.is_permuted:
            layers = dense_mixing(block.token_mixing, copies=CHANNELS, across=False)
            j1, j2 = matrix_of(block.before_tokens), matrix_of(block.after_tokens)
            u = skip + wide(first @ j1.T, layers) @ j2.T
        else:
            u = skip + wide(first, dense_mixing(block.token_mixing, copies=CHANNELS, across=True))
        second = norm(u.reshape(2, tokens, CHANNELS), block.channel_norm).flatten(1)
        layers = dense_mixing(block.channel_mixing, copies=tokens, across=False)
        if block.is_permuted:
            j1, j2 = (matrix_of(block.before_channels), matrix_of(block.after_channels))
            y = u + wide(second @ j1.T, layers) @ j2.T
        else:
            y = u + wide(second, layers)
        torch.testing.assert_close(block(x).flatten(1), y)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
def test_rp_models_start_with_the_normal_models_weights(fields: dict[str, object]) -> None:
    """All weights, including the head's, are equal for one seed. Block 1 has the same permutations
    with and without other permuted blocks."""
    normal, all_, one = (
        build_model(
            spec_with(**fields, permuted_blocks=blocks), num_classes=3, image_size=IMAGE, seed=4
        ).state_dict()
        for blocks in ((), "all", (1,))
    )
    assert normal
    assert all(
        torch.equal(all_[name], weight) and torch.equal(one[name], weight)
        for name, weight in normal.items()
    )
    places = ("before_tokens", "after_tokens", "before_channels", "after_channels")
    assert one.keys() - normal.keys() == {f"blocks.1.{place}.index" for place in places}
    assert all_.keys() - normal.keys() == {
        f"blocks.{block}.{place}.index" for block in range(3) for place in places
    }
    assert all(torch.equal(all_[name], one[name]) for name in one)


def test_permutations_are_independent_and_a_function_of_the_seed() -> None:
    def indices(seed: int | None) -> dict[str, tuple[int, ...]]:
        model = build_model(
            spec_with(permuted_blocks="all"), num_classes=3, image_size=IMAGE, seed=seed
        )
        return {
            name: tuple(index.tolist())
            for name, index in model.named_buffers()
            if name.endswith(".index")
        }

    first = indices(seed=4)
    assert len(first) == 12
    assert len(set(first.values())) == 12
    torch.manual_seed(0)  # the global seed must not matter
    assert indices(seed=4) == first
    assert not set(indices(seed=5).values()) & set(first.values())
    assert not set(indices(seed=None).values()) & set(indices(seed=None).values())


def test_dropout_is_twice_in_a_mixing_and_only_in_training() -> None:
    """For W2 = 1 and two dropouts of 0.5, 3 of 4 entries are 0 and the others are 4 times as
    large."""
    torch.manual_seed(0)
    mixing = TwoLayer(spec_with(dropout=0.5), 40, hidden=40, num_outputs=40).double()
    nn.init.eye_(mixing.outer.weight)
    x = torch.randn(500, 40, dtype=torch.float64)
    kept = mixing.train()(x)
    whole = mixing.eval()(x)
    assert (kept == 0).double().mean() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(kept[kept != 0], 4 * whole[kept != 0])
    torch.testing.assert_close(whole, gelu(x @ mixing.inner.weight.T))


def test_a_linear_s_mixer_block_is_a_monarch_product() -> None:
    """Without norms and biases a block is (1 + R)(1 + Jc' L Jc) vec(X) with block-diagonal L and R.
    R Jc' L Jc is a Monarch matrix."""
    block = built(spec_with(layers_per_mixing=1, activation="identity")).blocks[0]
    block.token_norm, block.channel_norm = nn.Identity(), nn.Identity()
    across, along = block.token_mixing.linear, block.channel_mixing.linear
    for layer in (across, along):
        nn.init.zeros_(layer.bias)
    left = torch.block_diag(*[across.weight] * CHANNELS)
    right = torch.block_diag(*[along.weight] * PATCHES)
    size = PATCHES * CHANNELS
    jc = torch.zeros(size, size, dtype=torch.float64)
    for token in range(PATCHES):
        for channel in range(CHANNELS):
            jc[channel * PATCHES + token, token * CHANNELS + channel] = 1
    x = torch.randn(2, PATCHES, CHANNELS, dtype=torch.float64)
    one = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(
        block(x).flatten(1), x.flatten(1) @ ((one + right) @ (one + jc.T @ left @ jc)).T
    )
    mixed = block.channel_mixing(block.token_mixing(x.mT).mT)
    torch.testing.assert_close(mixed.flatten(1), x.flatten(1) @ (right @ jc.T @ left @ jc).T)
