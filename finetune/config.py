"""Settings that probe, knn and evaluate share. No torch here."""

from typing import Annotated, Literal

from pydantic import Field

from data_prep.settings import Settings
from pretrain.config import ReadingSettings, TrackingSettings
from pretrain.ranks.settings import RanksSettings

_STATS = "Mean and deviation that pictures are normalised with: the checkpoint's, or those of the dataset, as in paper B's code."
ChannelStats = Annotated[Literal["checkpoint", "target"], Field(description=_STATS)]


class ShortRunSettings(Settings):
    """What probe, knn and evaluate have in common: a dataset, and ranks that end the run or begin it anew."""

    data: ReadingSettings
    ranks: RanksSettings = RanksSettings()
    tracking: TrackingSettings = TrackingSettings()
