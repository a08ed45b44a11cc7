"""Settings that probe, knn and evaluate share, and the input format of a frozen model."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from data_prep.manifest import Filter, Manifest
from data_prep.settings import Settings
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.config import PixelOrder, ReadingSettings, TrackingSettings
from pretrain.ranks.settings import RanksSettings
from pretrain.record import RecordSettings

_STATS = (
    "Source of the mean and standard deviation that normalize images. checkpoint: the training set"
    " of the checkpoint. target: this dataset, as in the code of Scaling MLPs."
)
ChannelStats = Annotated[Literal["checkpoint", "target"], Field(description=_STATS)]

_SOURCE = "A run directory, checkpoint, folder of weights, hf-hub:USER/NAME or timm:NAME."
Pretrained = Annotated[str, Field(description=_SOURCE, examples=["runs/mine"])]

_CLASS = Field(
    description="Model class of a checkpoint that was trained with model.import. The class is"
    " imported only if this setting or --allow-import names it.",
    examples=["my_package.my_module:MyModel"],
)
AllowedImport = Annotated[str | None, _CLASS]


class ShortRunSettings(Settings):
    data: ReadingSettings
    ranks: RanksSettings = RanksSettings()
    tracking: TrackingSettings = TrackingSettings()
    record: RecordSettings = RecordSettings()
    allow_import: AllowedImport = None


@dataclass(frozen=True)
class InputFormat:
    """Image size, normalization and other properties of a frozen model's input."""

    image_size: int
    normalization: tuple[tuple[float, float, float], tuple[float, float, float]]
    """Mean and standard deviation of each channel on the scale 0..1."""
    interpolation: Filter = "bilinear"
    """Default filter for resizing images."""
    eval_crop: float = 1.0
    """Fraction of the image side that the center crop keeps."""
    checkpoint: Checkpoint | None = None
    """Checkpoint of the model; None if the features are pixels."""
    pixels: PixelOrder = field(default_factory=PixelOrder)
    precision: str = "fp32"

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint | None,
        manifest: Manifest,
        *,
        image_size: int | None,
        channel_stats: ChannelStats,
    ) -> "InputFormat":
        statistics = (manifest.channel_mean, manifest.channel_std)
        if checkpoint is None:
            return cls(image_size or manifest.image_size, statistics)
        card = checkpoint.card
        if channel_stats == "checkpoint":
            statistics = (card.channel_mean, card.channel_std)
        return cls(
            card.image_size, statistics, card.fed_interpolation, card.eval_crop, checkpoint, card
        )
