"""`finetune export`: write a directory that timm, ONNX and torch.export can load.

1. The hashes of the checkpoint are checked, and its weights are loaded into its model.
2. model.safetensors is copied byte for byte. If timm has the architecture, the weights are renamed
   instead, and timm's model must predict the same logits.
3. Each graph is written, read back, and compared with the model (graphs.py).
4. Model card, record and hashes are written. Then the temporary directory is renamed.
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
from finetune.export.config import ONNX, PT2, RECORD, ExportSettings
from finetune.export.graphs import Agreement
from finetune.export.model_card import Facts, input_name, readme
from finetune.runs import results_of, run_of
from pretrain.checkpoints.card import CONFIG, MODEL, config_of, timms_own
from pretrain.checkpoints.checkpoint import HASHES, Checkpoint
from pretrain.checkpoints.files import load_model, write_tensors
from pretrain.checkpoints.run import CONFIG_FILE
from pretrain.checkpoints.timm_weights import to_timm
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
    out, card = Path(settings.out), source.card
    model, run = load_model(source).eval(), run_of(source.directory)
    place = (run.directory if run else source.home).parent
    if (place / CONFIG_FILE).exists():  # a repetition: use the directory that contains its group
        place = place.parent
    places = [place, run.directory] if run else [place]
    results = results_of(source.directory, run, step=card.step, places=places)
    facts = Facts(source, run, results, num_parameters(model), settings)
    try:
        with atomic_directory(out) as directory, torch.no_grad():
            checks = _write_weights(directory, model, facts)
            checks |= _write_graphs(directory, model, facts)
            write_atomic(directory / "README.md", readme(facts).encode())
            write_json(directory / RECORD, record(facts, checks))
            names = sorted(file.name for file in directory.iterdir())
            write_json(directory / HASHES, {name: sha256_of(directory / name) for name in names})
            write_record(directory, "export", settings.record, seed=None, weights=source)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem, fix = f"the disk of {out} is full", "free some space, or choose another disk"
        raise UserError("out", problem, fix, code="no-space") from None
    origin = f" of {run.name}, step {card.step:,}" if run else f" of {card.origin or source.home}"
    lines = [f"{out}: {card.model.label}{origin}, {len(card.classes):,} classes"]
    for file in sorted(out.iterdir()):
        lines.append(f"{file.stat().st_size / 1e6:10,.3f} MB  {file.name}")
        for graph, check in checks.items():
            if FILES[graph] == file.name:
                lines[-1] += (
                    f"  logits differ from the model's by up to {check.max_rel:.1e} of the largest"
                )
    return lines


def _write_weights(directory: Path, model: ImageModel, facts: Facts) -> dict[str, Agreement]:
    """Write config.json and model.safetensors. Return the differences from timm's model, if timm
    has it."""
    card, weights = facts.card, facts.source.directory / MODEL
    if timms_own(card) is None or not isinstance(card.model, MixerSpec):
        write_json(directory / CONFIG, config_of(card))
        shutil.copyfile(weights, directory / MODEL)
        if sha256_of(directory / MODEL) != facts.source.sha256:
            problem, fix = "changed while it was copied", "run the same command again"
            raise UserError(str(weights), problem, fix, code="changed")
        return {}
    import timm  # slow, and not needed by other exports

    spec = card.model.model_copy(update={"norm_eps": TIMM_NORM_EPS})
    timms_card = card.model_copy(update={"model": spec})
    write_json(directory / CONFIG, config_of(timms_card, for_plain_timm=True))
    write_tensors(directory / MODEL, to_timm(model.state_dict(), card.model))
    theirs = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
    inputs = graphs.trial_inputs(card, with_preprocessing=False)
    return {"timm": graphs.agreement([model(x) for x in inputs], theirs, inputs, graph="timm")}


def _write_graphs(directory: Path, model: ImageModel, facts: Facts) -> dict[str, Agreement]:
    settings, card = facts.settings, facts.card
    if not settings.graphs:
        return {}
    modules: list[nn.Module] = [model, graphs.dense(model, label=card.model.label)]
    if settings.with_preprocessing:
        modules = [graphs.FromPictures(each, card) for each in modules]
    original, exported = modules
    inputs = graphs.trial_inputs(card, with_preprocessing=settings.with_preprocessing)
    expected = [original(x) for x in inputs]
    example = next(x for x in inputs if len(x) == 2)  # a batch size of 1 would become a constant
    metadata = {
        "input": input_name(settings),
        "normalized_inside": settings.with_preprocessing,
        "image_size": card.image_size,
        "mean": list(card.channel_mean),
        "std": list(card.channel_std),
        "classes": list(card.classes),
        "model": card.model.label,
        "dataset": card.dataset,
        "weights_sha256": facts.source.sha256,
    }
    checks: dict[str, Agreement] = {}
    for graph in settings.graphs:
        path = directory / FILES[graph]
        print(f"{settings.out}: writing {path.name}", file=sys.stderr, flush=True)
        write, read = TOOLS[graph]
        write(exported, example, path, metadata=metadata)
        checks[graph] = graphs.agreement(expected, read(path), inputs, graph=graph)
    return checks


def record(facts: Facts, checks: dict[str, Agreement]) -> dict[str, Any]:
    """Return the content of export.json, without paths of this machine."""
    card, sizes = facts.card, list(graphs.BATCH_SIZES)
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "schema_version": SCHEMA_VERSION,
        "request": facts.settings.identity(facts.source),
        "model": card.model.label,
        "step": card.step,
        "run": facts.run.name if facts.run else "",
        "run_key": card.run_key,
        "origin": card.origin,
        "num_parameters": facts.num_parameters,
        "checks": {
            graph: check._asdict() | {"batch_sizes": sizes, "tolerance": graphs.TOLERANCE}
            for graph, check in checks.items()
        },
        "results": [each._asdict() for each in facts.results],
        "code": git_commit(),
        "versions": versions,
    }
