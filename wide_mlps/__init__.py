"""Python API for datasets, models, checkpoints, features and predictions.

`import wide_mlps` imports neither torch nor timm. The first use of a name imports the libraries
that it needs. Every name is an object of another package, or a function that only calls objects of
other packages.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import __version__
from data_prep.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from finetune.predict.predict import Predictor
    from pretrain.checkpoints.checkpoint import Checkpoint
    from pretrain.data.torch_dataset import ShardBatches, ShardLoader
    from pretrain.data.torch_dataset import Shards as Dataset
    from pretrain.models.build import build as create_model
    from pretrain.models.image_model import ImageModel

    Weights = Predictor | Checkpoint | Path | str

__all__ = (
    "Checkpoint",
    "Dataset",
    "Predictor",
    "ShardBatches",
    "ShardLoader",
    "UserError",
    "__version__",
    "create_model",
    "extract_features",
    "list_models",
    "load_checkpoint",
    "load_model",
    "predict",
)
_PLACES = {
    "Checkpoint": "pretrain.checkpoints.checkpoint:Checkpoint",
    "Dataset": "pretrain.data.torch_dataset:Shards",
    "Predictor": "finetune.predict.predict:Predictor",
    "ShardBatches": "pretrain.data.torch_dataset:ShardBatches",
    "ShardLoader": "pretrain.data.torch_dataset:ShardLoader",
    "create_model": "pretrain.models.build:build",
}
"""Module and name of each public object. The module is imported at the first use of the object."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, original = _PLACES[name].partition(":")
    globals()[name] = found = getattr(import_module(module), original)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def list_models(pattern: str = "*") -> list[str]:
    """Return the names for `create_model` that match a shell pattern, for example "mixer_*"."""
    from pretrain.models.listing import list_models as rows_of_models

    return [row.name for row in rows_of_models(match=pattern)[0]]


def load_checkpoint(source: Path | str) -> "Checkpoint":
    """Open a checkpoint and check its hashes.

    `source`: a run directory (for its newest checkpoint), RUN@50epochs (for its checkpoint at 50
    epochs), a checkpoint, a folder of weights, hf-hub:USER/NAME or timm:NAME.
    """
    from pretrain.checkpoints.checkpoint import Checkpoint

    return Checkpoint.open(source)


def load_model(source: "Checkpoint | Path | str") -> "ImageModel":
    """Return the model of a checkpoint with its weights, in evaluation mode, on the CPU."""
    from pretrain.checkpoints.checkpoint import Checkpoint
    from pretrain.checkpoints.files import load_model as model_of

    checkpoint = source if isinstance(source, Checkpoint) else load_checkpoint(source)
    return model_of(checkpoint).eval()


def predict(weights: "Weights", images: Iterable["Image"]) -> "Tensor":
    """Return the probability of each class for PIL images, one row per image.

    Images are preprocessed as the checkpoint requires. For many calls, create
    `Predictor.open("runs/mine")` once and pass it as `weights`.
    """
    return _compute(weights, images)[0].softmax(dim=1)


def extract_features(weights: "Weights", images: Iterable["Image"]) -> "Tensor":
    """Return the features of PIL images (the input of a linear probe), one row per image."""
    return _compute(weights, images)[1]


def _compute(weights: "Weights", images: Iterable["Image"]) -> "tuple[Tensor, Tensor]":
    from finetune.predict.predict import Predictor

    predictor = weights if isinstance(weights, Predictor) else Predictor.open(weights)
    return predictor.answer(predictor.batch(images))
