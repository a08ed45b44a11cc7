"""Settings that probe, knn and evaluate share. No torch here."""

from data_prep.settings import Settings
from pretrain.config import ReadingSettings, TrackingSettings
from pretrain.ranks.settings import RanksSettings


class ShortRunSettings(Settings):
    """What probe, knn and evaluate have in common: a dataset, and ranks that end the run or begin it anew."""

    data: ReadingSettings
    ranks: RanksSettings = RanksSettings()
    tracking: TrackingSettings = TrackingSettings()
