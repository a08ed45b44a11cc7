"""Weights of other projects give the same outputs as there. Incomplete, unknown or unsafe files are
one-line errors."""

import math
import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.mlp_mixer import MlpMixer
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import gelu, relu
from torch.optim.swa_utils import AveragedModel

from data_prep.errors import Code
from finetune.weights.foreign import Foreign, convert, recognize
from finetune.weights.reading import read_weights
from pretrain.checkpoints.weights import load_strictly, shapes
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import MixerSpec, MlpSpec
from tests.errors import fails

Weights = dict[str, Tensor]
SIDE, WIDTH, HIDDEN, DEPTH, NUM_CLASSES = 8, 10, 25, 3, 7


class Theirs(nn.Module):
    """scaling_mlps' BottleneckMLP or MLP by its definition, for flattened CHW images."""

    def __init__(
        self,
        *,
        norm: Callable[[int], nn.Module] | None = nn.LayerNorm,
        is_bottleneck: bool = True,
        side: int = SIDE,
        depth: int = DEPTH,
        num_classes: int = NUM_CLASSES,
    ):
        super().__init__()
        self.act: Callable[[Tensor], Tensor] = gelu
        self.linear_in = nn.Linear(3 * side**2, WIDTH)
        self.linear_out = nn.Linear(WIDTH, num_classes)
        if is_bottleneck:
            self.blocks = nn.ModuleList(nn.Module() for _ in range(depth))
            for block in self.blocks:
                block.block = nn.Sequential(
                    nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
                )
        else:
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.layernorms = nn.ModuleList(
            norm(WIDTH) if norm else nn.Identity() for _ in range(depth)
        )
        with torch.no_grad():  # trained norms, so that swapped or missing norms are noticed
            for weight in self.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
            for buffer in self.buffers():
                buffer.add_(torch.rand_like(buffer) if buffer.is_floating_point() else 5)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        z = self.linear_in(x_BCHW.reshape(len(x_BCHW), -1))
        for number, norm in enumerate(self.layernorms):
            if hasattr(self, "blocks"):
                inner, _, outer = self.blocks[number].block
                z = z + outer(self.act(inner(norm(z))))
            else:
                z = self.layers[number](self.act(norm(z)))
        return self.linear_out(z)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ours(foreign: Foreign) -> ImageModel:
    model = build_model(
        foreign.spec, num_classes=foreign.num_classes, image_size=foreign.image_size
    )
    load_strictly(model, foreign.weights, source="here", label=foreign.spec.label)
    return model.eval()


def assert_same_answers(
    foreign: Foreign, theirs: Callable[[Tensor], Tensor], *, side: int = SIDE
) -> None:
    images = torch.randn(5, 3, side, side)
    torch.testing.assert_close(ours(foreign)(images), theirs(images))


def through_a_file(tmp_path: Path, stored: object, **reading: Any) -> Foreign:
    torch.save(stored, tmp_path / "weights")
    return convert(read_weights(tmp_path / "weights").weights, source="weights", **reading)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.BatchNorm1d, None], ids=["layer", "batch", "none"]
)
def test_a_bottleneck_mlp_computes_the_same(
    tmp_path: Path, norm: Callable[[int], nn.Module] | None
) -> None:
    theirs = Theirs(norm=norm).eval()
    foreign = through_a_file(tmp_path, theirs.state_dict())
    kind = {nn.LayerNorm: "layer", nn.BatchNorm1d: "batch", None: "none"}[norm]
    assert foreign.spec == MlpSpec(kind="mlp", depth=3, width=10, expansion=2.5, norm=kind)
    assert (foreign.image_size, foreign.num_classes) == (8, 7)
    assert_same_answers(foreign, theirs)


def test_the_standard_mlp_computes_the_same_and_is_not_the_papers(tmp_path: Path) -> None:
    theirs = Theirs(is_bottleneck=False)
    foreign = through_a_file(tmp_path, theirs.state_dict())
    assert_same_answers(foreign, theirs)
    images = torch.randn(5, 3, SIDE, SIDE)
    papers = ours(
        Foreign(
            "scaling_mlps",
            MlpSpec(kind="mlp", depth=3, width=10, bottleneck="none"),
            8,
            7,
            foreign.weights,
        )
    )
    assert (papers(images) - theirs(images)).abs().max() > 0.1


def test_another_activation_is_the_users_word(tmp_path: Path) -> None:
    theirs = Theirs()
    theirs.act = relu
    foreign = through_a_file(tmp_path, theirs.state_dict(), activation="relu")
    assert_same_answers(foreign, theirs)


WRAPS: dict[str, Callable[[Weights], object]] = {
    "in DDP": lambda weights: {
        "epoch": 3,
        "args": Namespace(lr=0.1),
        "model": {f"module.{k}": v for k, v in weights.items()},
    },
    "compiled in DDP": lambda weights: {
        "model": {"state_dict": {f"module._orig_mod.{k}": v for k, v in weights.items()}}
    },
    "another head": lambda weights: {
        k.replace("linear_out.", "linear_out.linear."): v for k, v in weights.items()
    },
    "bf16": lambda weights: {k: weight.bfloat16() for k, weight in weights.items()},
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_what_tools_wrap_around_weights_is_taken_off(
    tmp_path: Path, wrap: Callable[[Weights], object]
) -> None:
    theirs = Theirs().bfloat16().float()
    theirs.layernorms[1] = theirs.layernorms[0]  # shared memory, which safetensors does not support
    foreign = through_a_file(tmp_path, wrap(theirs.state_dict()))
    assert_same_answers(foreign, theirs)
    save_file(foreign.weights, tmp_path / "model.safetensors")


def test_a_first_layer_that_reads_pixel_by_pixel_is_turned() -> None:
    weights = Theirs().state_dict()
    pictures = weights["linear_in.weight"].view(-1, 3, SIDE, SIDE)
    stored = weights | {"linear_in.weight": pictures.permute(0, 2, 3, 1).flatten(1)}
    foreign = convert(stored, source="f", flattening="hwc")
    assert torch.equal(foreign.weights["stem.weight"], pictures.flatten(1))
    assert not torch.equal(convert(stored, source="f").weights["stem.weight"], pictures.flatten(1))


def test_timms_mixer_computes_the_same() -> None:
    theirs = MlpMixer(
        num_classes=5, img_size=24, patch_size=8, num_blocks=2, embed_dim=12, mlp_ratio=(0.5, 3.0)
    ).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
        for (
            name,
            weight,
        ) in theirs.named_parameters():  # for small features eps matters in every norm
            if "stem" in name or "fc2" in name:
                weight.mul_(3e-3)
    foreign = convert(theirs.state_dict(), source="f")
    spec = MixerSpec(
        kind="mixer",
        patch_size=8,
        num_channels=12,
        depth=2,
        token_hidden=6,
        channel_hidden=36,
        norm_eps=1e-6,
    )
    assert (foreign.spec, foreign.image_size, foreign.num_classes) == (spec, 24, 5)
    assert_same_answers(foreign, theirs, side=24)


def test_the_shape_of_timms_mixer_b_16_is_recognized() -> None:
    with torch.device("meta"):
        weights = timm.create_model("mixer_b16_224").state_dict()
    layout = recognize(shapes(weights), source="f", activation="gelu")
    spec = layout.spec
    assert isinstance(spec, MixerSpec) and (spec.label, layout.image_size) == (
        "Mixer P16 C768 L12",
        224,
    )
    assert (spec.token_hidden, spec.channel_hidden) == (384, 3072)
    assert layout.names.keys() == weights.keys() and len(set(layout.names.values())) == len(weights)


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch ran",))


def cut(path: Path) -> None:
    torch.save(Theirs().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-3000])


def cut_safetensors(path: Path) -> None:
    save_file(Theirs().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (
            lambda path: torch.save({"linear_in.weight": torch.zeros(2), "x": Payload()}, path),
            "unsafe",
        ),
        (lambda path: path.write_bytes(pickle.dumps(Payload(), protocol=2)), "unsafe"),
        (lambda path: path.write_bytes(pickle.dumps(Payload(), protocol=5)), "unsafe"),
        (cut, "damaged"),
        (cut_safetensors, "damaged"),
        (lambda path: path.write_text("<html>Too many requests</html>"), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: None, "unreadable"),
        (lambda path: path.mkdir(), "unreadable"),
        (lambda path: torch.save([torch.zeros(2)], path), "unknown-format"),
        (lambda path: torch.save({"epoch": 3, "lr": 0.1}, path), "unknown-format"),
        (lambda path: torch.save({"state_dict": {}}, path), "unknown-format"),
    ],
)
def test_a_file_that_holds_no_weights_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], code: Code
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "given")
    with fails(code, str(tmp_path / "given")) as caught:
        read_weights(tmp_path / "given")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def with_tensor(name: str, tensor: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: tensor}


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (without("linear_in.bias", "blocks.1.block.0.weight"), "mismatch", "f"),
        (without("linear_out.weight", "linear_out.bias"), "mismatch", "linear_out.weight"),
        (with_tensor("tokens", torch.zeros(1)), "mismatch", "f"),
        (with_tensor("blocks.2.block.2.weight", torch.zeros(25, 10)), "mismatch", "f"),
        (with_tensor("linear_in.weight", torch.zeros(10, 190)), "unsupported", "linear_in.weight"),
        (with_tensor("linear_in.weight", torch.zeros(10)), "mismatch", "linear_in.weight"),
        (with_tensor("linear_out.weight", torch.zeros(0, 10)), "mismatch", "linear_out.weight"),
        (with_tensor("layernorms.1.bias", torch.tensor([math.nan] * 10)), "not-finite", "f"),
        (
            with_tensor("blocks.1.block.2.weight", torch.zeros(10, 25, dtype=torch.int8)),
            "unsupported",
            "f",
        ),
        (lambda weights: {"conv1.weight": torch.zeros(1)}, "unknown-format", "f"),
        (
            lambda weights: build_model(
                MlpSpec(kind="mlp"), num_classes=2, image_size=4
            ).state_dict(),
            "wrong-command",
            "f",
        ),
    ],
)
def test_weights_that_do_not_fit_are_one_message(
    change: Callable[[Weights], Weights], code: Code, field: str
) -> None:
    with fails(code, field):
        convert(change(Theirs().state_dict()), source="f")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("gmixer_12_224", "mismatch"),
        ("gmlp_ti16_224", "unknown-format"),
        ("resmlp_12_224", "unknown-format"),
    ],
)
def test_timms_other_models_are_refused(name: str, code: Code) -> None:
    with torch.device("meta"):
        weights = timm.create_model(name, num_classes=2).state_dict()
    with fails(code, "f"):
        convert(weights, source="f")


def test_a_training_file_gives_what_timm_takes_of_it(tmp_path: Path) -> None:
    """The file is written and read by timm's own functions."""
    sizes = {"num_classes": 5, "img_size": 16, "patch_size": 8, "num_blocks": 1, "embed_dim": 8}
    theirs = MlpMixer(**sizes)
    average = ModelEmaV3(theirs)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight))
    optimizer = torch.optim.SGD(theirs.parameters())
    saver = CheckpointSaver(theirs, optimizer, model_ema=average, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(epoch=0, metric=1.0)
    images, answers = torch.randn(3, 3, 16, 16), []
    for kind, uses_average in (("ema", True), ("raw", False)):
        stored = read_weights(tmp_path / "last.pth.tar", kind=kind)
        assert stored.average == "state_dict_ema"
        timm.models.load_checkpoint(theirs, str(tmp_path / "last.pth.tar"), use_ema=uses_average)
        answers.append(ours(convert(stored.weights, source="f"))(images))
        torch.testing.assert_close(answers[-1], theirs.eval()(images))
    assert (answers[0] - answers[1]).abs().max() > 0.1


def test_torchs_averaged_model_is_read(tmp_path: Path) -> None:
    theirs = Theirs()
    average = AveragedModel(theirs, use_buffers=True)
    average.update_parameters(theirs)
    foreign = through_a_file(
        tmp_path, {"model": theirs.state_dict(), "model_ema": average.state_dict(), "epoch": 3}
    )
    assert_same_answers(foreign, average.module)
