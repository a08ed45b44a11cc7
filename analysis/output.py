"""What a verb of the analyses leaves behind. `--out NAME` names all of it:

NAME.parquet              the numbers, a row each
NAME.png, NAME.svg        the picture; of several NAME-WHICH.png; a sheet of pictures as PNG alone
NAME.json                 the facts, the sha256 of all that was read, the commit; written last: where it stands, the rest is whole
"""  # noqa: E501 (a table)

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.publish import atomic_file, hash_of_json, make_directory, sha256_of, write_json
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import CONFIG_FILE, RESULT, check_place
from pretrain.tracking.run_tags import git_commit

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

FORMATS = ("png", "svg")


def add_out(verb: argparse.ArgumentParser, default: str) -> None:
    verb.add_argument(
        "--out",
        type=Path,
        default=Path(default),
        help="what the files are called, without an ending",
    )


def check_out(out: Path) -> None:
    """Before any work."""
    if out.suffix in (".png", ".svg", ".pdf", ".json", ".parquet"):
        raise UserError(
            f"--out: {out} has an ending; give {out.with_suffix('')}, several files are called so"
        )
    check_place(out.absolute().parent, field="--out")


def write_table(table: "pa.Table", path: Path) -> None:
    import pyarrow.parquet as pq

    make_directory(path.parent)
    with atomic_file(path) as file:
        pq.write_table(table, file, compression="zstd")


def write(
    out: Path,
    *,
    facts: Mapping[str, Any],
    read: Iterable[Path | str],
    rows: Sequence[Mapping[str, Any]] = (),
    figures: Mapping[str, "Figure | Image"] | None = None,
) -> list[Path]:
    """The files, the facts' one last. `figures`: by what follows NAME in theirs, "" of the only
    one. A value of the facts that is no number (NaN) is null: a reader of JSON refuses it. Columns
    are those of all rows, null where one has none.
    """
    import pyarrow as pa
    from matplotlib import rc_context
    from PIL.Image import Image

    from data_prep.images.sheet import save_sheet
    from finetune.looks import looks, save

    make_directory(out.absolute().parent)
    json_path = out.with_name(f"{out.name}.json")
    json_path.unlink(missing_ok=True)  # until the new ones are whole
    files = list[Path]()
    if rows:
        files.append(out.with_name(f"{out.name}.parquet"))
        names = dict.fromkeys(name for row in rows for name in row)
        write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), files[-1])
    for which, figure in (figures or {}).items():
        name = f"{out.name}{'-' * bool(which)}{which}"
        if isinstance(figure, Image):
            files.append(out.with_name(f"{name}.png"))
            save_sheet(figure, files[-1])
            continue
        for ending in FORMATS:
            files.append(out.with_name(f"{name}.{ending}"))
            with (
                looks(),
                rc_context({"text.parse_math": True}),
            ):  # colours by number, and ticks like 10^3, are looked up now
                save(figure, files[-1])
    hashes = {str(place): hash_of(place) for place in read}
    facts = json.loads(json.dumps(facts, default=float), parse_constant=lambda _: None)
    write_json(json_path, {**facts, "read": hashes, "commit": git_commit()})
    return [*files, json_path]


def written(files: Sequence[Path]) -> int:
    """The last line of a verb, and its exit code."""
    print(f"written: {', '.join(map(str, files))}")
    return 0


def mark(number: int) -> dict[str, Any]:
    """The colour and the marker of the nth line."""
    from finetune.looks import COLOURS, MARKERS

    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def draw_band(axes: "Axes", x: Any, low: Any, middle: Any, high: Any, **style: Any) -> None:
    """A line with what is about it: an interval, or the least and the greatest."""
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(x, middle, **style)


def hash_of(place: Path | str) -> str:
    """Of a file; of a dataset, a checkpoint or a run what names its content: also of a URL,
    RUN@50epochs and hf-hub:NAME."""
    path = local_copy(place, storage=None)
    if path.is_file():
        return sha256_of(path)
    if (path / MANIFEST_NAME).exists():
        return load_manifest(path).hash
    parts = [sha256_of(path / name) for name in (CONFIG_FILE, RESULT) if (path / name).exists()]
    weights = [found.sha256] if (found := Checkpoint.found(str(place))) else []
    return weights[0] if weights and not parts else hash_of_json([*parts, *weights])
