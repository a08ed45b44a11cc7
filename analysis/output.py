"""The result of a command of `analysis`, and functions that print and save it.

`--out NAME` names all files:

NAME.parquet              measured values
NAME-results.parquet      the results table of a plan
NAME.png, NAME.svg        the figure (no SVG of image sheets); NAME-SUFFIX.png if there are several
NAME.md                   a page of tables (some commands)
NAME.json                 facts, sha256 of all inputs, commit, names of the other files; written
                          last, so a result with this file is complete

`write` first removes the figures of an earlier result with the same name.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.local_copy import local_copy
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.publish import (
    atomic_file,
    hash_of_json,
    make_directory,
    sha256_of,
    write_atomic,
    write_json,
)
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import CONFIG_FILE, RESULT
from pretrain.tracking.run_tags import git_commit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from PIL.Image import Image
    from rich.table import Table

FIGURES = (".png", ".svg")


@dataclass(frozen=True)
class Result:
    rows: "DataFrame | None" = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    figures: "Mapping[str, Figure | Image]" = field(default_factory=dict)
    """Figures by name suffix. A figure is saved as NAME-SUFFIX, or as NAME if the suffix is
    empty."""
    inputs: Sequence[Path | str] = ()
    """Datasets, runs and checkpoints to hash, in addition to the option `points`."""
    printed: "Sequence[str | DataFrame]" = ()
    page: str = ""
    results: "DataFrame | None" = None
    """The results table of a plan's figure."""


def show(result: Result) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    for each in result.printed:
        if isinstance(each, str):
            console.print(each, soft_wrap=True)
        else:
            console.print(_table_of(each))


def _table_of(frame: "DataFrame") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in frame:
        is_text = frame[name].map(lambda value: isinstance(value, str)).any()
        table.add_column(str(name), justify="left" if is_text else "right")
    for row in frame.itertuples(index=False):
        table.add_row(*map(_words, row))
    return table


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def write(result: Result, out: Path, inputs: Sequence[Path | str] = ()) -> list[Path]:
    make_directory(out.absolute().parent)
    remove_figures(out)
    facts_path = out.with_name(f"{out.name}.json")
    files = list[Path]()
    for which, rows in (("", result.rows), ("-results", result.results)):
        if rows is not None and len(rows):
            files.append(out.with_name(f"{out.name}{which}.parquet"))
            with atomic_file(files[-1]) as file:
                rows.to_parquet(file, compression="zstd", index=False)
    if result.page:
        files.append(out.with_name(f"{out.name}.md"))
        write_atomic(files[-1], result.page.encode())
    for which, figure in result.figures.items():
        files += _write_figure(figure, out.with_name("-".join(filter(None, (out.name, which)))))
    facts = {
        **result.facts,
        "inputs": {str(place): hash_of(place) for place in (*inputs, *result.inputs)},
        "files": [path.name for path in files],
        "commit": git_commit(),
    }
    text = json.dumps(facts, default=float)
    write_json(facts_path, json.loads(text, parse_constant=lambda _: None))  # no NaN in JSON
    return [*files, facts_path]


def remove_figures(out: Path) -> None:
    """Remove NAME.json and the figures that it lists."""
    facts = out.with_name(f"{out.name}.json")
    with suppress(FileNotFoundError, ValueError, AttributeError):
        for name in json.loads(facts.read_bytes()).get("files", ()):
            if name == Path(name).name and name.startswith(out.name) and name.endswith(FIGURES):
                out.with_name(name).unlink(missing_ok=True)
    facts.unlink(missing_ok=True)


def _write_figure(figure: "Figure | Image", path: Path) -> list[Path]:
    from matplotlib import rc_context
    from PIL.Image import Image

    from data_prep.images.sheet import save_sheet
    from finetune.looks import looks, save

    if isinstance(figure, Image):
        save_sheet(figure, sheet := path.with_name(f"{path.name}.png"))
        return [sheet]
    files = [path.with_name(f"{path.name}{ending}") for ending in FIGURES]
    for file in files:
        # matplotlib resolves numbered colors and ticks like 10^3 when it saves
        with looks(), rc_context({"text.parse_math": True}):
            save(figure, file)
    return files


def mark(number: int) -> dict[str, Any]:
    from finetune.looks import COLORS, MARKERS

    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def draw_band(axes: "Axes", x: Any, low: Any, middle: Any, high: Any, **style: Any) -> None:
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(x, middle, **style)


def draw_legend(figure: "Figure", axes: "Sequence[Axes]") -> None:
    """Draw one common legend below all `axes`, and enlarge the figure by the legend."""
    handles = {
        label: handle
        for each in axes
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    if handles:
        width, height = figure.get_size_inches()
        columns = max(1, int(width * 17 / (8 + max(map(len, handles)))))
        legend = figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
        box = legend.get_window_extent()
        width = max(width, box.width / figure.dpi)
        figure.set_size_inches(width, height + box.height / figure.dpi)


def hash_of(place: Path | str) -> str:
    """Return the content hash of a file, dataset, checkpoint or run. URLs, RUN@50epochs and
    hf-hub:NAME are allowed."""
    path = local_copy(place, storage=None)
    if path.is_file():
        return sha256_of(path)
    if (path / MANIFEST_NAME).exists():
        return load_manifest(path).hash
    parts = [sha256_of(path / name) for name in (CONFIG_FILE, RESULT) if (path / name).exists()]
    weights = [found.sha256] if (found := Checkpoint.found(str(place))) else []
    return weights[0] if weights and not parts else hash_of_json([*parts, *weights])
