"""Commands of `data_prep`: their options, output and exit codes. The modules that do the
work are imported when a command runs, so that help and error messages appear at once.

Every command sets `run` (options -> exit code) and `after_a_stop`, the text to print after an
interruption or a disk error.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.explain import Verbs, at_least
from data_prep.settings import S, load_settings, num_cores


def add_verbs(verbs: Verbs) -> None:
    from data_prep.commands import building, checking, choosing

    building.add_verbs(verbs)
    checking.add_verbs(verbs)
    choosing.add_verbs(verbs)


def add_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *shared: str,
    help: str,
    after_a_stop: str,
    examples: str,
    schema: str | None = None,
    description: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command. `shared`: groups of options in `SHARED`. `schema`: class of the command's
    settings, as module:Class."""
    parser = verbs.add_parser(name, help=help, description=description, epilog=examples)
    parser.set_defaults(run=run, after_a_stop=after_a_stop, schema=schema)
    if schema:
        parser.set_defaults(show=False)
    for option, facts in (each for group in shared for each in SHARED[group].items()):
        parser.add_argument(option, **facts)
    return parser


def json_options(text: str) -> dict[str, Any]:
    """Parse a JSON object. Error messages omit the text, because it may be secret."""
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(
            "it is not a JSON object. write it as '{\"anon\": true}', in quotes"
        )
    return options


def place(text: str) -> Path | str:
    """Return a URL unchanged and anything else as a Path, because Path would merge the slashes of a
    URL."""
    return text if "://" in text else Path(text)


def directory_of(options: argparse.Namespace, dataset: Path | str | None = None) -> Path:
    """Return the local directory of `dataset` (default: the dataset on the command line). For a
    URL, copy everything but the shards first."""
    from data_prep.local_copy import local_copy

    return local_copy(dataset or options.dataset, storage=options.storage)


_WORKERS = "number of worker processes (default: one per core)"
_STORAGE = (
    'options for fsspec to access URLs, such as \'{"anon": true}\' or \'{"endpoint_url": "..."}\''
)
SHARED: dict[str, dict[str, dict[str, Any]]] = {
    "dataset": {
        "dataset": {
            "type": place,
            "help": "dataset directory that build, merge, index or subset wrote, or its URL",
        }
    },
    "config": {
        "config": {"nargs": "?", "help": "YAML file with the settings"},
        "overrides": {"nargs": "*", "default": [], "help": "settings, such as image_size=64"},
        "--out": {"metavar": "DIR", "help": "dataset directory (short for out=DIR)"},
    },
    "workers": {
        "--workers": {"type": at_least(1), "default": num_cores(), "metavar": "N", "help": _WORKERS}
    },
    "storage": {
        "--storage": {"type": json_options, "default": {}, "metavar": "JSON", "help": _STORAGE}
    },
    "json": {"--json": {"action": "store_true", "help": "print the result as JSON"}},
}


def settings_of(schema: type[S], options: argparse.Namespace, shortcuts: list[str]) -> S:
    """Return the settings from CONFIG (optional), the key.path=value words, and `shortcuts`:
    settings that options such as --source set."""
    config, overrides = options.config, list(options.overrides)
    if config is not None and "=" in config:
        config, overrides = None, [config, *overrides]
    if config is not None and Path(config).is_dir():
        fix = f"for a folder of images, run data_prep build --source folder source.path={config}"
        raise UserError(config, "it is a directory, not a config", fix, code="wrong-command")
    if options.out:
        shortcuts = [*shortcuts, f"out={json.dumps(options.out)}"]
    return load_settings(schema, path=config, overrides=[*overrides, *shortcuts])


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print text left-aligned, and numbers right-aligned with thousands separators."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, head in enumerate(heads):
        numeric = bool(rows) and all(isinstance(row[column], int | float) for row in rows)
        table.add_column(head, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *(f"{cell:,}" if isinstance(cell, int | float) else str(cell) for cell in row)
        )
    Console(highlight=False).print(table)
