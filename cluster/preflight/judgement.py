"""Who is bad: a pure function of what all ranks found and of the fleet's history.

A node is named for what is wrong in itself, or for falling behind the median of the *other* nodes: its own figure, today's or an
earlier one, never counts. What most nodes have is not the nodes' fault, and names nobody.
"""

import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from cluster.preflight import figures as kinds
from cluster.preflight.figures import Figures

MIN_MATMUL_SHARE = 0.8
"""Of the median. GPUs of one model differ by a few percent; a throttled one, or one shared with a forgotten process, far more."""
MIN_LINK_SHARE = 0.5
"""Of the median. Links share switches, so a good one may be at two thirds; a failed rail or a fall-back to TCP is below a half."""
MIN_NODES = 3
"""That must be known before rates are judged, the judged one included: of two, either may be the exception."""
MIN_FREE_GB = 1.0
"""In the scratch directory: compiled kernels take some hundred MB, and a disk that full is rarely ours alone."""
WARN_CLOCK_S, MAX_CLOCK_S = 2.0, 60.0
"""Away from the median. From seconds on, file times and logs of different nodes mislead; at minutes TLS and S3 refuse requests."""
COMMON_SHARE = 2 / 3
"""Of the nodes. What so many have comes from outside: a full shared disk, a wrong setting, the installation."""
FEW_SHARE = 1 / 4
"""Of the nodes. A shared directory that fails or stalls on fewer (or on one) is these nodes' mount; on more, it is the server."""

_CERTAIN = {
    kinds.GPUS,
    kinds.NO_GPU,
    kinds.GPU_ERROR,
    kinds.WRONG_PRODUCT,
    kinds.SILENT,
    kinds.DIED,
    kinds.SCRATCH,
    kinds.NODE_LINK,
    kinds.MATMUL,
    kinds.NODE_RATE,
    kinds.LINK_RATE,
}
"""What names the node of a job with one node, where nothing can be compared. The rest may be settings or the installation.

Nodes whose GPUs nobody sees are named however many they are, for the training would begin on their CPUs."""
_OFTEN_THE_SITE = {kinds.MATMUL, kinds.NODE_RATE, kinds.LINK_RATE, kinds.NODE_LINK}
"""Of these, what can also be a setting of the site (a cap on power, a wrong interface): the node of a job with one node is not
named for it if another one was before, or the job would go through all nodes of the site."""


@dataclass(frozen=True)
class Finding:
    node: str
    kind: str
    text: str
    condemns: bool = True
    """False: no more than a warning, whatever the other nodes have."""


@dataclass
class Judgement:
    """What is said of each node (of nodes without a word nothing is), and shares of the median for the table."""

    bad: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    """Troubles of most nodes."""
    in_common: set[str] = field(default_factory=set)
    """The nodes that have them."""
    shares: dict[tuple[str, str], float] = field(default_factory=dict)
    """(node, kind of rate): its worst rank's share of the median over the other nodes, where enough are known."""


def judge(
    found: Sequence[Figures], history: Sequence[Figures], *, named: Set[str] = frozenset(), is_part: bool = False
) -> Judgement:
    """`found`: of all ranks of this job whose node is known; `history`: the newest of each (node, local rank) from earlier jobs;
    `named`: the bad nodes of earlier starts of this job; `is_part`: it has not all GPUs of its nodes, and pairs of
    GPUs differ by what lies between them."""
    judgement = Judgement()
    nodes = list(dict.fromkeys(figures.node for figures in found))
    findings = [*_faults(found), *_space(found), *_clocks(found), *dict.fromkeys(_lost_links(found))]
    for rate in _RATES:
        findings += _slow(rate, found=found, history=history, judgement=judgement)
    certain = _certain(found=dict.fromkeys(finding.kind for finding in findings), was_another=bool(named - set(nodes)))
    findings = [replace(f, condemns=f.condemns and not (is_part and f.kind == kinds.NODE_RATE)) for f in findings]
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        troubled = list(dict.fromkeys(finding.node for finding in same))
        is_certain = kind == kinds.NO_GPU or (len(nodes) == 1 and kind in certain)
        if len(troubled) >= COMMON_SHARE * len(nodes) and not is_certain:
            judgement.common.append(_common(same, troubled=len(troubled), nodes=len(nodes)))
            judgement.in_common |= set(troubled)
            continue
        few = len(troubled) == 1 or len(troubled) < FEW_SHARE * len(nodes)
        for finding in same:
            condemned = finding.condemns and (few or not kind.startswith(kinds.SHARED))
            (judgement.bad if condemned else judgement.warnings).setdefault(finding.node, []).append(finding.text)
    return judgement


def _certain(*, found: Container[str], was_another: bool) -> Set[str]:
    """What names the node of a job with one node."""
    certain = _CERTAIN - _OFTEN_THE_SITE if was_another else _CERTAIN
    return certain - {kinds.NODE_LINK} if kinds.INTERFACE in found else certain


def _common(same: Sequence[Finding], *, troubled: int, nodes: int) -> str:
    if nodes == 1:
        return f"{same[0].node}: {same[0].text} (a job of one node cannot tell whether that is the node's fault)"
    return f"{troubled} of {nodes} nodes have this, so it is not a node's fault: {same[0].text} ({same[0].node})"


def gone_nodes(found: Sequence[Figures]) -> set[str]:
    """Those with a rank that never came, hung or ended: whoever needs them waits in vain."""
    gone = (kinds.ABSENT, kinds.SILENT, kinds.DIED)
    return {figures.node for figures in found if any(fault.kind in gone for fault in figures.faults)}


# ---- what is wrong by itself -----------------------------------------------------------------------------------------


def _faults(found: Sequence[Figures]) -> Iterable[Finding]:
    """The ranks of a node often have the same to say."""
    said = [
        Finding(figures.node, fault.kind, fault.text, condemns=fault.kind != kinds.UNCHECKED)
        for figures in found
        for fault in figures.faults
    ]
    return dict.fromkeys(said)


def _space(found: Sequence[Figures]) -> Iterable[Finding]:
    for figures in found:
        scratch = [(figures.scratch, kinds.SCRATCH)] if figures.scratch else []
        for disk, kind in [*scratch, *((disk, f"{kinds.SHARED} {disk.path} full") for disk in figures.shared)]:
            if disk.free_gb is not None and disk.free_gb < MIN_FREE_GB:
                text = f"{disk.path} has {disk.free_gb:.2g} GB free (threshold {MIN_FREE_GB:g} GB)"
                yield Finding(figures.node, kind, text, condemns=kind == kinds.SCRATCH)


def _clocks(found: Sequence[Figures]) -> Iterable[Finding]:
    clocks = {figures.node: figures.clock_s for figures in reversed(found) if figures.clock_s is not None}
    middle_s = statistics.median(clocks.values()) if len(clocks) >= MIN_NODES else 0.0
    against = "the median of the nodes" if len(clocks) >= MIN_NODES else "rank 0's"
    for node, clock_s in clocks.items():
        away_s = clock_s - middle_s
        if abs(away_s) > WARN_CLOCK_S:
            is_far = abs(away_s) > MAX_CLOCK_S
            text = (
                f"its clock is {abs(away_s):,.1f} s {'ahead of' if away_s > 0 else 'behind'} {against} "
                f"(threshold {MAX_CLOCK_S if is_far else WARN_CLOCK_S:g} s)"
            )
            yield Finding(node, kinds.CLOCK, text, condemns=is_far and len(clocks) >= MIN_NODES)


def _lost_links(found: Sequence[Figures]) -> Iterable[Finding]:
    """A node without any link is named; of two that only cannot reach each other, either may be the cause. That one is gone is
    said of it alone, not of its neighbours."""
    gone = gone_nodes(found)
    remaining = [
        replace(f, link_gb_per_s={node: rate for node, rate in f.link_gb_per_s.items() if node not in gone})
        for f in found
        if f.node not in gone
    ]
    cut_off = {figures.node for figures in remaining if figures.best_link == 0}
    of_rank = {f.rank: tuple(node for node, rate in f.link_gb_per_s.items() if rate == 0) for f in remaining}
    for figures in remaining:
        lost = of_rank[figures.rank]
        is_whole = (
            len({of_rank[other.rank] for other in remaining if other.node == figures.node and other.link_gb_per_s}) == 1
        )
        who = "" if is_whole else f" of local rank {figures.local_rank}"
        if figures.node in cut_off and lost:
            yield Finding(figures.node, kinds.LINK, f"no connection{who} with {' and '.join(lost)}")
        elif unexplained := [node for node in lost if node not in cut_off]:
            text = f"no connection{who} with {' and '.join(unexplained)}, but with its other neighbour"
            yield Finding(figures.node, kinds.ONE_LINK, text, condemns=False)


# ---- what falls behind -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rate:
    kind: str
    what: str
    unit: str
    of: Callable[[Figures], float | None]
    min_share: float
    alike: Callable[[Figures], object]
    """Figures are compared among ranks of which this is the same."""


_RATES = (
    _Rate(kinds.MATMUL, "matmul", "TFLOP/s", lambda f: f.matmul_tflops, MIN_MATMUL_SHARE, lambda f: f.device),
    _Rate(
        kinds.NODE_RATE,
        "bandwidth within the node",
        "GB/s",
        lambda f: f.node_gb_per_s,
        MIN_LINK_SHARE,
        lambda f: (f.device, f.num_local_ranks),
    ),
    _Rate(
        kinds.LINK_RATE,
        "bandwidth between nodes",
        "GB/s",
        lambda f: f.best_link,
        MIN_LINK_SHARE,
        lambda f: (f.device, f.num_local_ranks),
    ),
)


def _slow(
    rate: _Rate, *, found: Sequence[Figures], history: Sequence[Figures], judgement: Judgement
) -> Iterable[Finding]:
    """The worst rank of each node that falls behind; fills in the shares."""
    today = {(figures.node, figures.local_rank) for figures in found}
    known = [*found, *(figures for figures in history if (figures.node, figures.local_rank) not in today)]
    worst: dict[str, tuple[float, Figures]] = {}
    for figures in found:
        share = _share(rate, figures, known)
        if share is not None and share < worst.get(figures.node, (float("inf"),))[0]:
            worst[figures.node] = share, figures
    judgement.shares |= {(node, rate.kind): share for node, (share, _) in worst.items()}
    slow = {node: figures for node, (share, figures) in worst.items() if share < rate.min_share}
    if rate.kind == kinds.LINK_RATE and len({figures.node for figures in found}) == 2:
        slow = _told_by_history(rate, slow, history)
    for node, figures in slow.items():
        text = (
            f"{rate.what} {rate.of(figures):.3g} {rate.unit}{_of_rank(rate, figures)}, {worst[node][0]:.0%} of the fleet's median "
            f"(threshold {rate.min_share:.0%})"
        )
        yield Finding(node, rate.kind, text, condemns=figures.is_gpu)


def _share(rate: _Rate, figures: Figures, known: Sequence[Figures]) -> float | None:
    """Every other node counts once, with its median rank."""
    value, others = rate.of(figures), dict[str, list[float]]()
    if not value:  # not measured; or no link at all, which is another finding
        return None
    for other in known:
        theirs = rate.of(other)
        if theirs and other.node != figures.node and rate.alike(other) == rate.alike(figures):
            others.setdefault(other.node, []).append(theirs)
    if len(others) + 1 < MIN_NODES:
        return None
    return value / statistics.median(statistics.median(rates) for rates in others.values())


def _told_by_history(rate: _Rate, slow: Mapping[str, Figures], history: Sequence[Figures]) -> dict[str, Figures]:
    """Two nodes have one link. It is that node's fault whose earlier links, with others, were slow, if the other one's were not."""
    shares = [(f.node, share) for f in history if f.node in slow and (share := _share(rate, f, history)) is not None]
    worst = {node: min(share for other, share in shares if other == node) for node, _ in shares}
    was_slow = [node for node, share in worst.items() if share < rate.min_share]
    was_sound = [node for node, share in worst.items() if share >= rate.min_share]
    if len(was_slow) == len(was_sound) == 1:
        return {was_slow[0]: slow[was_slow[0]]}
    return dict(slow)


def _of_rank(rate: _Rate, figures: Figures) -> str:
    is_one_of_many = rate.kind in (kinds.MATMUL, kinds.LINK_RATE) and figures.is_gpu and figures.num_local_ranks > 1
    return f" on GPU {figures.local_rank}" if is_one_of_many else ""
