"""Points in panels, lines and places: what stands in one panel (facet), on one line (hue) and at one x, over seeds. No matplotlib.

At one place stands one point of each seed. Two of one seed differ in something that no variable names, and are refused: their mean
would say nothing. Shapes that only change tokens and channels with each other are one width, and count as one there.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, stdev
from typing import Any

from analysis.points import VARIABLES, Point
from analysis.sweeps.statistics import Kendall, Optimum, kendall, optimum
from data_prep.settings import UserError, nearest

Value = str | float | None
Names = tuple[str, ...]
NORMAL, PERMUTED = "normal", "RP"
KINDS = {"mlp": "MLP", "mixer": "MLP-Mixer", "smixer": "S-Mixer", "sw_mlp": "SW-MLP"}
WIDTHS = ("width", "hidden_width")


def _mixing(point: Point) -> str | None:
    if point.permuted_blocks is None:
        return None
    named = {0: NORMAL, point.depth: PERMUTED}
    return named.get(point.permuted_blocks, f"{PERMUTED} in {point.permuted_blocks} of {point.depth}")


DERIVED: Mapping[str, Callable[[Point], Value]] = {
    "kind": lambda point: KINDS.get(point.kind or "", point.model),
    "mixing": _mixing,
    "log_cs": lambda point: math.log(point.channels / point.tokens) if point.channels and point.tokens else None,
    "log2_omega": lambda point: None if point.omega is None else float(round(math.log2(point.omega))),
    "epochs": lambda point: None if point.epochs is None else round(point.epochs, 1),
    "augmented": lambda point: None if point.augmented is None else "+ DA" if point.augmented else "no DA",
}
"""Of VARIABLES those that are no column as it is."""


@dataclass(frozen=True)
class By:
    """What makes panels, lines and places."""

    x: str
    hue: Names = ()
    facet: Names = ()
    task: str | None = None

    @property
    def names(self) -> Names:
        return (self.x, *self.hue, *self.facet)


@dataclass(frozen=True)
class Place:
    """At one x of one line: the error of each seed."""

    facet: tuple[Value, ...]
    hue: tuple[Value, ...]
    x: Value
    points: Mapping[Any, Sequence[Point]]
    """By seed; several are mirrored shapes."""

    @property
    def errors(self) -> dict[Any, float]:
        return {seed: fmean(point.error or 0.0 for point in points) for seed, points in self.points.items()}

    @property
    def mean(self) -> float:
        return fmean(self.errors.values())

    @property
    def sd(self) -> float | None:
        return stdev(self.errors.values()) if len(self.points) > 1 else None

    @property
    def binomial(self) -> float | None:
        """Of a mean over seeds as of one of them: they share their test pictures."""
        num = next(iter(self.points.values()))[0].num_test
        return math.sqrt(self.mean * (1 - self.mean) / num) if num else None


class Reader:
    """The value of a variable at a point: a column, or what follows from columns; else what an axis of its plan calls it, a number
    where the word is one."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.axes = set().union(*(point.label_of for point in points))

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.axes and name not in VARIABLES:
                raise UserError(f"{name}: no variable, and no axis of these plans; {nearest(name, [*self.axes, *VARIABLES])}")

    def __call__(self, point: Point, name: str) -> Value:
        if name not in VARIABLES:
            return _number(point.label_of.get(name))
        value: Value = DERIVED[name](point) if name in DERIVED else getattr(point, name)
        return value

    def all(self, point: Point, names: Names) -> tuple[Value, ...]:
        return tuple(self(point, name) for name in names)


def _number(word: str | None) -> Value:
    try:
        return None if word is None else float(word)
    except ValueError:
        return word


def chosen(points: Sequence[Point], by: By) -> list[Point]:
    """Those of the task that have an error; of a run the last, unless its lengths are told apart."""
    found = [point for point in points if point.error is not None and by.task in (None, point.task)]
    if not found:
        tasks = ", ".join(sorted({point.task for point in points}))
        raise UserError(f"no point has an accuracy{f' of task {by.task}; there are {tasks}' if by.task and tasks else ''}")
    if not {"epochs", "compute", "samples", "step"} & set(by.names):
        last = {point.run: point.step or 0 for point in sorted(found, key=lambda point: point.step or 0)}
        found = [point for point in found if (point.step or 0) == last[point.run]]
    return found


def places_of(points: Sequence[Point], by: By) -> list[Place]:
    """In the order in which panels and lines first appear, and of x where it is a number."""
    read = Reader(points)
    read.check(by.names)
    found = [point for point in chosen(points, by) if read(point, by.x) is not None]
    if not found:
        raise UserError(f"{by.x}: no point has it; name another x")
    groups: dict[tuple[Any, Any, Any], dict[Any, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in found:
        place = read.all(point, by.facet), read.all(point, by.hue), read(point, by.x)
        groups[place][point.seed, point.own_seed].append(point)
    _refuse_mixed(groups, by, read)
    lines = dict.fromkeys((facet, hue) for facet, hue, _ in groups)
    places = [Place(*place, points=seeds) for place, seeds in groups.items()]
    is_number = all(isinstance(place.x, int | float) for place in places)
    orders = [list(dict.fromkeys(line)) for line in zip(*lines, strict=True)]
    xs = sorted({place.x for place in places}) if is_number else list(dict.fromkeys(place.x for place in places))  # type: ignore
    return sorted(places, key=lambda each: (orders[0].index(each.facet), orders[1].index(each.hue), xs.index(each.x)))


def _refuse_mixed(groups: Mapping[tuple[Any, Any, Any], Mapping[Any, list[Point]]], by: By, read: Reader) -> None:
    for place, seeds in groups.items():
        found = [point for points in seeds.values() for point in points]
        targets = {point.target_hash or point.target: f"{point.target} ({point.task})" for point in found}
        if len(targets) > 1:
            words = " and ".join(sorted(targets.values()))
            raise UserError(f"at one place stand results on {words}; give a facet or a hue `target`, or one task")
        for points in seeds.values():
            shapes = {(point.tokens, point.channels) for point in points}
            if len(points) == 1 or (by.x in WIDTHS and len(shapes) == len(points)):
                continue
            first, second = points[:2]
            differ = [
                name
                for name in dict.fromkeys((*sorted(read.axes), *VARIABLES))
                if name != "name" and read(first, name) != read(second, name)
            ]
            words = f"{first.run} and {second.run} stand at one place of one seed ({by.x} {place[2]})"
            raise UserError(f"{words}; they differ in {', '.join(differ) or 'no variable'}: make that a hue or a facet")


@dataclass(frozen=True)
class Line:
    """What one series of one panel shows as a whole."""

    facet: tuple[Value, ...]
    hue: tuple[Value, ...]
    width: Kendall | None = None
    """Of the means against the width."""
    optimum: Optimum | None = None
    """Of all seeds against log C/S."""


def lines_of(places: Sequence[Place], by: By) -> list[Line]:
    found = []
    for facet, hue in dict.fromkeys((place.facet, place.hue) for place in places):
        own = [place for place in places if (place.facet, place.hue) == (facet, hue)]
        xs: list[Any] = [place.x for place in own]
        width = kendall(xs, [place.mean for place in own]) if by.x in WIDTHS else None
        all_x, all_y = [place.x for place in own for _ in place.errors], [y for place in own for y in place.errors.values()]
        least = optimum(all_x, all_y) if by.x == "log_cs" else None  # type: ignore[arg-type]
        found.append(Line(facet, hue, width, least))
    return found


@dataclass(frozen=True)
class Difference:
    """What permuting at random changes, by pairs of one seed: the error of that place less the normal one's."""

    place: Place
    by_seed: Mapping[Any, float]

    @property
    def mean(self) -> float:
        return fmean(self.by_seed.values())

    @property
    def sd(self) -> float | None:
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


def differences(places: Sequence[Place], by: By) -> list[Difference]:
    """Where `mixing` makes lines or panels, at one x; where it goes with x (which blocks are permuted), over x."""
    over_x = "mixing" not in (*by.hue, *by.facet)

    def others(place: Place) -> tuple[Any, ...]:
        pairs = [*zip(by.hue, place.hue, strict=True), *zip(by.facet, place.facet, strict=True)]
        return (*(value for name, value in pairs if name != "mixing"), None if over_x else place.x)

    mixings = [(place, {_mixing(point) for points in place.points.values() for point in points}) for place in places]
    if any(len(each) > 1 for _, each in mixings):
        return []
    normal = {others(place): place.errors for place, each in mixings if each == {NORMAL}}
    found = []
    for place, each in mixings:
        beside = {} if each <= {NORMAL, None} else normal.get(others(place), {})
        if by_seed := {seed: error - beside[seed] for seed, error in place.errors.items() if seed in beside}:
            found.append(Difference(place, by_seed))
    return found


def in_words(values: Sequence[Value], names: Names) -> str:
    """Of a line or a panel."""
    words = [_words(value, name) for value, name in zip(values, names, strict=True) if value is not None]
    return ", ".join(words)


def _words(value: Value, name: str) -> str:
    if name == "log2_omega":
        return f"Ω = 2^{value:.0f}"
    return f"{TITLES.get(name, name)} {value:g}" if isinstance(value, int | float) else str(value)


TITLES = {
    "width": "width m",
    "hidden_width": "greatest width gamma m",
    "density": "density p",
    "channels": "channels C",
    "tokens": "tokens S",
    "log_cs": "ln(C / S)",
    "log2_omega": "log2 Ω",
    "gamma": "gamma",
    "depth": "depth L",
    "patch_size": "patch size P (px)",
    "global_batch_size": "batch size",
    "epochs": "epochs",
    "images": "training pictures N",
    "compute": "compute C (3 multiply-adds x samples)",
    "parameters": "parameters P",
    "model": "model",
}


def rows_of(places: Sequence[Place], by: By) -> list[dict[str, Any]]:
    """A place each, with its difference."""
    against = {id(each.place): each for each in differences(places, by)}
    rows = []
    for place in places:
        pair = against.get(id(place))
        rows.append(
            {
                "facet": in_words(place.facet, by.facet),
                "hue": in_words(place.hue, by.hue),
                "x": place.x,
                "error_mean": place.mean,
                "error_sd": place.sd,
                "binomial_se": place.binomial,
                "num_seeds": len(place.points),
                "num_test": next(iter(place.points.values()))[0].num_test,
                "errors": list(place.errors.values()),
                "minus_normal_mean": pair and pair.mean,
                "minus_normal_sd": pair and pair.sd,
                "minus_normal": list(pair.by_seed.values()) if pair else None,
            }
        )
    return rows


def facts_of(places: Sequence[Place], by: By) -> dict[str, Any]:
    pairs = [value for each in differences(places, by) for value in each.by_seed.values()]
    lines = [
        {
            "facet": in_words(line.facet, by.facet),
            "hue": in_words(line.hue, by.hue),
            "kendall": line.width and asdict(line.width),
            "optimum": line.optimum and asdict(line.optimum),
        }
        for line in lines_of(places, by)
    ]
    whole = {"pairs": len(pairs), "mean": fmean(pairs), "lower": sum(each < 0 for each in pairs)} if pairs else None
    return {**{field.name: getattr(by, field.name) for field in fields(by)}, "lines": lines, "rp_minus_normal": whole}


def said_of(facts: Mapping[str, Any]) -> list[str]:
    """The facts, a line each."""
    said = []
    for line in facts["lines"]:
        name = ", ".join(filter(None, [line["facet"], line["hue"]])) or "all"
        if found := line["kendall"]:
            said.append(f"{name}: Kendall's tau {found['tau']:.2f} over {found['num']} widths, exact p {found['p']:.2g}")
        if found := line["optimum"]:
            zero = "0 is inside" if found["has_zero"] else "0 is outside"
            said.append(f"{name}: least error at {found['at']:.2f} [{found['low']:.2f}, {found['high']:.2f}] of ln(C / S); {zero}")
    if pairs := facts["rp_minus_normal"]:
        said.append(
            f"RP - normal: {100 * pairs['mean']:+.2f} points over {pairs['pairs']} pairs of a seed, {pairs['lower']} of them lower"
        )
    return said
