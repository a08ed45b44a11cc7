"""A model as a graph that runs without us: ONNX and torch.export, each read back from its file and
held to the model's answers.

Any batch size. Neither format has products of sparse matrices that others know, so these become
dense ones. Everything happens on the CPU, in fp32.

B batch, H height, W width, C colours, K classes.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_prep.errors import UserError
from pretrain.checkpoints.card import ModelCard
from pretrain.models.image_model import ImageModel
from pretrain.models.layers.sparse import MaskedLinear, SparseLinear

BATCH_SIZES = (1, 2, 5)
TOLERANCE = 1e-4
"""Of the largest logit: rounding of fp32 is 100 times smaller even in deep models, a wrong graph is
far beyond."""
MOST_DENSE_BYTES = 16 << 30
NOISE = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # torch.onnx of torch's own pytrees
    r"The given buffer is not writable",  # torch.export.load of the file that it maps
)


class Agreement(NamedTuple):
    """Over all trial inputs."""

    max_abs: float
    max_rel: float
    """Of the largest logit of the batch."""


class FromPictures(nn.Module):
    """uint8 pictures as they are decoded -> logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, card: ModelCard):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(card.channel_mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(card.channel_std).view(3, 1, 1))

    def forward(self, pictures_BHWC: Tensor) -> Tensor:
        images_BCHW = (pictures_BHWC.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        logits_BK: Tensor = self.model(images_BCHW)
        return logits_BK


def dense(model: ImageModel, *, label: str) -> ImageModel:
    """The model itself, or a copy whose sparse layers are dense."""
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, MaskedLinear | SparseLinear)
    }
    if not layers:
        return model
    num_bytes = sum(4 * each.in_features * each.out_features for each in layers.values())
    if num_bytes > MOST_DENSE_BYTES:
        size = f"{num_bytes / 1e9:,.0f} GB, more than {MOST_DENSE_BYTES / 1e9:.0f}"
        problem = f"onnx and torch have no sparse matrices; dense ones of {label} take {size}"
        raise UserError("formats", problem, "use --formats timm", code="unsupported")
    copied = copy.deepcopy(model)
    for name, layer in layers.items():
        filled = nn.Linear(layer.in_features, layer.out_features, device="meta")
        weight = (
            layer.dense_weight()
            if isinstance(layer, SparseLinear)
            else torch.where(layer.mask, layer.weight, 0.0)
        )
        filled.weight, filled.bias = (
            nn.Parameter(weight.detach().clone()),
            nn.Parameter(layer.bias.detach().clone()),
        )
        copied.set_submodule(name, filled)
    return copied.eval()


def trial_inputs(card: ModelCard, *, with_preprocessing: bool) -> list[Tensor]:
    """Noise, and smooth pictures with the dataset's mean and deviation, of each batch size."""
    generator, size = torch.Generator().manual_seed(0), card.image_size
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (card.channel_mean, card.channel_std)
    )
    found = []
    for batch in BATCH_SIZES:
        coarse = torch.randn(batch, 3, 4, 4, generator=generator)
        smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
        pictures = ((mean + std * smooth).clamp(0, 1) * 255).round()
        if with_preprocessing:
            noise = torch.randint(
                0, 256, (batch, size, size, 3), generator=generator, dtype=torch.uint8
            )
            found += [noise, pictures.permute(0, 2, 3, 1).contiguous().to(torch.uint8)]
        else:
            found += [
                torch.randn(batch, 3, size, size, generator=generator),
                (pictures / 255 - mean) / std,
            ]
    return found


def agreement(
    expected: list[Tensor], answers: Callable[[Tensor], Tensor], inputs: list[Tensor], *, graph: str
) -> Agreement:
    """An error where the graph's answers are not the model's."""
    max_abs = max_rel = 0.0
    for x, wanted_BK in zip(inputs, expected, strict=True):
        found_BK = answers(x)
        if found_BK.shape != wanted_BK.shape:
            shapes = (
                f"{tuple(found_BK.shape)} for a batch of {len(x)}, the model"
                f" {tuple(wanted_BK.shape)}"
            )
            raise UserError(
                "formats",
                f"{graph} gives {shapes}",
                f"please report it, and remove {graph} from formats",
                code="mismatch",
            )
        off, largest = float((found_BK - wanted_BK).abs().max()), float(wanted_BK.abs().max())
        relative = off / max(largest, 1e-6)
        if not relative <= TOLERANCE:  # so that NaN fails, too
            fault = (
                f"its answers are off by {off:.2g}, {relative:.2g} of the largest logit, more than"
                f" {TOLERANCE:g}"
            )
            raise UserError(
                "formats",
                f"{graph}: {fault}",
                f"please report it, and remove {graph} from formats",
                code="mismatch",
            )
        max_abs, max_rel = max(max_abs, off), max(max_rel, relative)
    return Agreement(max_abs, max_rel)


def write_onnx(module: nn.Module, example: Tensor, path: Path, *, metadata: dict[str, Any]) -> None:
    with _quiet("onnx"):
        shapes = ({0: torch.export.Dim("batch")},)
        names: dict[str, Any] = {"input_names": [metadata["input"]], "output_names": ["logits"]}
        program = torch.onnx.export(
            module.eval(), (example,), dynamo=True, verbose=False, dynamic_shapes=shapes, **names
        )
        assert program is not None
    words = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.items()
    }
    program.model.metadata_props.update(words)
    program.save(path)  # beyond 1.5 GB with the weights beside it, as protobuf ends at 2


def answers_of_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda x: torch.from_numpy(session.run(None, {given.name: x.numpy()})[0])


def write_pt2(module: nn.Module, example: Tensor, path: Path, *, metadata: dict[str, Any]) -> None:
    with _quiet("torch"):
        dynamic = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(
            module.eval(), (example,), dynamic_shapes=dynamic, strict=False
        )
    stream = BytesIO()  # torch's own writer ends the process where the disk is full
    torch.export.save(program, stream, extra_files={"metadata.json": json.dumps(metadata)})
    path.write_bytes(stream.getbuffer())


def answers_of_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    with _quiet("torch"):
        return torch.export.load(path).module()


@contextmanager
def _quiet(graph: str) -> Iterator[None]:
    """Without what these exporters log for their own developers, and with one message where they
    fail."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")
    ]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings():
        for text in NOISE:
            warnings.filterwarnings("ignore", message=text)
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        except (RuntimeError, torch.onnx.OnnxExporterError) as error:
            why = (str(error) or type(error).__name__).strip().splitlines()[0][:160]
            raise UserError(
                "formats",
                f"torch cannot write this model as {graph} ({why})",
                f"remove {graph} from formats",
                code="unsupported",
            ) from error
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
