"""`finetune table` on the command line: reads the store, writes transfer.md and transfer.png, prints the tables."""

import argparse
import json
import os
from pathlib import Path

from data_prep.publish import make_directory, write_atomic
from data_prep.settings import UserError, load_settings
from finetune.tables.cells import fill
from finetune.tables.config import TableSettings
from finetune.tables.published import TABLES
from finetune.verbs import show
from pretrain.cli import OK, console

STEM = "transfer"


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    table = verbs.add_parser("table", help="what our runs reached, beside the papers' tables: Markdown and PNG")
    table.add_argument("runs_dir", nargs="?", help="the folder that the runs lie in (default: runs)")
    table.add_argument("overrides", nargs="*", help="key=value")
    table.add_argument("--store", metavar="URI", help="an MLflow store or server (default: that of the folder)")
    table.add_argument("--out", metavar="DIR", help="where the files go (default: the folder of the runs)")
    table.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    table.set_defaults(run=_table)


def _table(options: argparse.Namespace) -> int:
    given, overrides = {name: getattr(options, name) for name in ("runs_dir", "store", "out")}, options.overrides
    if given["runs_dir"] and "=" in given["runs_dir"] and not Path(given["runs_dir"]).is_dir():
        overrides = [given.pop("runs_dir"), *overrides]  # no folder at all, but an override
    words = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    settings = load_settings(TableSettings, path=None, overrides=[*words, *overrides])
    if options.show:
        return show(settings)
    uri, out = store_of(settings), Path(settings.out or settings.runs_dir)
    make_directory(out)
    options.started = True
    from finetune.tables.picture import draw
    from finetune.tables.words import NOTES, console_table, markdown
    from pretrain.tracking.store import Store

    stored = Store(uri).runs()
    tables = fill(TABLES, stored)
    write_atomic(out / f"{STEM}.md", markdown(tables).encode())
    write_atomic(out / f"{STEM}.png", draw(tables))
    screen = console()
    for table in tables:
        screen.print(console_table(table))
        screen.print()
    for note in NOTES:
        screen.print(note, style="dim")
    finished = sum(run.status == "FINISHED" for run in stored)
    print(f"{out / STEM}.md, {STEM}.png: of {finished:,} finished runs among {len(stored):,}")
    return OK


def store_of(settings: TableSettings) -> str:
    """As a run finds its store; reading must not make an empty one."""
    if settings.store is not None:
        return settings.store
    database = Path(settings.runs_dir).absolute() / "mlflow.db"
    if database.is_file():
        return f"sqlite:///{database}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        return uri
    raise UserError(
        f"runs_dir: {settings.runs_dir} holds no mlflow.db; name the folder of the runs, or give --store URI"
    )
