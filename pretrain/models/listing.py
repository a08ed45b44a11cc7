"""Print `pretrain models`: the named models with their costs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rich.console import Console
from rich.table import Table

from data_prep.errors import UserError
from data_prep.settings import nearest
from pretrain.models.cost import Cost, cost_of, width_and_connections
from pretrain.models.presets import PRESETS, spec_of
from pretrain.models.spec import AnySpec, MixerSpec, SparseMlpSpec

FAMILIES = {
    "mlp": "MLPs of Scaling MLPs",
    "mixer": "Mixers of the Mixer paper (rp: with random permutations)",
    "sw_mlp": "SW-MLPs of the Mixer paper (masked: one MAC for every entry of the matrix)",
    "structured": "Shallow structured MLPs of the Mixer paper",
    "timm": "Baselines of Scaling MLPs, through timm",
}
COLUMNS = ("name", "params", "MACs", "S", "C", "width m", "Omega", "px", "source")


@dataclass(frozen=True)
class ModelRow:
    name: str
    spec: AnySpec
    cost: Cost
    image_size: int

    @property
    def cells(self) -> tuple[str, ...]:
        spec = self.spec
        width, connections = width_and_connections(spec, image_size=self.image_size)
        return (
            self.name,
            f"{self.cost.num_parameters:,}",
            _short(self.cost.multiply_adds),
            f"{spec.tokens(image_size=self.image_size):,}" if isinstance(spec, MixerSpec) else "",
            f"{spec.num_channels:,}" if isinstance(spec, MixerSpec | SparseMlpSpec) else "",
            "" if width is None else f"{width:,}",
            "" if connections is None else _short(connections),
            str(self.image_size),
            PRESETS[self.name].source,
        )


def list_models(
    *, match: str = "*", num_classes: int | None = None, image_size: int | None = None
) -> tuple[list[ModelRow], list[str]]:
    """Return the named models that match a shell pattern, and the names of models that do not
    support this image size. Classes and image size default to the paper's."""
    names = [name for name in PRESETS if fnmatchcase(name, match)]
    if not names:
        raise UserError(
            "--match",
            f"no model is named like {match!r}",
            nearest(match.strip("*?"), list(PRESETS)),
            code="unknown-name",
        )
    found, unfit, reason = [], [], ""
    for name in names:
        preset, spec = PRESETS[name], spec_of(name)
        size, classes = image_size or preset.image_size, num_classes or preset.num_classes
        try:
            found.append(
                ModelRow(name, spec, cost_of(spec, num_classes=classes, image_size=size), size)
            )
        except ValueError as error:
            unfit.append(name)
            reason = str(error)
    if not found:
        raise UserError(
            "--image-size",
            f"no matching model supports {image_size} px ({unfit[-1]}: {reason})",
            "choose another size, or another --match",
            code="bad-value",
        )
    return found, unfit


def print_models(rows: Sequence[ModelRow], unfit: Sequence[str], console: Console) -> None:
    sizes = [
        max(map(len, column)) for column in zip(COLUMNS, *(row.cells for row in rows), strict=True)
    ]
    for family, title in FAMILIES.items():
        members = [row.cells for row in rows if row.spec.kind == family]
        if members:
            console.print(title, style="bold")
            console.print(_table(members, sizes))
            console.print()
    console.print(
        "MACs: one image's forward pass (papers call a MAC a FLOP). Omega: mean number of"
        " connections per layer in the blocks. params: with a head of 1,000 classes (10 for images"
        " up to 32 px), or of --classes (11230 gives the sizes in Scaling MLPs).",
        style="dim",
    )
    if unfit:
        console.print(f"Skipped (image size is not supported): {', '.join(unfit)}.")


def _table(rows: Sequence[Sequence[str]], sizes: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for word, size in zip(COLUMNS, sizes, strict=True):
        table.add_column(
            word,
            justify="left" if word in ("name", "source") else "right",
            min_width=size,
            no_wrap=True,
        )
    for row in rows:
        table.add_row(*row)
    return table


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:#.4g} {unit}"
    return f"{value:#.4g}"


def parse_power(text: str) -> float:
    """Parse a positive number such as 262144, 2.6e8 or 2^18."""
    found = re.fullmatch(r"(\d+)(?:\^|\*\*)(\d{1,3})", text.strip())
    try:
        value = float(int(found[1]) ** int(found[2])) if found else float(text)
    except (ValueError, OverflowError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(
            "--omega",
            f"{text!r} is not a positive number",
            "write it as 262144, 2.6e5 or 2^18",
            code="bad-value",
        )
    return value


def parse_numbers(text: str, *, field: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not re.fullmatch(r"[1-9]\d*", word)]:
        fix = "write numbers with commas between them, e.g. 16,32"
        raise UserError(field, f"{wrong[0]!r} is not valid", fix, code="bad-value")
    return [int(word) for word in words]
