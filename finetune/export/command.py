"""`finetune export` on the command line. No torch until the settings are known to be good."""

import argparse
import json
from pathlib import Path

from data_prep.settings import load_settings
from finetune.export.config import ExportSettings
from finetune.export.place import check_libraries, check_space, exported_before, request_of
from finetune.verbs import end_on_signals, show
from pretrain.checkpoints.checkpoint import MODEL, Checkpoint
from pretrain.cli import OK
from pretrain.ranks.world import read_world


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = verbs.add_parser("export", help="a checkpoint for others: timm and hub folder, ONNX, torch.export")
    export.add_argument("pretrained", help="a run directory, one of its checkpoints, or an imported folder")
    export.add_argument("out", help="the directory to write")
    export.add_argument("--formats", help="with commas between (default: timm,onnx,torch); timm is always there")
    export.add_argument("--with-preprocessing", action="store_true", help="graphs take uint8 pictures and normalise")
    export.add_argument("overrides", nargs="*", help="key=value, such as license=apache-2.0")
    export.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    words = [f"pretrained={json.dumps(options.pretrained)}", f"out={json.dumps(options.out)}"]
    if options.formats is not None:
        words.append(f"formats={json.dumps([word.strip() for word in options.formats.split(',')])}")
    if options.with_preprocessing:
        words.append("with_preprocessing=true")
    settings = load_settings(ExportSettings, path=None, overrides=[*words, *options.overrides])
    if options.show:
        return show(settings)
    if not read_world().is_first:
        return OK  # of several ranks one is enough
    source, out = Checkpoint.open(settings.pretrained), Path(settings.out)
    if exported_before(out, request_of(settings, weights_sha256=source.sha256)):
        print(f"{out}: exported before, and whole; remove it, or name another directory, to do it anew")
        return OK
    check_libraries(settings)
    check_space(out, num_bytes=(source.directory / MODEL).stat().st_size * (1 + len(settings.graphs)))
    options.started = True
    end_on_signals()  # before the long imports
    from finetune.export.export import export

    print("\n".join(export(settings, source)))
    return OK
