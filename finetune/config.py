"""Settings that probe, knn and evaluate share, and what a frozen model is fed with. No torch
here."""

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
    "Mean and deviation that pictures are normalised with: the checkpoint's, or those of the"
    " dataset, as in paper B's code."
)
ChannelStats = Annotated[Literal["checkpoint", "target"], Field(description=_STATS)]


class ShortRunSettings(Settings):
    """What probe, knn and evaluate have in common: a dataset, and ranks that end the run or begin
    it anew."""

    data: ReadingSettings
    ranks: RanksSettings = RanksSettings()
    tracking: TrackingSettings = TrackingSettings()
    record: RecordSettings = RecordSettings()


@dataclass(frozen=True)
class Fed:
    """What a frozen model expects of a picture."""

    image_size: int
    normalisation: tuple[tuple[float, float, float], tuple[float, float, float]]
    """Mean and standard deviation of each channel on the scale 0..1."""
    interpolation: Filter = "bilinear"
    """With which pictures of another size are fed, unless settings name another."""
    checkpoint: Checkpoint | None = None
    """None where there is no model, and the features are the pixels."""
    pixels: PixelOrder = field(default_factory=PixelOrder)
    precision: str = "fp32"
    """Of the model's products."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint | None,
        manifest: Manifest,
        *,
        image_size: int | None,
        channel_stats: ChannelStats,
    ) -> "Fed":
        """Without a checkpoint as the dataset's manifest says."""
        target = (manifest.channel_mean, manifest.channel_std)
        if checkpoint is None:
            return cls(image_size or manifest.image_size, target)
        card = checkpoint.card
        own = (card.channel_mean, card.channel_std)
        return cls(
            card.image_size,
            own if channel_stats == "checkpoint" else target,
            card.fed_interpolation,
            checkpoint,
            card,
        )
