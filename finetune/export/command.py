"""`finetune export` on the command line. No torch until the settings are known to be good; nothing
that is there already is ever overwritten."""

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import OK
from data_prep.explain import Verbs
from data_prep.progress import doing
from data_prep.publish import make_directory
from data_prep.settings import load_settings
from finetune.export.config import ONNX, PT2, ExportSettings
from finetune.export.push import check_access, push
from finetune.verbs import end_on_signals, show, split_config
from pretrain.checkpoints.card import MODEL
from pretrain.checkpoints.checkpoint import HASHES, Checkpoint, fault_of
from pretrain.checkpoints.hub import HUB
from pretrain.ranks.world import rank_of

NEEDED_LIBRARIES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}


def add_verbs(verbs: Verbs) -> None:
    export = verbs.add_parser(
        "export", help="a checkpoint for others: timm and hub folder, ONNX, torch.export"
    )
    export.add_argument(
        "config",
        metavar="RUN",
        help="a run directory, one of its checkpoints, or an imported folder; or a YAML file",
    )
    export.add_argument(
        "out", nargs="?", help="the directory to write; after a YAML file it is a setting, out=DIR"
    )
    export.add_argument(
        "--formats", help="with commas between (default: timm,onnx,torch); timm is always there"
    )
    export.add_argument(
        "--with-preprocessing", action="store_true", help="graphs take uint8 pictures and normalise"
    )
    export.add_argument(
        "--push-to",
        metavar="USER/NAME",
        help="a repository on the Hugging Face hub that gets it as one commit",
    )
    export.add_argument("--revision", metavar="BRANCH", help="of that repository (default: main)")
    export.add_argument(
        "overrides", nargs="*", default=[], help="key=value, such as license=apache-2.0"
    )
    export.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    export.epilog = """finetune export runs/mine exports/mine license=apache-2.0
finetune export configs/export/demo.yaml pretrained=runs/mine out=exports/mine
finetune export runs/mine exports/mine --push-to USER/NAME license=apache-2.0"""
    export.set_defaults(run=_export, schema="finetune.export.config:ExportSettings")


def _export(options: argparse.Namespace) -> int:
    config, words = split_config(
        [word for word in (options.config, options.out, *options.overrides) if word is not None]
    )
    if config is None:
        if len(words) < 2:
            raise SettingsError(
                "out",
                "is missing",
                f"write finetune export {words[0]} DIRECTORY",
                code="missing-value",
            )
        words[:2] = [f"pretrained={json.dumps(words[0])}", f"out={json.dumps(words[1])}"]
    if options.formats is not None:
        words.append(f"formats={json.dumps([word.strip() for word in options.formats.split(',')])}")
    if options.with_preprocessing:
        words.append("with_preprocessing=true")
    words += [
        f"{key}={json.dumps(word)}"
        for key in ("push_to", "revision")
        if (word := getattr(options, key)) is not None
    ]
    settings = load_settings(ExportSettings, path=config, overrides=words)
    if options.show:
        return show(settings)
    if rank_of() != 0:
        return OK  # of several ranks one is enough
    source, out = Checkpoint.open(settings.pretrained), Path(settings.out)
    if source.card.pixel_permutation is not None:
        why = (
            "sees pixels in an order of its own (data.pixel_permutation"
            f" {source.card.pixel_permutation}), which others do not have"
        )
        raise UserError(
            "pretrained",
            f"{settings.pretrained} {why}",
            "export a run without it",
            code="unsupported",
        )
    if settings.push_to is not None:
        check_access(settings.push_to, private=settings.private)
    if _is_whole(settings, source):
        again = "" if settings.push_to else "; name another directory to do it anew"
        print(f"{out}: exported before, and whole{again}")
        return _push(settings)
    _check_libraries(settings)
    _check_space(
        out, num_bytes=(source.directory / MODEL).stat().st_size * (1 + len(settings.graphs))
    )
    options.started = True
    end_on_signals("nothing is saved")  # before the long imports
    with doing("loading torch"):
        from finetune.export.export import export

    print("\n".join(export(settings, source)))
    return _push(settings)


def _push(settings: ExportSettings) -> int:
    """What stands in `out`, whole; not what somebody has put beside it."""
    if settings.push_to is not None:
        with doing(f"{settings.push_to}: sending {settings.out}"):
            out, graphs = Path(settings.out), (ONNX, f"{ONNX}.data", PT2)
            files = sorted([*json.loads((out / HASHES).read_text()), HASHES])
            private, revision = settings.private, settings.revision
            pushed = push(
                out,
                settings.push_to,
                files=files,
                revision=revision,
                private=private,
                obsolete=graphs,
            )
        print(f"{pushed}: one commit; others take it as pretrained={HUB}{settings.push_to}")
    return OK


def _is_whole(settings: ExportSettings, source: Checkpoint) -> bool:
    """Whether this very export stands there, whole. An error where something else does."""
    if not settings.is_begun(source):
        return False
    out = Path(settings.out)
    fault = fault_of(out, needed=tuple(json.loads((out / HASHES).read_text())))
    if fault is not None:
        raise UserError(
            "out", f"{out} holds this export, but {fault}", "choose another out", code="damaged"
        )
    return True


def _check_libraries(settings: ExportSettings) -> None:
    for graph in settings.graphs:
        missing = ", ".join(
            name for name in NEEDED_LIBRARIES[graph] if importlib.util.find_spec(name) is None
        )
        others = ",".join(each for each in ("timm", *settings.graphs) if each != graph)
        if missing:
            raise UserError(
                "formats",
                f"{graph} needs {missing}",
                f"pip install 'wide-mlps[{graph}]', or use --formats {others}",
                code="missing-library",
            )


def _check_space(out: Path, *, num_bytes: int) -> None:
    """Before minutes of work end on a full disk."""
    make_directory(out.absolute().parent)
    free = shutil.disk_usage(out.absolute().parent).free
    if free < num_bytes:
        sizes = f"{num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        raise UserError(
            "out",
            f"{out} would take {sizes}",
            "free some space, or choose another disk",
            code="no-space",
        )
