"""`pretrain start` on the command line. No torch here: what takes long is a process of its own, the
very command that is printed.

1. Pictures become a dataset: `data_prep build`, whose lines stand as they are. A dataset is taken
   as it is.
2. The choices (recipe.py). A config that stands is never overwritten, unless `--new` asks for it:
   what differs is named.
3. A few steps of the very command (for a probe, of a tuning) are timed, in a directory that goes.
4. The config appears whole; the command that trains is the last line.
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
from pretrain.start import recipe
from pretrain.start.look import Data, Machine, Pictures

MAX_REJECT_SHARE = 0.1
"""Of a stranger's pictures, each with its reason. The build's own limit is for archives of known
content."""
TIMED_SAMPLES = 2048


def start(options: argparse.Namespace) -> int:
    if options.probe and not options.pretrained:
        raise UserError(
            "--probe",
            "a probe needs weights",
            "name a run, or a folder of finetune import, as --from RUN",
            code="conflict",
        )
    keep("pictures that are packed stay; the same command goes on")
    card = Checkpoint.open(options.pretrained).card if options.pretrained else None
    name = (
        options.name
        or re.sub(r"[^\w-]+", "-", Path(options.place).resolve().name).strip("-")
        or "pictures"
    )
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(
            "--name",
            f"{name!r} is not valid",
            "write it with letters, digits, - and _",
            code="bad-value",
        )
    is_url = "://" in str(options.place)
    typed = str(options.place if is_url else options.place.resolve())
    directory, elsewhere = (
        options.place,
        f"go to another folder, and type pretrain start {shlex.quote(typed)}",
    )
    check_place(Path("runs"), field="run_dir", remedy=elsewhere)
    if not is_url and not (options.place / MANIFEST_NAME).exists():
        directory = Path("data") / name
        if directory.resolve() == options.place.resolve():
            directory = Path("data") / f"{name}-dataset"
        if directory.resolve().is_relative_to(options.place.resolve()):
            raise UserError(
                str(options.place),
                f"the dataset would be among the pictures, in {directory}",
                elsewhere,
                code="bad-value",
            )
        check_place(directory, field="dataset", remedy=elsewhere)
        code = _build(options, directory, card=card)
        if code != 0:
            without = f"go on without them: pretrain start {shlex.quote(str(directory))}"
            other = (
                without
                if code == 1 and (directory / MANIFEST_NAME).exists()
                else "try another --name"
            )
            print(
                f"pretrain: {options.place} is no dataset yet: mend what stands above, or {other}",
                file=sys.stderr,
            )
            return code
    data, machine, verb = Data.of(directory), Machine.here(), "train"
    if card is None:
        values = recipe.pretraining(data, machine, name=name)
    else:
        verb, ending = ("probe", "probed") if options.probe else ("tune", "tuned")
        name = options.name or f"{name}-{ending}"
        values = recipe.tuning(data, name=name, pretrained=options.pretrained, card=card)
    if verb == "probe" and data.judged is None:
        raise UserError(
            str(directory),
            "the dataset has no split to test on",
            "build it with source.val_share=0.1, or tune (without --probe)",
            code="bad-value",
        )
    config, path = recipe.render(verb, values), Path(f"{values['run_dir']}.yaml")
    ranks = recipe.num_ranks(machine, batch=values["batch"])
    command = [
        "pretrain" if card is None else "finetune",
        verb,
        str(path),
        *(["--ranks", str(ranks)] if ranks > 1 else []),
    ]
    if path.exists() and not options.new:
        kept = read_yaml(path)
        if shlex.join(command[:2]) not in (
            verbs := verbs_of(kept.keys()) or (shlex.join(command[:2]),)
        ):
            raise UserError(
                "--name",
                f"{path} is a config of {verbs[0]}",
                "choose another name, or replace the config with --new",
                code="bad-value",
            )
        changes = differences(parse_yaml(config, path), kept)
        print(
            f"{path}: kept as it is{f' ({changes}); --new writes another' * bool(changes)}\nnext:"
            f" {shlex.join(command)}"
        )
        return 0
    head = [
        f"{data.manifest.name}: written by pretrain start, a reason behind each choice; every line"
        " may be changed."
    ]
    head += [f"command   {shlex.join(command)}", f"hardware  {machine}"]
    head += [] if options.untimed else [f"expected  {_timed(command, values, data)}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(
        path,
        ("".join(f"# {line}\n" for line in [*head, "result    not yet run"]) + config).encode(),
    )
    print("\n".join([f"{path}: written, a reason behind each choice", *head[2:]]))
    if card is None and data.num_train < recipe.FEW:
        print(
            f"{recipe.EXPECTED}\nWith such weights: pretrain start {shlex.quote(str(directory))}"
            f" --from RUN\n{recipe.WEIGHTS}"
        )
    print(f"next: {shlex.join(command)}")
    return 0


def _build(options: argparse.Namespace, out: Path, *, card: ModelCard | None) -> int:
    place = options.place
    if not place.is_dir():
        if place.exists():
            raise UserError(
                str(place),
                "it is a file",
                "give its folder, or a dataset of data_prep",
                code="unreadable",
            )
        raise UserError(
            str(place),
            "it does not exist",
            near_path(place) or "give a folder of images, or a dataset of data_prep",
            code="missing-path",
        )
    with doing("looking at the pictures"):
        pictures = Pictures.of(place)
    if pictures.num_loose and not options.labels:
        table = next(iter(sorted([*place.glob("*.csv"), *place.glob("*.parquet")])), "FILE.csv")
        loose = f"{pictures.num_loose:,} pictures lie in it, in no folder of a class"
        raise UserError(
            str(place),
            loose,
            f"make one for each class, or name a table with file and label: --labels {table}",
            code="unknown-format",
        )
    size, reason = recipe.image_size(pictures)
    made = {
        "source.path": str(place),
        "source.labels": options.labels,
        "max_reject_share": MAX_REJECT_SHARE,
    }
    if card is not None:
        size, reason = card.image_size, f"what {options.pretrained} was trained at"
        made |= {"crop": card.stored_crop, "interpolation": card.stored_interpolation}
    if options.image_size is not None:
        size, reason = options.image_size, "as asked for"
    words = [
        f"{key}={in_yaml(value)}"
        for key, value in {**made, "image_size": size}.items()
        if value is not None
    ]
    command = ["data_prep", "build", "--source", "folder", "--out", str(out), *words]
    print(
        f"{place}: {pictures.num_pictures:,} pictures; stored at {size} px: {reason}\n$"
        f" {shlex.join(command)}",
        flush=True,
    )
    return _run(command)


def _timed(command: list[str], values: dict[str, Any], data: Data) -> str:
    """What the run may take here: steps of the very command, which are then reckoned up."""
    batch, verb = values["batch"], "train" if command[1] == "train" else "tune"
    steps = max(4, min(20, TIMED_SAMPLES // batch) // 2 * 2)
    print(f"timing {steps} steps of {batch} pictures; loading torch takes some seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "timed.yaml", Path(folder) / "log"
        config.write_text(recipe.render(verb, values))
        words = [
            f"run_dir={folder}/run",
            f"train.duration={steps} steps",
            f"train.log_every_steps={steps // 2}",
        ]
        words += [
            "schedule.warmup=1 steps",
            "data.eval_split=null",
            "data.check=none",
            "tracking.enabled=false",
        ]
        with open(log, "w") as output:
            code = _run([command[0], verb, str(config), *words, *command[3:]], output)
        said, result = log.read_text(), finished_result(Path(folder) / "run") or {}
    if code != 0 or "images_per_s" not in result:
        return f"not timed: {(said.strip().splitlines() or ['it said nothing'])[-1]}"
    per_s, peak_gb = (
        result["images_per_s"],
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
    )
    epochs, every = (int(values[key].split()[0]) for key in ("duration", "every"))
    passes, judgements, what = epochs, max(1, epochs // every), f"{epochs} epochs"
    if (
        command[1] == "probe"
    ):  # features take a third of a tuning's time, and heads about twice as long
        passes, judgements, what = 1, 1, "the features and their heads"
    load, cores = os.getloadavg()[0], num_cores()
    how = f"{steps // 2} steps {'of a tuning ' * (verb != command[1])}timed here"
    how += f" (busy with others: load {load:.0f} on {cores} cores)" if load > 2 * cores else ""
    length = in_words((passes * data.num_train + judgements * data.num_judged / 3) / per_s)
    return f"{per_s:,.0f} images/s and {peak_gb:.1f} GB in {how}: about {length} for {what}"


def _run(command: list[str], output: Any = None) -> int:
    """Exit code of one of our programs. Ctrl-C reaches it from the terminal, too, and is answered
    here: what saves nothing (its `output` is kept) is ended, and the others are waited for."""
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
