"""`finetune import`: its command line, and the checks before torch is imported."""

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
    verb = verbs.add_parser("import", help="make a folder like a checkpoint of foreign weights")
    verb.add_argument(
        "file", type=Path, help="a torch or safetensors file of scaling_mlps, or of a timm mixer_*"
    )
    verb.add_argument("--out", type=Path, required=True, help="the folder to write")
    verb.add_argument(
        "--classes", help="names: a text file with one per line, or a dataset; or their number"
    )
    verb.add_argument("--name", help="what the weights were trained on (default: the file's name)")
    verb.add_argument(
        "--flattening", choices=("chw", "hwc"), default="chw", help="of the pixels (default: chw)"
    )
    verb.add_argument(
        "--activation",
        choices=get_args(Activation),
        help="not in the weights (default: of the config beside the file, or gelu)",
    )
    both = (
        "of a training file that holds both: the running average, or the weights as trained"
        " (default: ema, as timm)"
    )
    verb.add_argument("--weights", choices=("ema", "raw"), default="ema", help=both)
    for name in ("mean", "std"):
        verb.add_argument(
            f"--{name}", type=float, nargs=3, help="of the colours, on the scale 0..1"
        )
    verb.epilog = (
        "finetune import B-12_Wi-1024_res_64_cifar10 --out runs/public --classes data/cifar10"
    )
    verb.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> int:
    file: Path = options.file
    if not file.is_file():
        inside = sorted(
            path
            for ending in ("safetensors", "bin", "pth", "pt")
            for path in file.glob(f"*.{ending}")
        )
        such_as = f", such as {inside[0]}" if inside else ""
        near = f"give the file of weights in it{such_as}" if file.exists() else near_path(file)
        raise UserError(
            f"{file}: is {'a directory' if file.exists() else 'not there'};"
            f" {near or 'give a file of weights'}"
        )
    if (options.mean is None) != (options.std is None):
        raise UserError("--mean and --std: one is given without the other; give both")
    for name, values in (("mean", options.mean), ("std", options.std)):
        if values and not all(
            0 <= value <= 1 and value >= (name == "std") * 1e-3 for value in values
        ):
            row = " ".join(f"{value:.4g}" for value in values)
            raise UserError(
                f"--{name}: {row} is not on the scale 0..1; divide what is meant for 0..255 by 255"
            )
    if (
        options.classes is not None and not options.classes.isdigit()
    ):  # they are there, and can be read
        dataset = local_copy(options.classes, storage=None)
        load_manifest(dataset) if dataset.is_dir() else read_lines("--classes", options.classes)
    if not (options.out / CONFIG).exists():
        is_output(options.out, {}, record=CONFIG, kind="these weights", field="out")
    with doing("loading torch"):
        from finetune.weights.importing import import_weights

    print("\n".join(import_weights(options)))
    return OK
