"""`data_prep subset` and `data_prep dedup`: choose samples of a dataset."""

import argparse
import json
import sys
from pathlib import Path

from data_prep.commands import add_verb, counted, directory_of, place, print_table
from data_prep.exit_codes import OK
from data_prep.explain import Verbs, at_least
from data_prep.publish import write_atomic
from data_prep.settings import validate

NEAR = 6
MANY = 0.05
"""Fraction of a split above which `dedup` warns that its list drops many samples."""


def add_verbs(verbs: Verbs) -> None:
    subset = add_verb(
        verbs,
        "subset",
        _subset,
        "dataset",
        "storage",
        "json",
        help="make a dataset from samples of another dataset, without copying images",
        after_a_stop="the new dataset is unfinished; run the same command again",
        examples="data_prep subset data/mine --out data/mine-tenth --fraction 0.1",
    )
    subset.add_argument("--out", required=True, metavar="DIR", help="new dataset directory")
    subset.add_argument("--fraction", type=float, help="fraction of every class, such as 0.1")
    subset.add_argument(
        "--count",
        type=at_least(1),
        metavar="N",
        help="total number of samples; classes keep their proportions",
    )
    subset.add_argument(
        "--per-class", type=at_least(1), metavar="N", help="number of samples of every class"
    )
    subset.add_argument(
        "--split", default="train", help="split to make smaller; other splits stay complete"
    )
    subset.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        help="seed; larger subsets with the same seed contain smaller ones",
    )
    subset.add_argument(
        "--classes-file", metavar="FILE", help="text file with one class to keep per line"
    )
    subset.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="LIST",
        help="exclusion list that dedup wrote",
    )
    dedup = add_verb(
        verbs,
        "dedup",
        _dedup,
        "dataset",
        "workers",
        "storage",
        "json",
        help="list images that occur more than once, also across datasets",
        examples="data_prep dedup data/mine --against data/others --out duplicates.jsonl",
        after_a_stop="no list was written; with --hashes, finished hashes are reused",
        description=(
            "List images that occur more than once: with equal pixels, or encoded again, resized "
            "or cropped a little. Mirrored and rotated copies are not found. Line art, text in "
            "one color and images of nearly one color are compared only by pixels."
        ),
    )
    words = "other dataset to compare with, which keeps all samples; repeatable"
    dedup.add_argument(
        "--against", type=place, action="append", default=[], metavar="DIR", help=words
    )
    dedup.add_argument(
        "--split", action="append", help="split that may lose samples (default: train); repeatable"
    )
    how = dedup.add_mutually_exclusive_group()
    how.add_argument(
        "--max-hamming",
        type=int,
        metavar="N",
        help=f"maximum Hamming distance of near duplicates (64-bit hashes) (default: {NEAR})",
    )
    how.add_argument("--exact", action="store_true", help="list only images with equal pixels")
    dedup.add_argument("--out", metavar="LIST.jsonl", help="exclusion list to write")
    dedup.add_argument(
        "--hashes", type=Path, metavar="DIR", help="folder that keeps the hashes for later runs"
    )


def _subset(options: argparse.Namespace) -> int:
    from data_prep.build.parts import refuse_url
    from data_prep.choose.subset import Selection, subset

    names = ("fraction", "count", "per_class", "split", "seed", "classes_file", "exclude")
    selection = validate(Selection, {name: getattr(options, name) for name in names})
    manifest = subset(directory_of(options), Path(refuse_url(options.out)), selection)
    splits = {name: split.num_samples for name, split in manifest.splits.items()}
    excluded = manifest.source.get("exclude_paths")
    if options.json:
        print(
            json.dumps(
                {
                    "dataset": str(options.out),
                    "splits": splits,
                    "content_hash": manifest.content_hash,
                    "left_out": manifest.num_left_out,
                    "exclude_paths": excluded,
                }
            )
        )
        return OK
    sizes = ", ".join(f"{name} {count:,}" for name, count in splits.items())
    print(
        f"{options.out}: {len(manifest.classes)} classes, {sizes}; the images stay in "
        f"{options.dataset}"
    )
    if manifest.num_left_out:
        print(f"skipped: {counted(manifest.num_left_out)}")
    if excluded is not None:
        print(
            f"of {excluded['listed']:,} paths to exclude, {excluded['found']:,} are in"
            f" {options.dataset}"
        )
    return OK


def _dedup(options: argparse.Namespace) -> int:
    from data_prep.build.parts import refuse_url
    from data_prep.choose.dedup import check_out, exclusion_lines, find_duplicates, summary

    if options.out is not None:
        options.out = Path(refuse_url(options.out))
        check_out(options.out)
    near = NEAR if options.max_hamming is None else options.max_hamming
    found = find_duplicates(
        directory_of(options),
        against=tuple(directory_of(options, each) for each in options.against),
        splits=tuple(options.split or ["train"]),
        near=None if options.exact else near,
        cache=options.hashes,
        num_workers=options.workers,
        storage=options.storage,
    )
    num_samples = sum(part.stop - part.start for part in found.parts if part.may_lose)
    for part in found.parts:
        num_lost = int(((part.start <= found.positions) & (found.positions < part.stop)).sum())
        if num_lost > MANY * (part.stop - part.start):
            less = "" if options.exact else " A smaller --max-hamming, or --exact, drops less."
            print(
                f"data_prep: the list drops {num_lost / (part.stop - part.start):.1%} of "
                f"{part.split}. Check some of its pairs before you use it.{less}",
                file=sys.stderr,
            )
    if options.out is not None:
        lines = exclusion_lines(found, storage=options.storage)
        write_atomic(
            options.out, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode()
        )
    names = ("split", "of_dataset", "of_split", "reason")
    rows = [
        dict(zip(names, what, strict=True)) | {"count": count}
        for what, count in sorted(summary(found).items())
    ]
    if options.json:
        counts = {
            "samples": num_samples,
            "duplicates": len(found.positions),
            "plain": found.num_plain,
        }
        out = None if options.out is None else str(options.out)
        print(json.dumps({"dataset": str(options.dataset), **counts, "by": rows, "out": out}))
        return OK
    print(
        f"{options.dataset}: {len(found.positions):,} of {num_samples:,} samples repeat an "
        "earlier image"
    )
    if rows:
        print_table(
            ("split", "earlier dataset", "earlier split", "reason", "samples"),
            [tuple(row.values()) for row in rows],
        )
    if found.num_plain:
        print(
            f"{found.num_plain:,} images are line art or nearly of one color and were compared "
            "only by pixels"
        )
    if options.out is not None:
        print(
            f"{options.out}: exclusion list; use it in build as exclude=[{options.out}], or in "
            "subset as --exclude"
        )
    return OK
