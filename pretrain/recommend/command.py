"""Command line of `pretrain recommend`. Slow work, with torch, runs in other processes.

1. Images become a dataset with `data_prep build`. An existing dataset is used unchanged. The files
   of a published dataset come from `data_prep fetch`.
2. recipe.py chooses the settings. An existing config is replaced only with `--overwrite`;
   otherwise the differences are printed.
3. A few training steps are timed in a temporary directory (for a probe, steps of a fine-tuning).
4. The config is written atomically. The last line is the training command.
"""

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from data_prep.catalog import CATALOG
from data_prep.errors import UserError
from data_prep.interrupts import ANSWERED, keep
from data_prep.manifest import MANIFEST_NAME
from data_prep.progress import doing, in_words
from data_prep.publish import write_atomic
from data_prep.settings import (
    differences,
    in_yaml,
    near_path,
    num_cores,
    parse_yaml,
    read_yaml,
    verbs_of,
)
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import check_place, finished_result
from pretrain.recommend import recipe
from pretrain.recommend.look import Data, Machine, Pictures

MAX_REJECT_FRACTION = 0.1
"""Largest fraction of rejected images. `data_prep build` has another limit, for archives of known
content."""
TIMED_SAMPLES = 2048


def recommend(options: argparse.Namespace) -> int:
    if options.probe and not options.pretrained:
        fix = "Add --from RUN, with a run or a folder of finetune import"
        raise UserError("--probe", "a probe needs weights", fix, code="conflict")
    keep("packed images are kept; the same command resumes")
    card = Checkpoint.open(options.pretrained).card if options.pretrained else None
    place = options.place
    name = options.name or re.sub(r"[^\w-]+", "-", Path(place).resolve().name).strip("-")
    name = name or "pictures"
    if not re.fullmatch(r"[\w-]+", name):
        fix = "Use letters, digits, - and _"
        raise UserError("--name", f"{name!r} is not valid", fix, code="bad-value")
    typed = str(place) if isinstance(place, str) else str(place.resolve())
    elsewhere = f"go to another folder, and run pretrain recommend {shlex.quote(typed)}"
    check_place(Path("runs"), field="run_dir", remedy=elsewhere)
    directory = place
    if isinstance(place, Path) and not (place / MANIFEST_NAME).exists():
        directory = Path("data") / name
        if directory.resolve() == place.resolve():
            directory = Path("data") / f"{name}-dataset"
        if directory.resolve().is_relative_to(place.resolve()):
            problem = f"the dataset {directory} would be inside the image folder"
            raise UserError(str(place), problem, elsewhere, code="bad-value")
        check_place(directory, field="dataset", remedy=elsewhere)
        code = _build(options, directory, card=card)
        if code != 0:
            fix = "fix the error above, or choose another --name"
            if code == 1 and (directory / MANIFEST_NAME).exists():
                without = f"pretrain recommend {shlex.quote(str(directory))}"
                fix = f"fix the error above, or continue without the rejected images: {without}"
            print(f"pretrain: {place}: the build failed; {fix}", file=sys.stderr)
            return code
    return _write_config(options, Data.of(directory), name=name, card=card)


def _write_config(
    options: argparse.Namespace, data: Data, *, name: str, card: ModelCard | None
) -> int:
    machine, verb = Machine.here(), "train"
    if card is None:
        values = recipe.pretraining(data, machine, name=name)
    else:
        verb, ending = ("probe", "probed") if options.probe else ("tune", "tuned")
        name = options.name or f"{name}-{ending}"
        values = recipe.tuning(data, name=name, pretrained=options.pretrained, card=card)
    if verb == "probe" and data.judged is None:
        fix = "Build it with source.val_fraction=0.1, or tune (without --probe)"
        problem = "the dataset has no split to test on"
        raise UserError(str(data.directory), problem, fix, code="bad-value")
    config, path = recipe.render(verb, values), Path(f"{values['run_dir']}.yaml")
    ranks = recipe.num_ranks(machine, batch=values["batch"])
    program = "pretrain" if card is None else "finetune"
    command = [program, verb, str(path), *(["--ranks", str(ranks)] if ranks > 1 else [])]
    command += [f"--allow-import={each}" for each in options.allow_import if card is not None]
    next_line = f"next: {shlex.join(command)}"
    if path.exists() and not options.overwrite:
        kept = read_yaml(path)
        verbs = verbs_of(kept.keys()) or (f"{program} {verb}",)
        if f"{program} {verb}" not in verbs:
            fix = "Choose another name, or replace the config with --overwrite"
            raise UserError("--name", f"{path} is a config of {verbs[0]}", fix, code="bad-value")
        changes = differences(parse_yaml(config, path), kept)
        more = f" ({changes}); --overwrite replaces it" if changes else ""
        print(f"{path}: unchanged{more}\n{next_line}")
        return 0
    facts = [f"command   {shlex.join(command)}", f"hardware  {machine}"]
    if not options.no_timing:
        facts.append(f"expected  {_timed(command, values, data)}")
    head = f"{name}: written by pretrain recommend. You can change every line."
    lines = [f"# {line}\n" for line in (head, *facts, "result    not yet run")]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("".join(lines) + config).encode())
    print("\n".join([f"{path}: written, with a reason for each choice", *facts[1:]]))
    if card is None and data.num_train < recipe.FEW:
        print(recipe.EXPECTED)
        print(
            "To use pretrained weights: pretrain recommend"
            f" {shlex.quote(str(data.directory))} --from RUN"
        )
        print(recipe.WEIGHTS)
    print(next_line)
    return 0


def _build(options: argparse.Namespace, out: Path, *, card: ModelCard | None) -> int:
    place = options.place
    if str(place) in CATALOG and not place.exists():
        if code := _run(["data_prep", "fetch", str(place)]):
            return code
        settings = CATALOG[str(place)].build_settings() | {"source.labels": options.labels}
        number, size, reason = "", settings["image_size"], "the dataset's usual size"
    else:
        pictures = _pictures_in(place, options.labels)
        number, (size, reason) = f"{pictures.num_pictures:,} images, ", recipe.image_size(pictures)
        settings = {
            "source.kind": "folder",
            "source.path": str(place),
            "source.labels": options.labels,
            "max_reject_fraction": MAX_REJECT_FRACTION,
        }
    if card is not None:
        size, reason = card.image_size, f"{options.pretrained} was trained at this size"
        settings |= {"crop": card.stored_crop, "interpolation": card.stored_interpolation}
        settings |= {"encoding": "jpeg"} if card.stored_crop == "full" else {}
    if options.image_size is not None:
        size, reason = options.image_size, "--image-size"
    settings["image_size"] = size
    words = [f"{key}={in_yaml(value)}" for key, value in settings.items() if value is not None]
    command = ["data_prep", "build", "--out", str(out), *words]
    print(f"{place}: {number}stored at {size} px ({reason})")
    print(f"$ {shlex.join(command)}", flush=True)
    return _run(command)


def _pictures_in(place: Path, labels: str | None) -> Pictures:
    if not place.is_dir():
        names = ", ".join(CATALOG)
        fix = near_path(place) or f"Give a folder of images, a dataset of data_prep, or {names}"
        if place.exists():
            raise UserError(str(place), "it is a file", fix, code="unreadable")
        raise UserError(str(place), "it does not exist", fix, code="missing-path")
    with doing("reading a sample of the images"):
        pictures = Pictures.of(place)
    if pictures.num_loose and not labels:
        table = next(iter(sorted([*place.glob("*.csv"), *place.glob("*.parquet")])), "FILE.csv")
        problem = f"{pictures.num_loose:,} images are not in a class folder"
        fix = f"Make a folder for each class, or add a table of labels: --labels {table}"
        raise UserError(str(place), problem, fix, code="unknown-format")
    return pictures


def _timed(command: list[str], values: dict[str, Any], data: Data) -> str:
    """Time some steps. Return the expected throughput, memory and duration of the run."""
    batch, verb = values["batch"], "train" if command[1] == "train" else "tune"
    steps = max(4, min(20, TIMED_SAMPLES // batch) // 2 * 2)
    print(f"timing {steps} steps of {batch} images; loading torch takes some seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "timed.yaml", Path(folder) / "log"
        config.write_text(recipe.render(verb, values))
        words = [
            f"run_dir={folder}/run",
            f"train.duration={steps} steps",
            f"train.log_every_steps={steps // 2}",
            "schedule.warmup=1 steps",
            "data.eval_split=null",
            "data.verify_hashes=never",
            "tracking.enabled=false",
        ]
        with open(log, "w") as output:
            code = _run([command[0], verb, str(config), *words, *command[3:]], output)
        output_lines = log.read_text().strip().splitlines() or ["no output"]
        result = finished_result(Path(folder) / "run") or {}
    if code != 0 or "images_per_s" not in result:
        return f"not timed: {output_lines[-1]}"
    per_s = result["images_per_s"]
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    epochs, every = (int(values[key].split()[0]) for key in ("duration", "every"))
    passes, num_evaluations, what = epochs, max(1, epochs // every), f"{epochs} epochs"
    if command[1] == "probe":
        # the features take a third of a tuning epoch, and the heads two thirds
        passes, num_evaluations, what = 1, 1, "the features and their heads"
    load, cores = os.getloadavg()[0], num_cores()
    how = f"{steps // 2} steps {'of a tuning ' * (verb != command[1])}timed on this machine"
    how += f" (busy: load {load:.0f} on {cores} cores)" if load > 2 * cores else ""
    num_images = passes * data.num_train + num_evaluations * data.num_judged / 3
    length = in_words(num_images / per_s)
    return f"{per_s:,.0f} images/s and {peak_gb:.1f} GB of RAM in {how}: about {length} for {what}"


def _run(command: list[str], output: Any = None) -> int:
    """Run one of our programs and return its exit code. Ctrl-C in the terminal also reaches the
    program. A program with captured output is then killed; other programs may finish."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=output,
        stderr=output,
        env=os.environ | {ANSWERED: "ends"},
    )
    is_interrupted = False
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            is_interrupted = True
            if output is not None:
                process.kill()
    if is_interrupted:
        raise KeyboardInterrupt
    return process.returncode
