"""Compiled models and models padded to multiples of 8 have the outputs and gradients of plain eager
models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain.models.layers.linear as linear_module
from pretrain.engine.step import compile_blocks
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec

MLP = MlpSpec(kind="mlp", depth=2, width=13)
RP = MixerSpec(
    kind="mixer",
    patch_size=4,
    num_channels=10,
    num_tokens=7,
    depth=2,
    expansion=1.3,
    permuted_blocks="all",
)
OTHERS = [
    MlpSpec(kind="mlp", depth=2, width=13, bottleneck="none", activation="tanh"),
    MixerSpec(kind="mixer", patch_size=4, num_channels=10, depth=2, expansion=1.3),
    MixerSpec(
        kind="mixer",
        patch_size=4,
        num_channels=10,
        depth=2,
        layers_per_mixing=1,
        permuted_blocks=(1,),
    ),
]
pytestmark = [  # torch's own warnings
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.nightly,
]
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fill_tiny_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "SMALLEST", 1)


def model(spec: AnySpec) -> ImageModel:
    return build_model(spec, num_classes=3, image_size=8, seed=0)


def logits_and_gradients(of: nn.Module, images: Tensor = IMAGES) -> dict[str, Tensor]:
    logits = of(images)
    logits.double().square().sum().backward()
    gradients = {name: weight.grad for name, weight in of.named_parameters()}
    return {
        "logits": logits.detach(),
        **{name: grad for name, grad in gradients.items() if grad is not None},
    }


def plain_in_float64(spec: AnySpec) -> dict[str, Tensor]:
    """Return logits and gradients without padding (evaluation mode), in float64."""
    return logits_and_gradients(model(spec).double().eval(), IMAGES.double())


@pytest.mark.parametrize("spec", [MLP, RP, *OTHERS], ids=lambda spec: spec.label)
def test_filled_up_products_give_the_same_logits_and_gradients(
    spec: AnySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    product = linear_module.linear
    monkeypatch.setattr(
        linear_module, "linear", lambda x, *rest: widths.append(x.shape[-1]) or product(x, *rest)
    )
    found = logits_and_gradients(model(spec).double(), IMAGES.double())
    assert widths
    assert {width % 8 for width in widths} == {0}
    torch.testing.assert_close(found, plain_in_float64(spec), rtol=1e-12, atol=1e-12)


def test_filled_up_weights_are_not_kept_for_the_backward_pass() -> None:
    layer, x, kept = linear_module.Linear(13, 11), torch.randn(5, 13), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tuple(tensor.shape)), lambda _: None
    ):
        layer(x)
    assert sorted(kept) == [(5, 16), (11, 13)]


@pytest.mark.parametrize("spec", [MLP, RP], ids=lambda spec: spec.label)
def test_filled_up_products_learn_the_same_under_autocast(spec: AnySpec) -> None:
    found = []
    for smallest in (1, 10**9):
        linear_module.SMALLEST = smallest
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(logits_and_gradients(model(spec)))
    assert found[0].keys() == found[1].keys()
    assert all(value.dtype == found[1][name].dtype for name, value in found[0].items())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)


@pytest.mark.processes
def test_inductor_is_eager() -> None:
    spec = MLP.model_copy(update={"depth": 1})  # two blocks would compile for a minute
    compiled, plain = model(spec), plain_in_float64(spec)
    compile_blocks(compiled)
    found = logits_and_gradients(compiled)
    torch.testing.assert_close(
        {name: value.double() for name, value in found.items()}, plain, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("spec", [RP, OTHERS[2]], ids=lambda spec: spec.label)
def test_traced_graphs_are_eager(spec: AnySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block's gradients are finished before the previous block's backward begins, so that
    ranks can exchange them early. Permutations are a custom operation, because inductor would
    gather single numbers.
    """
    from functorch.compile import make_boxed_func  # a late import: it loads torch's compiler
    from torch._dynamo.backends.common import aot_autograd

    compiled, order, operations = model(spec).double(), list[str](), set[str]()

    def as_traced(graph: torch.fx.GraphModule, _: object) -> Any:
        operations.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compile_blocks(
        compiled, backend=aot_autograd(fw_compiler=as_traced, bw_compiler=as_traced), fullgraph=True
    )
    for number, block in enumerate(compiled.blocks):
        for weight in block.parameters():
            weight.register_post_accumulate_grad_hook(
                lambda _, number=number: order.append(f"weight of {number}")
            )

    def run(block: nn.Module, x_BF: Tensor) -> Tensor:
        number = list(compiled.blocks).index(block)
        x_BF.register_hook(lambda _: order.append(f"block {number} is over"))
        return block(x_BF)

    monkeypatch.setattr(compiled, "_run", run)
    torch.testing.assert_close(
        logits_and_gradients(compiled, IMAGES.double()),
        plain_in_float64(spec),
        rtol=1e-10,
        atol=1e-10,
    )
    assert [*dict.fromkeys(order)] == [
        "weight of 1",
        "block 1 is over",
        "weight of 0",
        "block 0 is over",
    ]
    assert (
        "wide_mlps.take_columns.default" in operations
        and "aten.index_select.default" not in operations
    )
