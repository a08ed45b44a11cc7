"""Settings that probe, knn and evaluate share. No torch here."""

from pydantic import Field

from data_prep.settings import Settings
from pretrain.config import CacheSettings, TrackingSettings


class RanksSettings(Settings):
    """How patient ranks are with each other."""

    timeout_s: float = Field(600.0, gt=0)
    """A collective that waits longer than this ends the run: a rank is stuck. Long work of one rank alone does not count."""
    heartbeat_timeout_s: float = Field(60.0, ge=1)
    """A rank that is silent for so long is frozen, or its node is lost: the others end at once and name it."""
    lock_wait_s: float = Field(180.0, ge=0)
    """A start that finds the run held by another waits so long for it, as in pretraining; at most half of timeout_s."""
    hang_timeout_s: float | None = Field(540.0, ge=0)
    """Seconds without any progress (a batch, a block of a file) after which the run counts as hung, as in pretraining: all ranks
    write their stacks to RUN/stacks and end. 0 or null: never."""


class ShortRunSettings(Settings):
    """What probe, knn and evaluate have in common: a dataset, and ranks that end the run or begin it anew."""

    dataset: str
    """A directory that `data_prep build` or `index` has finished."""
    data: CacheSettings = CacheSettings()
    ranks: RanksSettings = RanksSettings()
    tracking: TrackingSettings = TrackingSettings()
