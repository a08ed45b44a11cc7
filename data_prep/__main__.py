"""Command line of the ground floor: `data_prep build | merge | verify`."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path

from data_prep.manifest import Manifest
from data_prep.settings import dump, load_settings, parse_command_line

OK, BAD_INPUT, FAULTY = 0, 2, 1


def main(arguments: list[str] | None = None) -> int:
    options = parse_command_line(_parser(), arguments)
    try:
        return int(options.run(options))
    except ValueError as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return BAD_INPUT
    except (OSError, BrokenExecutor) as error:
        print(
            f"data_prep: {str(error).rstrip('.')}; what is finished is kept, the same command goes on from there",
            file=sys.stderr,
        )
        return FAULTY
    except KeyboardInterrupt:
        print("data_prep: interrupted; finished shards are kept, the same command goes on from there", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data_prep", description="Image archives in, verified WebDataset shards out.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    build = verbs.add_parser(
        "build", help="pack a source into shards + index + manifest; goes on after any interruption"
    )
    build.add_argument("config", nargs="?", help="a YAML file, such as configs/data_prep/demo_pretrain.yaml")
    build.add_argument("overrides", nargs="*", help="key.path=value, such as image_size=64 source.seed=1")
    build.add_argument("--source", metavar="KIND", help="folder | synthetic (short for source.kind=KIND)")
    build.add_argument("--out", metavar="DIR", help="the dataset directory (short for out=DIR)")
    build.add_argument(
        "--task", metavar="i/n", help="only the i-th of n parts (from 0), for job arrays; then: data_prep merge"
    )
    build.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    build.add_argument("--json", action="store_true", help="print the summary as JSON")
    build.set_defaults(run=_build)
    merge = verbs.add_parser("merge", help="verify what array tasks have written, then publish the dataset")
    merge.add_argument("dataset", type=Path)
    merge.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    merge.add_argument("--json", action="store_true", help="print the summary as JSON")
    merge.set_defaults(run=_merge)
    check = verbs.add_parser("verify", help="read everything again and hold it against the manifest")
    check.add_argument("dataset", type=Path)
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=_verify)
    return parser


def _build(options: argparse.Namespace) -> int:
    from data_prep.config import BuildSettings

    config, overrides = options.config, list(options.overrides)
    if config is not None and "=" in config:
        config, overrides = None, [config, *overrides]
    if options.source:
        overrides.append(f"source.kind={options.source}")
    if options.out:
        overrides.append(f"out={options.out}")
    settings = load_settings(BuildSettings, path=config, overrides=overrides)
    if options.show:
        print(dump(settings), end="")
        return OK
    if options.task:
        from data_prep.tasks import Task, build_task

        num_shards = build_task(settings, Task.parse(options.task))
        print(
            f"{settings.out}: task {options.task} has its {num_shards} shards; after the last task: data_prep merge {settings.out}"
        )
        return OK
    from data_prep.build import build

    return _published(lambda: build(settings), settings.out, as_json=options.json)


def _merge(options: argparse.Namespace) -> int:
    from data_prep.merge import merge

    return _published(
        lambda: merge(options.dataset, num_workers=options.workers), str(options.dataset), as_json=options.json
    )


def _published(publish: Callable[[], Manifest], out: str, *, as_json: bool) -> int:
    from data_prep.merge import TooManyRejected

    try:
        manifest = publish()
    except TooManyRejected as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return FAULTY
    splits = {name: split.num_samples for name, split in manifest.splits.items()}
    if as_json:
        counts = {"read": manifest.num_read, "written": manifest.num_written, "rejected": manifest.num_rejected}
        left_out = {"left_out": manifest.num_left_out}
        print(json.dumps({"dataset": out, "splits": splits, "hash": manifest.hash, **counts, **left_out}))
        return OK
    sizes = ", ".join(f"{name} {count:,}" for name, count in splits.items())
    print(f"{out}: {len(manifest.classes)} classes, {manifest.image_size} px {manifest.encoding}, {sizes}")
    print(f"read {manifest.num_read:,} = written {manifest.num_written:,} + rejected {manifest.num_rejected:,}")
    if manifest.num_left_out:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest.num_left_out.items())
        print(f"left out by the config, not read: {reasons}")
    return OK


def _verify(options: argparse.Namespace) -> int:
    from data_prep.verify import verify

    manifest, faults = verify(options.dataset)
    if options.json:
        print(json.dumps({"dataset": str(options.dataset), "samples": manifest.num_written, "faults": faults}))
    else:
        print(
            "\n".join(faults) or f"{options.dataset}: {manifest.num_written:,} samples, every one as the manifest says"
        )
    return FAULTY if faults else OK


if __name__ == "__main__":
    sys.exit(main())
