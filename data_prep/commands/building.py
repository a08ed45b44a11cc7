"""`data_prep fetch`, `build`, `merge` and `index`: archives become a dataset."""

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.catalog import ARCHIVES, BY_HAND, CATALOG
from data_prep.commands import add_verb, counted, settings_of
from data_prep.exit_codes import FAILED, OK
from data_prep.explain import Verbs, show
from data_prep.interrupts import ANSWERED
from data_prep.manifest import REJECTED_NAME, Manifest, load_rejected

if TYPE_CHECKING:
    from data_prep.build.config import BuildSettings

GOES_ON = "finished work is kept; the same command resumes"
REMEDIES = {
    **dict.fromkeys(("empty", "truncated", "damaged"), "copy or download them again"),
    "not_held": (
        "build from the folder that has these files, or save the dataset again with save_to_disk"
    ),
    "no_end_marker": "open and save them: their pixels are complete",
    "not_a_file": "replace the links by files, or remove them",
    "not_an_image": "remove files that are no images, or convert them to JPEG or PNG",
    "unsupported": "convert them to 8-bit RGB",
    "too_large": "make them smaller",
    "no_image": "set image_member to the ending of the images (image.png for KEY.image.png)",
    "several_images": "set image_member=ENDING to choose one (rgb.png for KEY.rgb.png)",
    "doubled_member": "give every sample its own key",
    "interleaved": "write the members of each sample next to each other (tar --sort=name)",
    "bad_label": (
        "set label=txt for KEY.txt, label=json:FIELD for KEY.json, or label=none for no labels"
    ),
    "label_out_of_range": "count labels from 0, and write a line for each class into classes_file",
    "unknown_class": "add the names to classes_file, or remove classes_file",
}
"""Reason of a rejection -> fix."""


def add_verbs(verbs: Verbs) -> None:
    _add_fetch(verbs)
    build = add_verb(
        verbs,
        "build",
        _build,
        "config",
        "json",
        help="make a dataset (shards, index, manifest) from an archive or a folder",
        after_a_stop=GOES_ON,
        examples=(
            "data_prep build --source folder --out data/mine path=photos image_size=64\n"
            "data_prep build configs/data_prep/cifar10.yaml"
        ),
        schema="data_prep.build.config:BuildSettings",
    )
    build.add_argument(
        "--source",
        metavar="KIND",
        help="kind of source: folder, imagenet21k, cifar, ... (short for source.kind=KIND)",
    )
    build.add_argument(
        "--task",
        metavar="i/n",
        help="write only the shards of array task i of n (from 0); then run data_prep merge",
    )
    build.add_argument(
        "--plan",
        action="store_true",
        help="make only the plan that array tasks share (otherwise task 0 makes it)",
    )
    merge = add_verb(
        verbs,
        "merge",
        _merge,
        "workers",
        "json",
        help="verify the shards of array tasks, then finish the dataset",
        after_a_stop=GOES_ON,
        examples="data_prep merge data/mine",
    )
    merge.add_argument("dataset", type=Path, help="dataset directory that the tasks wrote")
    index = add_verb(
        verbs,
        "index",
        _index,
        "config",
        "json",
        help="make a dataset of existing WebDataset shards (local, http, s3) without changing them",
        after_a_stop=GOES_ON,
        examples=(
            "data_prep index --out data/theirs --train 'shards/{000..146}.tar' label=json:class"
        ),
        schema="data_prep.index.config:IndexSettings",
    )
    for split in ("train", "val"):
        words = (
            f"shards of the {split} split, such as 'https://host/{{000..146}}.tar' (short for"
            f" splits.{split}=[...])"
        )
        index.add_argument(f"--{split}", action="append", default=[], metavar="PATTERN", help=words)


def _add_fetch(verbs: Verbs) -> None:
    fetch = add_verb(
        verbs,
        "fetch",
        _fetch,
        help="download the archives of a published dataset, and check them",
        after_a_stop="the same command resumes the download",
        examples="data_prep fetch cifar10\ndata_prep fetch cifar10 --from cifar-10-python.tar.gz",
    )
    names = [*CATALOG, *BY_HAND]
    words = "; imagenet1k and imagenet21k print instructions"
    fetch.add_argument("name", choices=names, metavar="NAME", help=f"{', '.join(CATALOG)}{words}")
    words = f"folder of archives (default: {ARCHIVES}, which the configs use)"
    fetch.add_argument("--out", type=Path, default=ARCHIVES, metavar="DIR", help=words)
    source = fetch.add_mutually_exclusive_group()
    words = "web folder with the same files, instead of the official address"
    source.add_argument("--mirror", metavar="URL", help=words)
    words = "file that you have downloaded, or its folder"
    source.add_argument("--from", dest="copy_from", type=Path, metavar="FILE", help=words)


def _fetch(options: argparse.Namespace) -> int:
    from data_prep.downloads import fetch_dataset, files_by_hand

    name, archives = options.name, options.out
    if name in BY_HAND:
        place = archives / BY_HAND[name]
        print(
            f"{name}: register at image-net.org, download these files, and put them into {place}:"
        )
        print(*(f"  {file}" for file in files_by_hand(name)), sep="\n")
        settings = {"source.kind": name, "source.path": str(place)}
    else:
        for line in fetch_dataset(
            name, archives, mirror=options.mirror, copy_from=options.copy_from
        ):
            print(line, flush=True)
        settings = CATALOG[name].build_settings(archives)
    words = [f"{key}={value}" for key, value in settings.items()]
    if ANSWERED not in os.environ:  # else `pretrain recommend` runs the build
        print(f"next: {shlex.join(['data_prep', 'build', '--out', f'data/{name}', *words])}")
    return OK


def settings_to_build(options: argparse.Namespace) -> "BuildSettings":
    from data_prep.build.config import BuildSettings

    return settings_of(
        BuildSettings, options, [f"source.kind={options.source}"] if options.source else []
    )


def _build(options: argparse.Namespace) -> int:
    settings = settings_to_build(options)
    if options.show:
        return show(settings)
    if options.plan:
        from data_prep.build.tasks import plan_build

        num_shards = len(plan_build(settings).shards)
        if options.json:
            print(json.dumps({"dataset": settings.out, "shards": num_shards}))
        else:
            print(f"{settings.out}: {num_shards} shards are planned; run the tasks, then merge")
        return OK
    if options.task is not None:
        from data_prep.build.tasks import ArrayTask, build_task

        num_shards = build_task(settings, ArrayTask.parse(options.task))
        if options.json:
            print(json.dumps({"dataset": settings.out, "task": options.task, "shards": num_shards}))
            return OK
        is_next = f"after the last task, run data_prep merge {settings.out}"
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            is_next = (
                "the queued merge of cluster/data_prep.slurm finishes the dataset after all tasks"
            )
        print(
            f"{settings.out}: task {options.task} has written its {num_shards} "
            f"shard{'s' * (num_shards != 1)}; {is_next}"
        )
        return OK
    from data_prep.build.build import build

    return _published(lambda: build(settings), settings.directory, as_json=options.json)


def _merge(options: argparse.Namespace) -> int:
    from data_prep.build.merge import merge

    def publish() -> Manifest:
        return merge(options.dataset, num_workers=options.workers)

    return _published(publish, options.dataset, as_json=options.json)


def _index(options: argparse.Namespace) -> int:
    from data_prep.index.config import IndexSettings

    patterns = {split: getattr(options, split) for split in ("train", "val")}
    splits = [f"splits.{split}={json.dumps(given)}" for split, given in patterns.items() if given]
    settings = settings_of(IndexSettings, options, splits)
    if options.show:
        return show(settings)

    from data_prep.index.index import index

    return _published(lambda: index(settings), settings.directory, as_json=options.json)


def _published(publish: Callable[[], Manifest], out: Path, *, as_json: bool) -> int:
    from data_prep.build.merge import TooManyRejected

    code = OK
    try:
        manifest = publish()
    except TooManyRejected as error:
        print(f"data_prep: {error.with_codes()}", file=sys.stderr)
        manifest, code = error.manifest, FAILED
    splits = {name: split.num_samples for name, split in manifest.splits.items()}
    if as_json:
        print(
            json.dumps(
                {
                    "dataset": str(out),
                    "splits": splits,
                    "content_hash": manifest.content_hash,
                    "read": manifest.num_read,
                    "written": manifest.num_written,
                    "rejected": manifest.num_rejected,
                    "left_out": manifest.num_left_out,
                }
            )
        )
        return code
    sizes = ", ".join(f"{name} {count:,}" for name, count in splits.items())
    print(
        f"{out}: {len(manifest.classes)} classes, {manifest.image_size} px {manifest.encoding},"
        f" {sizes}"
    )
    where = f"; {out}/{REJECTED_NAME} lists the reasons" if manifest.num_rejected else ""
    print(
        f"read {manifest.num_read:,} = written {manifest.num_written:,} + rejected"
        f" {manifest.num_rejected:,}{where}"
    )
    if manifest.num_rejected:
        rejects = load_rejected(out, manifest)
        [(reason, count)] = Counter(reject["reason"] for reject in rejects).most_common(1)
        example = next(reject for reject in rejects if reject["reason"] == reason)
        remedy = f"; {REMEDIES[reason]}" if reason in REMEDIES else ""
        print(
            f"most frequent reason ({count:,} inputs): {reason}, such as {example['path']}"
            f" ({example['detail']}){remedy}"
        )
    if manifest.num_held_out and "val_fraction" in manifest.source:
        print(
            f"held out as val: {splits['val']:,} images (source.val_fraction="
            f"{manifest.source['val_fraction']:g}; set 0 to train on all images)"
        )
    if manifest.num_left_out:
        print(f"skipped without reading: {counted(manifest.num_left_out)}")
    return code
