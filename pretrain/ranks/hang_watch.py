"""What the heartbeat's thread does about hangs: it tells where its rank stands, judges (the first rank's), and leaves stacks."""

import os
from dataclasses import replace
from pathlib import Path

from pretrain.ranks.headway import HEADWAY, Standing
from pretrain.ranks.heartbeat_wire import Message, Peer
from pretrain.ranks.stacks import Stacks
from pretrain.ranks.verdict import Standings, Verdict
from pretrain.ranks.world import World

ARMED_SHARE = 0.75
"""Of the time after which a rank counts as silent: then its stacks are dumped, if they still can be."""


class HangWatch:
    def __init__(
        self, directory: Path, world: World, me: Peer, *, hang_timeout_s: float | None, silence_timeout_s: float
    ):
        self.directory, self._world, self._me = directory, world, me
        self._timeout_s = hang_timeout_s or 0.0
        self._armed_s = self._timeout_s if world.num_ranks == 1 else ARMED_SHARE * silence_timeout_s
        self._stacks, self._standings = Stacks(directory, me).open(), Standings()
        self._stacks.arm(self._armed_s)  # the next beat may never come
        HEADWAY.mark("starting", step=0)

    def beat(self) -> Message:
        """Where this rank stands, for the first one."""
        self._stacks.arm(self._armed_s)
        standing = HEADWAY.standing()
        if self._world.is_first:
            self._standings.note(self._me, standing)
        return standing.as_message()

    def heard(self, peer: Peer, message: Message) -> None:
        self._standings.note(peer, Standing.of(message))

    def left(self, peer: Peer) -> None:
        """Its work is done; the others go on."""
        self._standings.forget(peer)

    def judge(self) -> Verdict | None:
        return self._standings.hang(self._timeout_s) if self._timeout_s else None

    def with_cause(self, verdict: Verdict) -> Verdict:
        """One that failed, or was ended by its watchdog, may have waited for another in vain."""
        return replace(verdict, behind=self._standings.behind(verdict.peer))

    def leave_stacks(self, verdict: Verdict) -> None:
        """The last word of this rank, and of a silent one of its node."""
        self._stacks.dump(f"{HEADWAY.standing().place}; {verdict}")
        first_here = self._world.rank - self._world.local_rank
        speaker = 1 if verdict.peer.rank == first_here else 0
        if verdict.why == "silent" and self._world.local_rank == speaker:
            found = self._stacks.describe(verdict.peer)
            if found is not None:
                os.write(2, f"{found}\n".encode())

    def close(self) -> None:
        self._stacks.close()
