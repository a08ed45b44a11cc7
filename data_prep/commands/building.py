"""`data_prep build`, `merge` and `index`: what makes a dataset."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.commands import FAULTY, OK, add_workers, settings_of
from data_prep.manifest import REJECTED_NAME, Manifest, load_rejected
from data_prep.settings import dump

if TYPE_CHECKING:
    from data_prep.commands import Verbs

GOES_ON = "what is finished is kept, the same command goes on from there"
REMEDIES = {
    "empty": "copy or download them again",
    "truncated": "copy or download them again",
    "damaged": "copy or download them again",
    "not_a_file": "put the files in the place of the links, or remove these",
    "not_an_image": "remove what is no picture, or convert it to JPEG or PNG",
    "unsupported": "convert them to 8-bit RGB",
    "missing_codec": "the installer says which headers it lacks; or convert them to JPEG or PNG",
    "too_many_pixels": "make them smaller, or raise max_pixels where memory allows it",
    "too_large": "make them smaller",
    "no_image": "image_member=ENDING names the picture's member (of KEY.image.png it is image.png)",
    "several_images": "image_member=ENDING chooses one (of KEY.rgb.png it is rgb.png)",
    "doubled_member": "give every sample a key of its own",
    "interleaved": "write the members of each sample side by side (tar --sort=name)",
    "no_label": "label=json:FIELD takes it from KEY.json; label=none reads pictures without labels",
    "bad_label": "label=json:FIELD takes it from KEY.json; label=none reads pictures without labels",
    "label_out_of_range": "labels count from 0; give classes_file a line for each",
    "unknown_class": "add the names to classes_file, or leave it out",
}
"""What can be done about inputs that are rejected, by reason."""


def add_verbs(verbs: "Verbs") -> None:
    build = verbs.add_parser("build", help="pack a source into shards + index + manifest; goes on after any interruption")
    build.add_argument("config", nargs="?", help="a YAML file, such as configs/data_prep/demo_pretrain.yaml")
    build.add_argument("overrides", nargs="*", help="key.path=value, such as image_size=64 source.seed=1")
    build.add_argument("--source", metavar="KIND", help="folder, imagenet21k, cifar, ... (short for source.kind=KIND)")
    build.add_argument("--out", metavar="DIR", help="the dataset directory (short for out=DIR)")
    build.add_argument("--task", metavar="i/n", help="only the i-th of n parts (from 0), for job arrays; then: data_prep merge")
    build.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    build.add_argument("--json", action="store_true", help="print the summary as JSON")
    build.set_defaults(run=_build, after_a_stop=GOES_ON)
    merge = verbs.add_parser("merge", help="verify what array tasks have written, then publish the dataset")
    merge.add_argument("dataset", type=Path)
    add_workers(merge)
    merge.add_argument("--trust", action="store_true", help="do not read the shards again: only their sizes are checked")
    merge.add_argument("--json", action="store_true", help="print the summary as JSON")
    merge.set_defaults(run=_merge, after_a_stop=GOES_ON)
    index = verbs.add_parser(
        "index", help="make a dataset of WebDataset shards of others (local, http, s3), which stay as they are"
    )
    index.add_argument("config", nargs="?", help="a YAML file with the settings")
    index.add_argument("overrides", nargs="*", help="key.path=value, such as label=json:class image_size=224")
    for split in ("train", "val"):
        index.add_argument(
            f"--{split}",
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"shards of the {split} split, such as 'https://host/{{000..146}}.tar' (short for splits.{split}=[...])",
        )
    index.add_argument("--out", metavar="DIR", help="the dataset directory (short for out=DIR)")
    index.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    index.add_argument("--json", action="store_true", help="print the summary as JSON")
    index.set_defaults(run=_index, after_a_stop=GOES_ON)


def _build(options: argparse.Namespace) -> int:
    from data_prep.build.config import BuildSettings

    kind = [f"source.kind={options.source}"] if options.source else []
    settings = settings_of(BuildSettings, options, kind)
    if options.show:
        print(dump(settings), end="")
        return OK
    if options.task is not None:
        from data_prep.build.tasks import ArrayTask, build_task

        num_shards = build_task(settings, ArrayTask.parse(options.task))
        if options.json:
            print(json.dumps({"dataset": settings.out, "task": options.task, "shards": num_shards}))
            return OK
        shards = "shard" if num_shards == 1 else "shards"
        print(f"{settings.out}: task {options.task} has its {num_shards} {shards}; {_what_is_next(settings.out)}")
        return OK
    from data_prep.build.build import build

    return _published(lambda: build(settings), settings.out, as_json=options.json)


def _what_is_next(out: str) -> str:
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return "when all tasks are done the merge publishes the dataset (cluster/data_prep.slurm has queued it)"
    return f"after the last task: data_prep merge {out}"


def _merge(options: argparse.Namespace) -> int:
    from data_prep.build.merge import merge

    return _published(
        lambda: merge(options.dataset, num_workers=options.workers, trust=options.trust), str(options.dataset), as_json=options.json
    )


def _index(options: argparse.Namespace) -> int:
    from data_prep.index.config import IndexSettings

    patterns = {split: getattr(options, split) for split in ("train", "val")}
    splits = [f"splits.{split}={json.dumps(given)}" for split, given in patterns.items() if given]
    settings = settings_of(IndexSettings, options, splits)
    if options.show:
        shown = settings.model_copy(update={"storage": dict.fromkeys(settings.storage, "...")})
        print(dump(shown), end="")
        return OK

    from data_prep.index.index import index

    return _published(lambda: index(settings), settings.out, as_json=options.json)


def _most_frequent(directory: Path, manifest: Manifest) -> str:
    """The reason of most rejects, with an example and what can be done about it."""
    rejects = load_rejected(directory, manifest)
    [(reason, count)] = Counter(reject["reason"] for reject in rejects).most_common(1)
    example = next(reject for reject in rejects if reject["reason"] == reason)
    remedy = f"; {REMEDIES[reason]}" if reason in REMEDIES else ""
    return f"most often ({count:,}): {reason}, such as {example['path']} ({example['detail']}){remedy}"


def _published(publish: Callable[[], Manifest], out: str, *, as_json: bool) -> int:
    from data_prep.build.merge import TooManyRejected

    code = OK
    try:
        manifest = publish()
    except TooManyRejected as error:
        print(f"data_prep: {error}", file=sys.stderr)
        manifest, code = error.manifest, FAULTY
    splits = {name: split.num_samples for name, split in manifest.splits.items()}
    if as_json:
        counts = {"read": manifest.num_read, "written": manifest.num_written, "rejected": manifest.num_rejected}
        left_out = {"left_out": manifest.num_left_out}
        print(json.dumps({"dataset": out, "splits": splits, "content_hash": manifest.content_hash, **counts, **left_out}))
        return code
    sizes = ", ".join(f"{name} {count:,}" for name, count in splits.items())
    print(f"{out}: {len(manifest.classes)} classes, {manifest.image_size} px {manifest.encoding}, {sizes}")
    where = f"; {Path(out) / REJECTED_NAME} says which and why" if manifest.num_rejected else ""
    print(f"read {manifest.num_read:,} = written {manifest.num_written:,} + rejected {manifest.num_rejected:,}{where}")
    if manifest.num_rejected:
        print(_most_frequent(Path(out), manifest))
    if manifest.num_left_out:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest.num_left_out.items())
        print(f"left out by the config, not read: {reasons}")
    return code
