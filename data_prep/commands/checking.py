"""`data_prep verify`, `stats` and `preview`: read a finished dataset without changing it."""

import argparse
import json
from pathlib import Path

from data_prep.commands import add_verb, counted, directory_of, print_table
from data_prep.exit_codes import FAILED, OK
from data_prep.explain import Verbs, at_least

NOTHING_CHANGED = "the dataset was not changed"
MAX_PRINTED = 20


def add_verbs(verbs: Verbs) -> None:
    add_verb(
        verbs,
        "verify",
        _verify,
        "dataset",
        "workers",
        "storage",
        "json",
        help="compare all files of a dataset with its manifest",
        after_a_stop=NOTHING_CHANGED,
        examples="data_prep verify data/mine",
    )
    stats = add_verb(
        verbs,
        "stats",
        _stats,
        "dataset",
        "workers",
        "storage",
        "json",
        help="print classes, channel statistics, image sizes and rejected inputs of a dataset",
        after_a_stop=NOTHING_CHANGED,
        examples="data_prep stats data/mine",
    )
    stats.add_argument(
        "--recompute",
        action="store_true",
        help="also compute the channel mean and std from the images",
    )
    preview = add_verb(
        verbs,
        "preview",
        _preview,
        "dataset",
        "storage",
        help="draw images as the model sees them, with their labels, on a contact sheet",
        after_a_stop=NOTHING_CHANGED,
        examples="data_prep preview data/mine",
    )
    preview.add_argument("--split", default="train", help="split to draw")
    preview.add_argument(
        "--shard", type=at_least(0), metavar="N", help="draw only shard N (from 0)"
    )
    preview.add_argument(
        "--count", type=at_least(1), default=64, metavar="N", help="number of images"
    )
    preview.add_argument("--seed", type=at_least(0), default=0, help="seed of the random choice")
    out = Path("preview.png")
    preview.add_argument(
        "--out", type=Path, default=out, metavar="FILE.png", help="PNG file to write"
    )
    push = add_verb(
        verbs,
        "push",
        _push,
        "storage",
        help="copy a finished dataset to a bucket, and verify the copy",
        after_a_stop="run the same command again",
        examples="data_prep push data/mine s3://bucket/mine",
    )
    push.add_argument("dataset", type=Path, help="dataset directory")
    push.add_argument("url", metavar="URL", help="URL in a bucket, such as s3://bucket/mine")


def _push(options: argparse.Namespace) -> int:
    from data_prep.push import push

    manifest = push(options.dataset, options.url, storage=options.storage)
    print(f"{options.url}: uploaded {manifest.num_written:,} samples")
    return OK


def _verify(options: argparse.Namespace) -> int:
    from data_prep.check.verify import verify

    found = verify(directory_of(options), num_workers=options.workers, storage=options.storage)
    if options.json:
        print(
            json.dumps(
                {
                    "dataset": str(options.dataset),
                    "samples": found.manifest.num_written,
                    "num_faults": found.num_faults,
                    "faults": found.faults,
                    "notes": found.notes,
                }
            )
        )
        return FAILED if found.num_faults else OK
    for fault in found.faults[:MAX_PRINTED]:
        print(fault)
    if found.num_faults > MAX_PRINTED:
        print(f"... and {found.num_faults - MAX_PRINTED:,} more")
    if not found.num_faults:
        print(f"{options.dataset}: {found.manifest.num_written:,} samples match the manifest")
    for note in found.notes:
        print(f"note: {note}")
    return FAILED if found.num_faults else OK


def _stats(options: argparse.Namespace) -> int:
    from data_prep.check.stats import SPREAD, spread, stats

    directory = directory_of(options)
    found = stats(
        directory, recompute=options.recompute, num_workers=options.workers, storage=options.storage
    )
    found["dataset"] = str(options.dataset)
    if options.json:
        print(json.dumps(found))
        return OK
    counts = f"{found['num_classes']:,} classes, {found['image_size']} px {found['encoding']}"
    rejected = f"rejected {sum(found['rejected'].values()):,}" + (
        f" ({counted(found['rejected'])})" if found["rejected"] else ""
    )
    print(
        f"{options.dataset}: {counts}, read {found['read']:,} = written {found['written']:,} +"
        f" {rejected}"
    )
    if found["left_out"]:
        print(f"skipped: {counted(found['left_out'])}")
    columns = ("samples", "unlabeled", "shards")
    rows = [
        (
            name,
            *(split[key] for key in columns),
            *(round(split[key] / 1e6, 1) for key in ("picture_bytes", "tar_bytes")),
        )
        for name, split in found["splits"].items()
    ]
    print_table(("split", *columns, "images MB", "tars MB"), rows)
    labeled = {name: split for name, split in found["splits"].items() if split["classes"]}
    print_table(
        ("images per class", "classes", *SPREAD, "max/min"),
        [
            (name, each["classes"], *each["per_class"].values(), each["imbalance"])
            for name, each in labeled.items()
        ],
    )
    for name, split in labeled.items():
        most, least = (
            ", ".join(f"{label} {count:,}" for label, count in split[end])
            for end in ("largest", "smallest")
        )
        print(f"{name}: largest classes {most}; smallest {least}")
    rows = [_channel_row("manifest", found["channel_mean"], found["channel_std"])]
    if options.recompute:
        rows.append(
            _channel_row(
                "recomputed", found["recomputed_channel_mean"], found["recomputed_channel_std"]
            )
        )
    print_table(("channels (R G B)", "mean", "std"), rows)
    sizes = found["sizes"]
    if len(sizes) > 1:
        frequencies = [size["count"] for size in sizes]
        rows = [
            (side, *spread([size[side] for size in sizes], frequencies).values())
            for side in ("width", "height")
        ]
        print_table(("pixels", *SPREAD), rows)
    shown = [(f"{size['width']} x {size['height']}", size["count"]) for size in sizes[:MAX_PRINTED]]
    rest = sum(size["count"] for size in sizes[MAX_PRINTED:])
    print_table(
        ("width x height", "images"),
        shown + ([(f"{len(sizes) - MAX_PRINTED:,} others", rest)] if rest else []),
    )
    return OK


def _channel_row(name: str, mean: list[float], std: list[float]) -> tuple[str, str, str]:
    return (
        name,
        " ".join(f"{value:.4f}" for value in mean),
        " ".join(f"{value:.4f}" for value in std),
    )


def _preview(options: argparse.Namespace) -> int:
    from data_prep.check.contact_sheet import contact_sheet
    from data_prep.images.sheet import check_out, save_sheet

    check_out(options.out)
    sheet = contact_sheet(
        directory_of(options),
        split=options.split,
        shard=options.shard,
        count=options.count,
        seed=options.seed,
        storage=options.storage,
    )
    save_sheet(sheet, options.out)
    print(f"{options.out}: {sheet.width} x {sheet.height} pixels")
    return OK
