"""How patient the ranks of a short run are with each other: what probe, knn and evaluate have in common. No torch here."""

from pydantic import Field

from data_prep.settings import Settings


class RanksSettings(Settings):
    timeout_s: float = Field(600.0, gt=0)
    """A collective that waits longer than this ends the run: a rank is stuck. Long work of one rank alone does not count."""
    heartbeat_timeout_s: float = Field(60.0, ge=1)
    """A rank that says nothing for so long is frozen, or its node is lost: the others end at once and name it."""
    lock_wait_s: float = Field(180.0, ge=0)
    """A start that finds the run held by another waits so long for it, as in pretraining; at most half of timeout_s."""
    hang_timeout_s: float | None = Field(540.0, ge=0)
    """Seconds without any progress (a batch, a block of a file) after which the run counts as hung, as in pretraining: all ranks
    leave their stacks in RUN/stacks and end. 0 or null: never."""
