"""Time limits of the ranks of a run: section `engine` of a training, otherwise `ranks`."""

from pydantic import Field

from data_prep.settings import Settings


class RanksSettings(Settings):
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that a collective operation may wait. After this time the run ends, because a rank is
    stuck or lost. Long work of one rank does not count."""
    heartbeat_timeout_s: float = Field(60.0, ge=1)
    """Seconds of silence after which a rank counts as frozen or its node as lost. The other ranks
    then name the silent rank and end. The limit must be longer than any call that blocks Python's
    threads. A dead rank is noticed within a second."""
    lock_wait_s: float = Field(180.0, ge=0)
    """Seconds to wait for a run that another process has locked, at most half of timeout_s. The
    lock of a lost node ends with its lease: up to 180 s for NFSv4 on Linux, 150 s for Lustre."""
    hang_timeout_s: float | None = Field(540.0, ge=0)
    """Seconds without progress (a step, a batch, a part of a file) after which all ranks write
    their stacks to RUN/stacks and end. The limit must be longer than the first step with its
    compilation, and shorter than timeout_s. 0 or null: no limit."""
