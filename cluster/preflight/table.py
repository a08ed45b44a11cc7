"""What rank 0 prints: a line for each node (its worst rank), then each trouble in a line of its own."""

from collections.abc import Callable, Iterable, Sequence

from cluster.preflight import figures as kinds
from cluster.preflight.figures import Disk, Figures
from cluster.preflight.judgement import Judgement

MAX_LINES = 16
"""Of more nodes the sound ones share a line."""
NOTHING = "-"


def report(
    found: Sequence[Figures],
    history: Sequence[Figures],
    judgement: Judgement,
    *,
    homeless: Sequence[int],
    took_s: float,
) -> list[str]:
    nodes: dict[str, list[Figures]] = {}
    for figures in found:
        nodes.setdefault(figures.node, []).append(figures)
    known = {figures.node for figures in history} - nodes.keys()
    title = f"preflight: {_count(len(nodes), 'node')}, {_count(len(found) + len(homeless), 'rank')}, {took_s:.0f} s"
    if judgement.shares:
        title += "; percent: of the median of the other nodes"
        title += f", {_count(len(known), 'more node')} of earlier jobs included" if known else ""
    lines = [title]
    lines += _aligned([_HEAD, *_rows(nodes, judgement)])
    world = [figures.world_gb_per_s for figures in found if figures.world_gb_per_s]
    if world:
        lines.append(f"preflight: all_reduce of all {_count(len(found), 'rank')}: {min(world):.3g} GB/s")
    lines += [f"preflight: warning: {text}" for text in judgement.common]
    lines += [f"preflight: warning: {node}: {text}" for node, texts in judgement.warnings.items() for text in texts]
    if homeless:
        ranks = ", ".join(str(rank) for rank in homeless)
        lines.append(f"preflight: warning: never came, from nobody knows which node: rank {ranks}")
    lines += [f"preflight: {node} is bad: {'; '.join(texts)}" for node, texts in judgement.bad.items()]
    return lines


_HEAD = (
    "node",
    "device",
    "matmul TFLOP/s",
    "within node GB/s",
    "between nodes GB/s",
    "scratch MB/s",
    "GB free",
    "shared MB/s",
    "GB free",
    "clock ms",
    "verdict",
)


def _rows(nodes: dict[str, list[Figures]], judgement: Judgement) -> list[tuple[str, ...]]:
    said = judgement.bad.keys() | judgement.warnings.keys()
    in_full = [node for node in nodes if len(nodes) <= MAX_LINES or node in said]
    rows = [(node, *_cells([nodes[node]], judgement), _verdict(judgement, node)) for node in in_full]
    rest = [node for node in nodes if node not in in_full]
    if rest:
        rows.append(
            (f"{len(rest)} others", *_cells([nodes[node] for node in rest], judgement), _verdict(judgement, *rest))
        )
    return rows


def _verdict(judgement: Judgement, *nodes: str) -> str:
    if judgement.bad.keys() & set(nodes):
        return "bad"
    return "warning" if (judgement.warnings.keys() | judgement.in_common) & set(nodes) else "sound"


def _cells(nodes: Sequence[Sequence[Figures]], judgement: Judgement) -> list[str]:
    """Of several nodes, from the lowest to the highest."""
    devices = list(dict.fromkeys(figures.device for ranks in nodes for figures in ranks if figures.device))
    rates = (
        (kinds.MATMUL, lambda figures: figures.matmul_tflops),
        (kinds.NODE_RATE, lambda figures: figures.node_gb_per_s),
        (kinds.LINK_RATE, lambda figures: figures.best_link),
    )
    cells = [", ".join(devices) or NOTHING]
    for kind, of in rates:
        shares = [judgement.shares[key] for ranks in nodes if (key := (ranks[0].node, kind)) in judgement.shares]
        share = f" {_span(shares, '{:.0%}'.format)}" if shares else ""
        cells.append(_span(_worst(nodes, of), _number) + share)
    for disks in ([[ranks[0].scratch] for ranks in nodes], [ranks[0].shared for ranks in nodes]):
        cells += [_span(_least(disks, name), _number) for name in ("write_mb_per_s", "free_gb")]
    cells.append(_span([1000 * ranks[0].clock_s for ranks in nodes if ranks[0].clock_s is not None], _whole))
    return cells


def _worst(nodes: Sequence[Sequence[Figures]], of: Callable[[Figures], float | None]) -> list[float]:
    known = [[value for figures in ranks if (value := of(figures)) is not None] for ranks in nodes]
    return [min(values) for values in known if values]


def _least(disks: Iterable[Iterable[Disk | None]], name: str) -> list[float]:
    known = [[value for disk in of_node if (value := getattr(disk, name, None)) is not None] for of_node in disks]
    return [min(values) for values in known if values]


def _span(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return NOTHING
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{round(value):,}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Without the columns in which nobody has anything."""
    columns = [column for column in zip(*rows, strict=True) if any(cell != NOTHING for cell in column[1:])]
    widths = [max(len(cell) for cell in column) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
