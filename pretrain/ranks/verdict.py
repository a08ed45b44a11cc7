"""Why training ends: what the heartbeat finds, tells all ranks, and says in one line; and which rank was behind then."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pretrain.ranks.headway import Standing
from pretrain.ranks.heartbeat_wire import Message, Peer

Why = Literal["gone", "silent", "failed", "hangs", "waits"]
BEHIND_S = 20.0
"""A rank that stood still for less, when another failed, is not said to be behind: it may just have waited for that one."""
_MOST_NAMED = 3
_CONFIRMATIONS = 2


@dataclass(frozen=True)
class Verdict:
    peer: Peer
    why: Why
    detail: str = ""
    behind: str = ""
    """Who was, if the fault may be theirs and not the peer's."""

    def __str__(self) -> str:
        what = {
            "gone": "is gone",
            "silent": f"was not heard of for {self.detail} s (frozen, or its node is lost)",
            "failed": f"has failed ({self.detail})",
            "hangs": self.detail,
            "waits": "waits for data, and all were told to stop",
        }[self.why]
        behind = f"; {self.behind}" if self.behind else ""
        return f"{self.peer} {what}{behind}; the run stops; the same command goes on with it"

    @property
    def wants_stacks(self) -> bool:
        """A rank that died or failed by itself has said why; the others' stacks would tell nothing."""
        return self.why in ("silent", "hangs") or bool(self.behind)

    def as_message(self) -> Message:
        return self.peer.as_message() | {"verdict": self.why, "detail": self.detail, "behind": self.behind}

    @staticmethod
    def of(message: Message) -> "Verdict":
        return Verdict(Peer.of(message), message["verdict"], str(message["detail"]), str(message["behind"]))


@dataclass
class Standings:
    """Where each rank stood at its last beat, as the first rank knows it."""

    _known: dict[int, tuple[Peer, Standing]] = field(default_factory=dict)
    _num_noted: Counter[int] = field(default_factory=Counter)
    _suspects: dict[int, tuple[int, int]] = field(default_factory=dict)
    """rank -> (number of its mark, how often it was noted by then); of those that may hang."""

    def note(self, peer: Peer, standing: Standing) -> None:
        self._known[peer.rank] = peer, standing
        self._num_noted[peer.rank] += 1

    def forget(self, peer: Peer) -> None:
        self._known.pop(peer.rank, None)

    def hang(self, timeout_s: float) -> Verdict | None:
        """When nobody of those that are behind, and so hold the others up, has got on for so long. Each of them must have said so
        twice since that was first seen: those that have waited for another for as long are behind, too, for the moment between its
        word that it has come and theirs that they go on."""
        known = list(self._known.values())
        last = _behind(known)
        if any(standing.stalled_s <= timeout_s for _, standing in last):
            last = []
        before, numbers = self._suspects, {peer.rank: standing.number for peer, standing in last}
        if {rank: number for rank, (number, _) in before.items()} != numbers:
            self._suspects = {rank: (number, self._num_noted[rank]) for rank, number in numbers.items()}
            return None
        if not last or any(self._num_noted[rank] < count + _CONFIRMATIONS for rank, (_, count) in before.items()):
            return None
        others = [standing for _, standing in known if standing.number > last[0][1].number]
        where = f"; {_in_words(others)}" if others else ""
        return Verdict(last[0][0], "hangs", f"{_what(last)}{where}")

    def behind(self, peer: Peer) -> str:
        """Who held the others up, when this peer failed or went; nothing if it did so itself, or nobody did."""
        last = _behind(list(self._known.values()))
        ranks = {each.rank for each, _ in last}
        if not ranks or peer.rank in ranks or len(ranks) == len(self._known) or last[0][1].stalled_s < BEHIND_S:
            return ""
        return f"{last[0][0]} {_what(last)}"


def _behind(known: list[tuple[Peer, Standing]]) -> list[tuple[Peer, Standing]]:
    """Those with the fewest marks; the one that has stood there for longest comes first."""
    fewest = min((standing.number for _, standing in known), default=0)
    found = [each for each in known if each[1].number == fewest]
    return sorted(found, key=lambda each: (-each[1].stalled_s, each[0].rank))


def _what(last: list[tuple[Peer, Standing]]) -> str:
    standing = last[0][1]
    said = f"has made no headway for {standing.stalled_s:,.0f} s, {standing.place}"
    more = [str(peer.rank) for peer, _ in last[1:]]
    if not more:
        return said
    if len(more) > _MOST_NAMED:
        return f"{said}, like {len(more)} others"
    return f"{said}, like rank{'s' if len(more) > 1 else ''} {', '.join(more)}"


def _in_words(others: list[Standing]) -> str:
    place, _ = Counter(standing.place for standing in others).most_common(1)[0]
    if len(others) == 1:
        return f"the other rank is {place}"
    return f"{len(others)} others are further, such as {place}"


def may_be_others_fault(error: BaseException) -> bool:
    """A collective whose partner is gone raises RuntimeError, or a subclass of torch.distributed's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, RuntimeError) and not names & {"OutOfMemoryError", "NotImplementedError", "RecursionError"}
