"""`finetune export` on the command line. No file is overwritten."""

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs, show
from data_prep.progress import doing
from data_prep.publish import make_directory
from data_prep.settings import load_settings
from finetune.export.config import ONNX, PT2, ExportSettings
from finetune.export.push import check_access, push
from finetune.verbs import end_on_signals, split_config
from pretrain.checkpoints.card import MODEL
from pretrain.checkpoints.checkpoint import HASHES, Checkpoint, fault_of
from pretrain.checkpoints.hub import HUB
from pretrain.models.imported import allow_import
from pretrain.ranks.world import rank_of

LIBRARIES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}


def add_verbs(verbs: Verbs) -> None:
    export = verbs.add_parser(
        "export",
        help="convert a checkpoint to a folder for timm and the hub, ONNX and torch.export",
    )
    source = "a run, one of its checkpoints, an imported folder, or a YAML file"
    export.add_argument("config", metavar="RUN", help=source)
    export.add_argument("out", nargs="?", help="directory to write (with a YAML file: out=DIR)")
    export.add_argument("--formats", help="formats, comma-separated (default: timm,onnx,torch)")
    export.add_argument(
        "--with-preprocessing", action="store_true", help="ONNX and torch take raw uint8 images"
    )
    export.add_argument(
        "--push-to", metavar="USER/NAME", help="push to this repository of the Hugging Face hub"
    )
    export.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: main)")
    export.add_argument(
        "overrides", nargs="*", default=[], help="key=value, such as license=apache-2.0"
    )
    export.epilog = """finetune export runs/mine exports/mine license=apache-2.0
finetune export configs/export/demo.yaml pretrained=runs/mine out=exports/mine
finetune export runs/mine exports/mine --push-to USER/NAME license=apache-2.0"""
    export.set_defaults(run=_export, schema="finetune.export.config:ExportSettings", show=False)


def _export(options: argparse.Namespace) -> int:
    settings = _settings_of(options)
    if options.show:
        return show(settings)
    allow_import(settings.allow_import)
    if rank_of() != 0:
        return OK  # one rank is enough
    source, out = Checkpoint.open(settings.pretrained), Path(settings.out)
    if source.card.pixel_permutation is not None:
        problem = f"exports do not support the data.pixel_permutation of {settings.pretrained}"
        fix = "export a run without it"
        raise UserError("pretrained", problem, fix, code="unsupported")
    if settings.push_to is not None:
        check_access(settings.push_to, private=settings.private)
    if settings.is_begun(source):
        fault = fault_of(out, needed=tuple(json.loads((out / HASHES).read_text())))
        if fault is not None:
            problem = f"{out} has this export, but {fault}"
            raise UserError("out", problem, "choose another out", code="damaged")
        print(f"{out}: exported before; the export is complete")
        return _push(settings)
    for graph in settings.graphs:
        missing = [name for name in LIBRARIES[graph] if importlib.util.find_spec(name) is None]
        if missing:
            others = ",".join(each for each in ("timm", *settings.graphs) if each != graph)
            fix = f"run pip install 'wide-mlps[{graph}]', or use --formats {others}"
            problem = f"{graph} needs the packages {', '.join(missing)}"
            raise UserError("formats", problem, fix, code="missing-library")
    num_bytes = (source.directory / MODEL).stat().st_size * (1 + len(settings.graphs))
    make_directory(out.absolute().parent)
    free = shutil.disk_usage(out.absolute().parent).free
    if free < num_bytes:
        problem = f"{out} needs {num_bytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free"
        raise UserError("out", problem, "free some space, or choose another disk", code="no-space")
    options.started = True
    end_on_signals("nothing is saved")
    with doing("loading torch"):
        from finetune.export.export import export

    print("\n".join(export(settings, source)))
    return _push(settings)


def _settings_of(options: argparse.Namespace) -> ExportSettings:
    words = [word for word in (options.config, options.out, *options.overrides) if word is not None]
    config, words = split_config(words)
    if config is None:
        if len(words) < 2:
            fix = f"write finetune export {words[0]} DIRECTORY"
            raise SettingsError("out", "is missing", fix, code="missing-value")
        words[:2] = [f"pretrained={json.dumps(words[0])}", f"out={json.dumps(words[1])}"]
    given = {"push_to": options.push_to, "revision": options.revision}
    if options.formats is not None:
        given["formats"] = [word.strip() for word in options.formats.split(",")]
    if options.with_preprocessing:
        given["with_preprocessing"] = True
    words += [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return load_settings(ExportSettings, path=config, overrides=words)


def _push(settings: ExportSettings) -> int:
    if settings.push_to is not None:
        out = Path(settings.out)
        with doing(f"{settings.push_to}: sending {out}"):
            pushed = push(
                out,
                settings.push_to,
                files=sorted([*json.loads((out / HASHES).read_text()), HASHES]),
                revision=settings.revision,
                private=settings.private,
                obsolete=(ONNX, f"{ONNX}.data", PT2),
            )
        print(f"{pushed}: pushed as one commit. To use it: pretrained={HUB}{settings.push_to}")
    return OK
