"""Settings that probe, knn and evaluate share. No torch here."""

from data_prep.settings import Settings
from pretrain.config import CacheSettings, TrackingSettings
from pretrain.ranks.settings import RanksSettings


class ShortRunSettings(Settings):
    """What probe, knn and evaluate have in common: a dataset, and ranks that end the run or begin it anew."""

    dataset: str
    """A directory that `data_prep build` or `index` has finished."""
    data: CacheSettings = CacheSettings()
    ranks: RanksSettings = RanksSettings()
    tracking: TrackingSettings = TrackingSettings()
