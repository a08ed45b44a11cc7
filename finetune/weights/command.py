"""`finetune import` on the command line."""

import argparse
from pathlib import Path
from typing import get_args

from data_prep.errors import UserError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs
from data_prep.local_copy import local_copy
from data_prep.manifest import load_manifest
from data_prep.progress import doing
from data_prep.settings import near_path, read_lines
from pretrain.checkpoints.card import CONFIG
from pretrain.checkpoints.run import is_output
from pretrain.models.spec import Activation


def add_verbs(verbs: Verbs) -> None:
    verb = verbs.add_parser("import", help="convert weights of other projects to a checkpoint")
    file = "a torch or safetensors file of scaling_mlps or of timm's mixer_*"
    verb.add_argument("file", type=Path, help=file)
    verb.add_argument("--out", type=Path, required=True, help="the folder to write")
    classes = "class names (a dataset, or a text file with one name per line), or their number"
    verb.add_argument("--classes", help=classes)
    name = "name of the training set (default: the file's name)"
    verb.add_argument("--name", help=name)
    order = "order of input pixels: by channel (chw) or by pixel (hwc) (default: chw)"
    verb.add_argument("--flattening", choices=("chw", "hwc"), default="chw", help=order)
    activation = "activation (default: from the config next to the file, or gelu)"
    verb.add_argument("--activation", choices=get_args(Activation), help=activation)
    both = "averaged (ema) or plain (raw) weights, if the file has both (default: ema)"
    verb.add_argument("--weights", choices=("ema", "raw"), default="ema", help=both)
    for statistic in ("mean", "std"):
        text = f"{statistic} of the channels, on the scale 0..1"
        verb.add_argument(f"--{statistic}", type=float, nargs=3, help=text)
    verb.epilog = (
        "finetune import B-12_Wi-1024_res_64_cifar10 --out runs/public --classes data/cifar10"
    )
    verb.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> int:
    file: Path = options.file
    if not file.is_file():
        kinds = ("safetensors", "bin", "pth", "pt")
        inside = sorted(path for kind in kinds for path in file.glob(f"*.{kind}"))
        problem = "is a directory" if file.exists() else "does not exist"
        fix = f"give {inside[0]}" if inside else near_path(file) or "give a file of weights"
        raise UserError(str(file), problem, fix, code="missing-path")
    for field, values, other, least in (
        ("--mean", options.mean, options.std, 0.0),
        ("--std", options.std, options.mean, 1e-3),
    ):
        if other and not values:
            fix = "give both --mean and --std"
            raise UserError(field, "is missing", fix, code="missing-value")
        if values and not all(least <= value <= 1 for value in values):
            problem, fix = f"{values} is not on the scale 0..1", "divide values for 0..255 by 255"
            raise UserError(field, problem, fix, code="bad-value")
    if options.classes is not None and not options.classes.isdigit():
        names_of(options.classes)  # before torch is imported
    if not (options.out / CONFIG).exists():
        is_output(options.out, {}, record=CONFIG, kind="these weights")
    with doing("loading torch"):
        from finetune.weights.importing import import_weights

    print("\n".join(import_weights(options)))
    return OK


def names_of(classes: str) -> tuple[str, ...]:
    dataset = local_copy(classes, storage=None)
    if dataset.is_dir():
        return load_manifest(dataset).classes
    return tuple(read_lines("--classes", classes))
