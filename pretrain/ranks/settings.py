"""For how long the ranks of a run wait for each other: in the section `engine` of a training,
`ranks` elsewhere. No torch here."""

from pydantic import Field

from data_prep.settings import Settings


class RanksSettings(Settings):
    timeout_s: float = Field(600.0, gt=0)
    """A collective that waits longer than this ends the run: a rank is stuck or gone. Long work of
    one rank does not count."""
    heartbeat_timeout_s: float = Field(60.0, ge=1)
    """A rank that is silent for so long is frozen, or its node is lost: the others end at once and
    name it. (One that has died is noticed within a second.) Longer than any call that keeps Python
    from running its threads."""
    lock_wait_s: float = Field(180.0, ge=0)
    """A start that finds the run held by another waits so long for it, at most half of timeout_s.
    The lock of a node that is lost goes with its lease: an NFSv4 server of Linux may drop it after
    90 s of silence, and does so within another 90; Lustre evicts a client that was silent for 150 s
    (one and a half times obd_timeout, 100 s by default)."""
    hang_timeout_s: float | None = Field(540.0, ge=0)
    """Seconds without any progress (a step, a batch of the evaluation, a piece of a checkpoint, a
    block of a file, ...) after which the run counts as hung: all ranks leave their stacks in
    RUN/stacks and end, and the one that is behind is named. Longer than the longest of these, the
    first step with its compilation too; shorter than timeout_s, which leaves no stacks. 0 or null:
    never."""
