"""`finetune export`: a checkpoint -> a directory that others can use, whole and checked, or
nothing.

1. The checkpoint's hashes are held to its files, and its weights to its model (`Checkpoint.open`,
   `load_model`).
2. model.safetensors is copied byte for byte, so that its sha256 names the same weights everywhere;
   but where timm has the architecture itself, the weights get timm's names, and plain timm, which
   must give the model's answers, takes them.
3. Each graph is written, read back, and held to the model's answers (`graphs`).
4. Model card, record and hashes; then the directory gets its name.
"""

import errno
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.errors import UserError
from data_prep.publish import atomic_directory, sha256_of, write_atomic, write_json
from finetune.export import graphs
from finetune.export.config import ONNX, PT2, README, RECORD, ExportSettings
from finetune.export.graphs import Agreement
from finetune.export.model_card import Facts, input_name, readme
from finetune.runs import results_of, run_of
from pretrain.checkpoints.card import CONFIG, MODEL, config_of, timms_own
from pretrain.checkpoints.checkpoint import HASHES, Checkpoint
from pretrain.checkpoints.files import load_model, write_tensors
from pretrain.checkpoints.foreign import to_timm
from pretrain.checkpoints.run import CONFIG_FILE
from pretrain.models.cost import num_parameters
from pretrain.models.image_model import ImageModel
from pretrain.models.spec import TIMM_NORM_EPS, MixerSpec
from pretrain.record import write_record
from pretrain.tracking.run_tags import git_commit

SCHEMA_VERSION = 1
FILES = {"timm": MODEL, "onnx": ONNX, "torch": PT2}
TOOLS = {
    "onnx": (graphs.write_onnx, graphs.answers_of_onnx),
    "torch": (graphs.write_pt2, graphs.answers_of_pt2),
}
LIBRARIES = ("torch", "timm", "safetensors", "onnx", "onnxscript", "onnxruntime")


def export(settings: ExportSettings, source: Checkpoint) -> list[str]:
    """The lines to print."""
    out, card = Path(settings.out), source.card
    model, run = load_model(source).eval(), run_of(source.directory)
    beside = (run.directory if run else source.home).parent
    beside = (
        beside.parent if (beside / CONFIG_FILE).exists() else beside
    )  # of repetitions the folder that all of them lie in
    beside = Path(settings.results_from) if settings.results_from else beside
    places = [beside, run.directory] if run else [beside]
    results = results_of(source.directory, run, step=card.step, places=places)
    facts = Facts(card, run, results, num_parameters(model), source.sha256, settings)
    try:
        with atomic_directory(out) as directory:
            checks = _write_weights(directory, source.directory, model, facts) | _write_graphs(
                directory, model, facts
            )
            write_atomic(directory / README, readme(facts).encode())
            write_json(directory / RECORD, record(facts, checks))
            names = sorted(file.name for file in directory.iterdir())
            write_json(directory / HASHES, {name: sha256_of(directory / name) for name in names})
            write_record(directory, "export", settings.record, seed=None, weights=source)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"out: {out} cannot be written, for the disk is full; free some space, or name another"
            " disk (nothing is left there)"
        ) from None
    where = (
        f" of {run.name}, step {card.step:,}"
        if run
        else f" of {card.origin}"
        if card.origin
        else ""
    )
    lines = [
        f"{out}: {card.model.label}{where}, {card.image_size} px, {len(card.classes):,} classes"
    ]
    return lines + [_printed(file, checks) for file in sorted(out.iterdir())]


@torch.no_grad()
def _write_weights(
    directory: Path, source: Path, model: ImageModel, facts: Facts
) -> dict[str, Agreement]:
    """config.json and model.safetensors."""
    card = facts.card
    if timms_own(card) is None or not isinstance(card.model, MixerSpec):
        write_json(directory / CONFIG, config_of(card))
        shutil.copyfile(source / MODEL, directory / MODEL)
        if sha256_of(directory / MODEL) != facts.weights_sha256:
            raise UserError(
                f"{source / MODEL}: has changed while it was copied; nothing is published, try"
                " again"
            )
        return {}
    import timm  # takes seconds, which no other export need spend

    timms = card.model_copy(
        update={"model": card.model.model_copy(update={"norm_eps": TIMM_NORM_EPS})}
    )
    write_json(directory / CONFIG, config_of(timms, for_plain_timm=True))
    write_tensors(directory / MODEL, to_timm(model.state_dict(), card.model))
    theirs = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
    inputs = graphs.trial_inputs(card, with_preprocessing=False)
    return {"timm": graphs.agreement([model(x) for x in inputs], theirs, inputs, graph="timm")}


@torch.no_grad()
def _write_graphs(directory: Path, model: ImageModel, facts: Facts) -> dict[str, Agreement]:
    wanted, card = facts.settings.graphs, facts.card
    if not wanted:
        return {}
    with_preprocessing = facts.settings.with_preprocessing
    inputs = graphs.trial_inputs(card, with_preprocessing=with_preprocessing)
    plain = graphs.dense(model, label=card.model.label)
    modules: list[nn.Module] = [model, plain]
    if with_preprocessing:
        modules = [graphs.FromPictures(each, card) for each in modules]
    whole, exported = modules
    expected = [whole(x) for x in inputs]
    example = next(x for x in inputs if len(x) == 2)  # of 1, a batch would be taken for a constant
    metadata = {  # what the user of a graph has to know
        "input": input_name(facts.settings),
        "normalised_inside": with_preprocessing,
        "image_size": card.image_size,
        "mean": list(card.channel_mean),
        "std": list(card.channel_std),
        "classes": list(card.classes),
        "model": card.model.label,
        "dataset": card.dataset,
        "weights_sha256": facts.weights_sha256,
    }
    checks: dict[str, Agreement] = {}
    for graph in wanted:
        path = directory / FILES[graph]
        print(
            f"{facts.settings.out}: writing {path.name}", file=sys.stderr, flush=True
        )  # of a large model it takes minutes
        write, read = TOOLS[graph]
        write(exported, example, path, metadata=metadata)
        checks[graph] = graphs.agreement(expected, read(path), inputs, graph=graph)
    return checks


def record(facts: Facts, checks: dict[str, Agreement]) -> dict[str, Any]:
    """export.json; without paths of this machine, as it is passed on."""
    card = facts.card
    return {
        "schema_version": SCHEMA_VERSION,
        "request": facts.settings.identity(weights_sha256=facts.weights_sha256),
        "model": card.model.label,
        "step": card.step,
        "run": facts.run.name if facts.run else "",
        "run_key": card.run_key,
        "origin": card.origin,
        "num_parameters": facts.num_parameters,
        "checks": {
            graph: (
                found._asdict()
                | {"batch_sizes": list(graphs.BATCH_SIZES), "tolerance": graphs.TOLERANCE}
            )
            for graph, found in checks.items()
        },
        "results": [each._asdict() for each in facts.results],
        "code": git_commit(),
        "versions": (
            {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES}
        ),
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _printed(file: Path, checks: dict[str, Agreement]) -> str:
    line = f"{file.stat().st_size / 1e6:10,.3f} MB  {file.name}"
    found = next((found for graph, found in checks.items() if FILES[graph] == file.name), None)
    if found is None:
        return line
    sizes = ", ".join(map(str, graphs.BATCH_SIZES))
    off = (
        f"off by at most {found.max_abs:.1e}, {found.max_rel:.1e} of the largest logit (batches of"
        f" {sizes})"
    )
    return f"{line}  answers as the model: {off}"
