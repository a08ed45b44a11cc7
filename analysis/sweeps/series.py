"""Points in panels, lines and places: what stands in one panel (facet), on one line (hue) and at
one x, over seeds. No matplotlib.

At one place stands one point of each seed, alike in all variables. What differs in something that
is neither x, hue nor facet is
refused: its mean would say nothing. Shapes that only change tokens and channels with each other are
one width, and count as one.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from analysis.points import VARIABLES, Point
from analysis.sweeps.statistics import Facts, kendall, optimum
from data_prep.errors import UserError
from data_prep.settings import nearest

Value = str | float | None
Names = tuple[str, ...]
NORMAL, PERMUTED = "normal", "RP"
KINDS = {"mlp": "MLP", "mixer": "MLP-Mixer", "smixer": "S-Mixer", "sw_mlp": "SW-MLP"}
WIDTHS = ("width", "hidden_width")
OF_SHAPES = (
    "tokens",
    "channels",
    "log_cs",
    "patch_size",
    "model",
    "parameters",
    "multiply_adds",
    "compute",
)
"""In which mirrored shapes differ."""
LENGTHS = {"epochs", "compute", "samples", "step"}


def _mixing(point: Point) -> str | None:
    if point.permuted_blocks is None:
        return None
    named = {0: NORMAL, point.depth: PERMUTED}
    return named.get(
        point.permuted_blocks, f"{PERMUTED} in {point.permuted_blocks} of {point.depth}"
    )


DERIVED: Mapping[str, Callable[[Point], Value]] = {
    "kind": lambda point: KINDS.get(point.kind or "", point.model),
    "mixing": _mixing,
    "log_cs": lambda point: (
        math.log(point.channels / point.tokens) if point.channels and point.tokens else None
    ),
    "log2_omega": lambda point: (
        None if point.omega is None else float(round(math.log2(point.omega)))
    ),
    "epochs": lambda point: None if point.epochs is None else round(point.epochs, 1),
    "augmented": lambda point: (
        None if point.augmented is None else "+ DA" if point.augmented else "no DA"
    ),
}
"""Of VARIABLES those that are no column as it is."""


@dataclass(frozen=True)
class By:
    """What makes panels, lines and places."""

    x: str
    """"" where there is one place alone."""
    hue: Names = ()
    facet: Names = ()
    task: str | None = None

    @property
    def names(self) -> Names:
        return (*filter(None, [self.x]), *self.hue, *self.facet)


@dataclass(frozen=True)
class Place:
    """At one x of one line: the error of each seed."""

    facet: str
    hue: str
    x: Value
    points: Mapping[Any, Sequence[Point]]
    """By seed; several are mirrored shapes."""
    minus_normal: Mapping[Any, float] = field(default_factory=dict)
    """What permuting at random changes, by seed: the error less the normal one's of the same
    seed."""

    @property
    def first(self) -> Point:
        return next(iter(self.points.values()))[0]

    @property
    def errors(self) -> dict[Any, float]:
        return {
            seed: fmean(point.error or 0.0 for point in points)
            for seed, points in self.points.items()
        }

    @property
    def mean(self) -> float:
        return fmean(self.errors.values())

    @property
    def binomial(self) -> float | None:
        """Of a mean over seeds as of one of them: they share their test pictures."""
        return (
            math.sqrt(self.mean * (1 - self.mean) / self.first.num_test)
            if self.first.num_test
            else None
        )

    @property
    def row(self) -> Facts:
        differences = [*self.minus_normal.values()]
        return {
            "facet": self.facet,
            "hue": self.hue,
            "x": self.x,
            "error_mean": self.mean,
            "error_sd": sd(self.errors.values()),
            "binomial_se": self.binomial,
            "num_seeds": len(self.points),
            "num_test": self.first.num_test,
            "errors": [*self.errors.values()],
            "minus_normal_mean": fmean(differences) if differences else None,
            "minus_normal_sd": sd(differences),
            "minus_normal": differences or None,
        }


def sd(values: Iterable[float]) -> float | None:
    found = [*values]
    return stdev(found) if len(found) > 1 else None


def value_of(point: Point, name: str) -> Value:
    """A column, or what follows from columns; else what an axis of its plan calls it, a number
    where the word is one."""
    if name in VARIABLES:
        return DERIVED[name](point) if name in DERIVED else getattr(point, name)
    word = point.label_of.get(name)
    try:
        return None if word is None else float(word)
    except ValueError:
        return word


def places_of(points: Sequence[Point], by: By) -> list[Place]:
    """Of those of the task that have an error; of a run the last, unless its lengths are told
    apart."""
    found = [point for point in points if point.error is not None and by.task in (None, point.task)]
    if not found:
        tasks = ", ".join(sorted({point.task for point in points}))
        raise UserError(
            "no point has an"
            f" accuracy{f' of task {by.task}; there are {tasks}' if by.task and tasks else ''}"
        )
    if not LENGTHS & set(by.names):
        last = {
            point.run: point.step or 0 for point in sorted(found, key=lambda point: point.step or 0)
        }
        found = [point for point in found if (point.step or 0) == last[point.run]]
    places = grouped(found, by)
    normal = {
        _beside(place, by): place.errors for place in places if _mixing(place.first) == NORMAL
    }

    def with_difference(place: Place) -> Place:
        beside = (
            normal.get(_beside(place, by), {}) if _mixing(place.first) not in (NORMAL, None) else {}
        )
        return replace(
            place,
            minus_normal={
                seed: e - beside[seed] for seed, e in place.errors.items() if seed in beside
            },
        )

    return [with_difference(place) for place in places]


def _beside(place: Place, by: By) -> tuple[Value, ...]:
    """What a place and the normal one that it is compared with have in common: all but `mixing`,
    where that makes lines or panels; else, x being what is permuted, all variables."""
    groups = [value_of(place.first, name) for name in (*by.hue, *by.facet) if name != "mixing"]
    if "mixing" in (*by.hue, *by.facet):
        return (*groups, place.x)
    return (
        *groups,
        *(value_of(place.first, name) for name in VARIABLES if name not in ("mixing", "model")),
    )


def grouped(points: Sequence[Point], by: By) -> list[Place]:
    """In the order in which panels and lines first appear, and of x where it is a number."""
    axes = sorted(set().union(*(point.label_of for point in points)))
    for name in by.names:
        if name not in axes and name not in VARIABLES:
            raise UserError(
                f"{name}: no variable, and no axis of these plans;"
                f" {nearest(name, [*axes, *VARIABLES])}"
            )
    groups: dict[tuple[Any, Any, Any], list[Point]] = defaultdict(list)
    for point in points:
        x = value_of(point, by.x) if by.x else None
        if x is not None or not by.x:
            facet, hue = (
                tuple(value_of(point, name) for name in names) for names in (by.facet, by.hue)
            )
            groups[facet, hue, x].append(point)
    if not groups:
        raise UserError(f"{by.x}: no point has it; name another x")
    facets, hues, xs = (list(dict.fromkeys(each)) for each in zip(*groups, strict=True))
    if all(isinstance(x, int | float) for x in xs):
        xs.sort()
    order = sorted(
        groups, key=lambda place: (facets.index(place[0]), hues.index(place[1]), xs.index(place[2]))
    )
    for place in order:
        _refuse_mixed(groups[place], by, axes, where=f" ({by.x} {place[2]})" if by.x else "")
    return [
        Place(in_words(facet, by.facet), in_words(hue, by.hue), x, _by_seed(groups[facet, hue, x]))
        for facet, hue, x in order
    ]


def _by_seed(points: Iterable[Point]) -> Mapping[Any, Sequence[Point]]:
    found: dict[Any, list[Point]] = defaultdict(list)
    for point in points:
        found[point.seed, point.own_seed].append(point)
    return found


def _refuse_mixed(points: Sequence[Point], by: By, axes: Sequence[str], *, where: str) -> None:
    first, is_width = points[0], by.x in WIDTHS
    results = {
        (point.target_hash or point.target, point.task): f"{point.target} ({point.task})"
        for point in points
    }
    if len(results) > 1:
        words = " and ".join(sorted(results.values()))
        raise UserError(
            f"at one place stand results on {words}; give a facet or a hue `target`, or one task"
        )
    seen = dict[Any, Point]()
    for point in points:
        own = (point.seed, point.own_seed, *((point.tokens, point.channels) if is_width else ()))
        alike = seen.get(own, first)
        differ = [name for name in VARIABLES if value_of(alike, name) != value_of(point, name)]
        if own in seen or set(differ) - set(OF_SHAPES if is_width else ()):
            words = (
                f"{alike.run} and {point.run} stand at one"
                f" place{' of one seed' if own in seen else ''}{where}"
            )
            if own in seen:  # an axis names it better
                differ = [
                    name
                    for name in axes
                    if name != "name" and value_of(alike, name) != value_of(point, name)
                ] + differ
            words += f"; they differ in {', '.join(dict.fromkeys(differ)) or 'no variable'}"
            raise UserError(f"{words}: make that a hue or a facet")
        seen[own] = point


def in_words(values: Sequence[Value], names: Names) -> str:
    """Of a line or a panel."""
    found = []
    for value, name in zip(values, names, strict=True):
        if name == "log2_omega" and value is not None:
            found.append(f"Ω = 2^{value:.0f}")
        elif value is not None:
            found.append(
                f"{TITLES.get(name, name)} {value:g}"
                if isinstance(value, int | float)
                else str(value)
            )
    return ", ".join(found)


TITLES = {
    "width": "width m",
    "hidden_width": "greatest width gamma m",
    "density": "density p",
    "channels": "channels C",
    "tokens": "tokens S",
    "log_cs": "ln(C / S)",
    "log2_omega": "log2 Ω",
    "depth": "depth L",
    "patch_size": "patch size P (px)",
    "global_batch_size": "batch size",
    "images": "training pictures N",
    "compute": "compute C (3 multiply-adds x samples)",
    "parameters": "parameters P",
}


def facts_of(places: Sequence[Place], by: By) -> Facts:
    """Of each line Kendall's tau of the means against the width, the optimum of all seeds against
    log C/S; of all the pairs."""
    lines: list[Facts] = []
    for facet, hue in dict.fromkeys((place.facet, place.hue) for place in places):
        own = [place for place in places if (place.facet, place.hue) == (facet, hue)]
        xs: list[Any] = [place.x for place in own]
        pairs = [
            (x, error) for x, place in zip(xs, own, strict=True) for error in place.errors.values()
        ]
        line: Facts = {
            "facet": facet,
            "hue": hue,
            "name": ", ".join(filter(None, [facet, hue])) or "all",
        }
        line["kendall"] = kendall(xs, [place.mean for place in own]) if by.x in WIDTHS else None
        line["optimum"] = optimum(*zip(*pairs, strict=True)) if by.x == "log_cs" else None
        lines.append(line)
    changes = [value for place in places for value in place.minus_normal.values()]
    whole = (
        {"pairs": len(changes), "mean": fmean(changes), "lower": sum(each < 0 for each in changes)}
        if changes
        else None
    )
    return {**asdict(by), "lines": lines, "rp_minus_normal": whole}


def said_of(facts: Facts) -> list[str]:
    """The facts, a line each."""
    said = []
    for line in facts["lines"]:
        if found := line["kendall"]:
            said.append(
                f"{line['name']}: Kendall's tau {found['tau']:.2f} over {found['num']} widths,"
                f" exact p {found['p']:.2g}"
            )
        if found := line["optimum"]:
            between = f"{found['at']:.2f} [{found['low']:.2f}, {found['high']:.2f}] of ln(C / S)"
            said.append(
                f"{line['name']}: least error at {between}; 0 is"
                f" {'inside' if found['has_zero'] else 'outside'}"
            )
    if found := facts["rp_minus_normal"]:
        mean, pairs = f"{100 * found['mean']:+.2f} points", f"{found['pairs']} pairs of a seed"
        said.append(f"RP - normal: {mean} over {pairs}, {found['lower']} of them lower")
    return said
