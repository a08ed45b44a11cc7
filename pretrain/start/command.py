"""`pretrain start` on the command line. No torch here: what takes long is a process of its own, the very command that is printed.

1. Pictures become a dataset: `data_prep build`, whose lines stand as they are. A dataset is taken as it is.
2. The choices (recipe.py). A config that stands is never overwritten, unless `--new` asks for it: what differs is named.
3. A few steps of the very command are timed, in a directory that goes.
4. The config appears whole; the command that trains is the last line.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from data_prep.interrupts import ANSWERED, keep
from data_prep.manifest import MANIFEST_NAME
from data_prep.progress import doing
from data_prep.publish import write_atomic
from data_prep.settings import UserError, differences, num_cores, read_yaml
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.start import recipe
from pretrain.start.look import Data, Machine, Pictures
from pretrain.start.recipe import Choice, in_yaml

MAX_REJECT_SHARE = 0.1
"""Of a stranger's pictures, each with its reason. The build's own limit is for archives of known content."""
TIMED_SAMPLES = 2048
_SPEED = re.compile(r"step [\d,]+/.* ([\d,]+) images/s")


def start(options: argparse.Namespace) -> int:
    if options.probe and not options.pretrained:
        raise UserError("--probe: needs weights; name a run, or a folder of pretrain import, as --from RUN")
    keep("pictures that are packed stay; the same command goes on", ends_within_s=None)
    card = Checkpoint.open(options.pretrained).card if options.pretrained else None
    name = options.name or re.sub(r"[^\w-]+", "-", options.place.resolve().name).strip("-") or "pictures"
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"--name: {name!r} will not do; write it with letters, digits, - and _")
    directory = options.place
    if not (options.place / MANIFEST_NAME).exists():
        directory = Path("data") / name
        if directory.resolve() == options.place.resolve():
            directory = Path("data") / f"{name}-dataset"
        code = _build(options, directory, card=card)
        if code != 0:
            without = f"go on without them: pretrain start {shlex.quote(str(directory))}"
            other = without if code == 1 and (directory / MANIFEST_NAME).exists() else "try another --name"
            print(f"pretrain: {options.place} is no dataset yet: mend what stands above, or {other}", file=sys.stderr)
            return code
    data, machine = Data.of(directory), Machine.here()
    verb, choices = _chosen(options, data, machine, card=card, name=name)
    path = Path(str(choices[0].value) + ".yaml")
    ranks = recipe.num_ranks(machine)
    command = [*verb, str(path), *(["--ranks", str(ranks)] if ranks > 1 else [])]
    if not options.new and _stands(path, recipe.tree_of(choices)):
        print(f"next: {shlex.join(command)}")
        return 0
    head = [f"{data.manifest.name}: written by pretrain start, a reason behind each choice; every line may be changed."]
    head += [f"command   {shlex.join(command)}", f"hardware  {machine}"]
    if not options.untimed and not options.probe:
        head.append(f"expected  {_timed(command, choices, data)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, recipe.render(choices, [*head, "result    not yet run"]).encode())
    print(f"{path}: written, a reason behind each choice" + "".join(f"\n{line}" for line in head[2:]))
    if card is None and data.num_train < recipe.FEW:
        print(f"{recipe.EXPECTED}\nWith such weights, yours or imported: pretrain start {shlex.quote(str(directory))} --from RUN")
    print(f"next: {shlex.join(command)}")
    return 0


def _build(options: argparse.Namespace, out: Path, *, card: ModelCard | None) -> int:
    place = options.place
    if not place.is_dir():
        is_what = "is a file; give the folder that it lies in" if place.exists() else "is not there; give a folder of pictures"
        raise UserError(f"{place}: {is_what}, or a dataset of data_prep")
    with doing("looking at the pictures"):
        pictures = Pictures.of(place)
    if pictures.num_loose and not options.labels:
        table = next(iter(sorted([*place.glob("*.csv"), *place.glob("*.parquet")])), "FILE.csv")
        loose = f"{pictures.num_loose:,} pictures lie in it, in no folder of a class"
        raise UserError(f"{place}: {loose}; make one for each class, or name a table with file and label: --labels {table}")
    size, reason = recipe.image_size(pictures)
    if card is not None:
        size, reason = card.image_size, f"what {options.pretrained} was trained at"
    if options.image_size is not None:
        size, reason = options.image_size, "as asked for"
    made = {"source.path": place, "source.labels": options.labels, "image_size": size, "max_reject_share": MAX_REJECT_SHARE}
    if card is not None:
        made |= {"crop": card.stored_crop, "interpolation": card.stored_interpolation}
    words = [
        f"{key}={in_yaml(str(value) if isinstance(value, Path) else value)}" for key, value in made.items() if value is not None
    ]
    command = ["data_prep", "build", "--source", "folder", "--out", str(out), *words]
    print(f"{place}: {pictures.num_pictures:,} pictures; stored at {size} px: {reason}\n$ {shlex.join(command)}", flush=True)
    return _run(command)[0]


def _chosen(
    options: argparse.Namespace, data: Data, machine: Machine, *, card: ModelCard | None, name: str
) -> tuple[list[str], list[Choice]]:
    if card is None:
        return ["pretrain", "train"], recipe.pretraining(data, machine, name=name)
    if not options.probe:
        return ["finetune", "tune"], recipe.tuning(data, name=f"{name}-tuned", pretrained=options.pretrained, card=card)
    return ["finetune", "probe"], recipe.probing(data, name=f"{name}-probed", pretrained=options.pretrained, card=card)


def _stands(path: Path, tree: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    changes = differences(tree, read_yaml(path))
    print(f"{path}: kept as it is" + f" ({changes}); --new writes start's" * bool(changes))
    return True


def _timed(command: list[str], choices: list[Choice], data: Data) -> str:
    """What the run may take here: steps of the very command, which are then reckoned up."""
    value = {choice.key: choice.value for choice in choices}
    batch, epochs = value["train.global_batch_size"], int(value["train.duration"].split()[0])
    steps = max(4, min(20, TIMED_SAMPLES // batch) // 2 * 2)
    print(f"timing {steps} steps of {batch} pictures; loading torch takes some seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "timed.yaml", Path(folder) / "log"
        config.write_text(recipe.render(choices, []))
        words = [f"run_dir={folder}/run", f"train.duration={steps} steps", f"train.log_every_steps={steps // 2}"]
        words += ["schedule.warmup=1 steps", "data.eval_split=null", "data.check=none", "tracking.enabled=false"]
        with open(log, "w") as output:
            code, peak_gb = _run([*command[:2], str(config), *words, *command[3:]], output)
        said = log.read_text()
    speeds = _SPEED.findall(said)
    if code != 0 or not speeds:
        return f"not timed: {(said.strip().splitlines() or ['it said nothing'])[-1]}"
    per_s = float(speeds[-1].replace(",", ""))
    num_evaluations = max(1, epochs // int(value["checkpoint.every"].split()[0]))
    load, cores = os.getloadavg()[0], num_cores()
    busy = f" (busy with others: load {load:.0f} on {cores} cores)" if load > 2 * cores else ""
    seconds = (epochs * data.num_train + num_evaluations * data.num_judged / 3) / max(per_s, 1)
    length = f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
    length = f"{seconds:,.0f} s" if seconds < 120 else length
    return f"{per_s:,.0f} images/s and {peak_gb:.1f} GB in {steps // 2} steps timed here{busy}: about {length} for {epochs} epochs"


def _run(command: list[str], output: Any = None) -> tuple[int, float]:
    """Exit code of one of our programs, and the GB of memory that it held at most. Ctrl-C reaches it from the terminal, too, and is
    answered here: what saves nothing (its `output` is kept) is ended, and the others are waited for."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output, env=os.environ | {ANSWERED: "ends"})
    is_interrupted = False
    while True:
        try:
            _, status, used = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            is_interrupted = True
            if output is not None:
                process.kill()
            continue
        process.returncode = os.waitstatus_to_exitcode(status)
        if is_interrupted:
            raise KeyboardInterrupt
        return process.returncode, used.ru_maxrss / 1e6
