"""What an evaluation says on the console: made of its result alone, so a stored one says the same. No torch here."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.evaluate.choice import recipe

WORSE_BY = 0.02
"""Than on the plain pictures: no chance any more."""


def say(result: dict[str, Any], console: Console, *, stored: bool = False) -> None:
    left_out = result["num_unreadable"]
    missing = f", {left_out:,} more do not decode: {', '.join(result['unreadable'])}" if left_out else ""
    if left_out > len(result["unreadable"]):
        missing += ", ..."
    views = f", {result['num_views']} views each" if result["views"] else ""
    heading = f"{result['model']} on {result['dataset']}, {result['split']}: {result['num_samples']:,} images{views}"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(result):
        table.add_row(*row)
    console.print(heading + missing, highlight=False, markup=False, soft_wrap=True)
    console.print(table, highlight=False)
    plain = result.get("plain_top1")
    if result["views"] and plain is not None and plain - result["eval/top1"] > WORSE_BY:
        flips = ", its flips above all" if result["augment"]["flip_probability"] else ""
        hint = f"the plain pictures reach {plain:.2%}: these views may not suit the classes; see augment{flips}"
        console.print(hint, highlight=False, soft_wrap=True)
    if stored:
        console.print("asked before: the stored result; name another run_dir to do it anew", highlight=False)
    place = Path(result["run_dir"])
    place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    console.print(f"{place}: predictions, classes, pictures", highlight=False, markup=False, soft_wrap=True)


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("top-1", f"{result['eval/top1']:.2%}")]
    if "eval/real" in result:
        rows.append(("top-1, ReaL", f"{result['eval/real']:.2%}"))
    rows += [
        ("top-5", f"{result['eval/top5']:.2%}"),
        ("loss", f"{result['eval/loss']:.4f}"),
        ("ECE", f"{result['eval/ece']:.2%} (largest gap {result['eval/mce']:.1%}), Brier {result['eval/brier']:.4f}"),
    ]
    if result["curve"]:
        shown = "  ".join(f"{moment['num_views']}: {moment['top1']:.2%}" for moment in result["curve"])
        rows.append(("top-1 by views", shown))
    if result.get("augment"):
        rows.append(("views", escape(f"{recipe(result['augment'])}: {result['augment_from']}")))
    worst = ", ".join(f"{escape(name)} {top1:.0%}" for name, top1 in result["worst_classes"][:3])
    rows.append(("class top-1", f"mean {result['eval/class_top1']:.2%}; worst: {worst}"))
    if result["most_confused"]:
        pairs = ", ".join(f"{escape(a)} as {escape(b)} ({count:,})" for a, b, count in result["most_confused"][:3])
        rows.append(("most confused", pairs))
    rows.append(("speed", f"{result['images_per_s']:,.0f} images/s, {result['seconds']:.1f} s"))
    return rows
