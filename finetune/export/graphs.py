"""Export of a model to ONNX and torch.export. Each graph is read back and compared with the model.

Graphs accept any batch size. Sparse layers become dense, because neither format has products of
sparse matrices. Everything runs on the CPU in fp32. Shapes: B batch, H height, W width, C
channels, K classes.
"""

import copy
import json
import logging
import math
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
"""Largest accepted difference of logits, relative to the largest logit. Usual rounding errors are
100 times smaller."""
MOST_DENSE_BYTES = 16 << 30


class Agreement(NamedTuple):
    """Largest differences between the logits of a graph and of the model."""

    max_abs: float
    max_rel: float
    """Largest difference, relative to the largest logit of the batch."""


class FromPictures(nn.Module):
    """Model that takes decoded uint8 images and returns logits."""

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
    """Return the model, or a copy in which dense layers replace sparse layers."""
    sparse = MaskedLinear | SparseLinear
    layers = [name for name, each in model.named_modules() if isinstance(each, sparse)]
    if not layers:
        return model
    modules: Any = {name: model.get_submodule(name) for name in layers}
    num_bytes = sum(4 * each.in_features * each.out_features for each in modules.values())
    if num_bytes > MOST_DENSE_BYTES:
        size = f"{num_bytes / 1e9:,.0f} GB (at most {MOST_DENSE_BYTES / 1e9:.0f} GB are supported)"
        problem = f"onnx and torch need dense matrices, which take {size} for {label}"
        raise UserError("formats", problem, "use --formats timm", code="unsupported")
    copied = copy.deepcopy(model)
    for name, layer in modules.items():
        is_sparse = isinstance(layer, SparseLinear)
        weight = layer.dense_weight() if is_sparse else torch.where(layer.mask, layer.weight, 0.0)
        linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
        linear.weight = nn.Parameter(weight.detach().clone())
        linear.bias = nn.Parameter(layer.bias.detach().clone())
        copied.set_submodule(name, linear)
    return copied.eval()


def trial_inputs(card: ModelCard, *, with_preprocessing: bool) -> list[Tensor]:
    """Return a batch of noise and a batch of smooth images for each batch size."""
    generator, size = torch.Generator().manual_seed(0), card.image_size
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (card.channel_mean, card.channel_std)
    )
    inputs = []
    for batch in BATCH_SIZES:
        coarse = torch.randn(batch, 3, 4, 4, generator=generator)
        smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
        noise = torch.randn(batch, 3, size, size, generator=generator)
        for normal in (noise, smooth):
            images = ((mean + std * normal).clamp(0, 1) * 255).round()
            if with_preprocessing:
                inputs.append(images.permute(0, 2, 3, 1).contiguous().to(torch.uint8))
            else:
                inputs.append((images / 255 - mean) / std)
    return inputs


def agreement(
    expected: list[Tensor], answers: Callable[[Tensor], Tensor], inputs: list[Tensor], *, graph: str
) -> Agreement:
    """Return the differences between the logits of a graph and of the model. Fail if they exceed
    TOLERANCE."""
    max_abs = max_rel = 0.0
    for x, wanted_BK in zip(inputs, expected, strict=True):
        found_BK, largest = answers(x), float(wanted_BK.abs().max())
        off = math.inf
        if found_BK.shape == wanted_BK.shape:
            off = float((found_BK - wanted_BK).abs().max())
        relative = off / max(largest, 1e-6)
        if not relative <= TOLERANCE:  # fails for NaN
            problem = f"logits of {graph} and model differ by {relative:.2g} of the largest logit"
            fix = f"report this error, and remove {graph} from formats"
            raise UserError("formats", problem, fix, code="mismatch")
        max_abs, max_rel = max(max_abs, off), max(max_rel, relative)
    return Agreement(max_abs, max_rel)


def write_onnx(module: nn.Module, example: Tensor, path: Path, *, metadata: dict[str, Any]) -> None:
    with _quiet("onnx"):
        program = torch.onnx.export(
            module.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=[metadata["input"]],
            output_names=["logits"],
        )
        assert program is not None
    program.model.metadata_props.update(
        {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    )
    program.save(path)  # above 1.5 GB, weights are in a second file


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
    stream = BytesIO()  # torch's own writer ends the process if the disk is full
    torch.export.save(program, stream, extra_files={"metadata.json": json.dumps(metadata)})
    path.write_bytes(stream.getbuffer())


def answers_of_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    with _quiet("torch"):
        return torch.export.load(path).module()


@contextmanager
def _quiet(graph: str) -> Iterator[None]:
    """Hide developer logs of an exporter, and raise a UserError if the exporter fails."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, torch.onnx.OnnxExporterError) as error:
        why = (str(error) or type(error).__name__).strip().splitlines()[0][:160]
        problem = f"torch cannot write this model as {graph} ({why})"
        fix = f"remove {graph} from formats"
        raise UserError("formats", problem, fix, code="unsupported") from error
    finally:
        logging.disable(logging.NOTSET)
