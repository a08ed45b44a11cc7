"""Rows of one finished run in the results table (columns: `analysis.results.COLUMNS`)."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data_prep.settings import flatten, validate
from finetune.runs import Run, card_of, run_of
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.run import MAY_CHANGE
from pretrain.config import DataSettings
from pretrain.data.datasets import load_training_data
from pretrain.models.cost import cost_of, num_block_parameters, width_and_connections
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, ModelSpec, SparseMlpSpec

TRAININGS = ("pretrain", "scratch")
CURVES, LONGEST_CURVE = ("train/loss", "eval/loss", "eval/top1"), 200
REPEATED = ("seed", "train.seed", "data.fold")
"""Settings that differ between repetitions of one recipe."""
APART = (
    *(key for key in MAY_CHANGE if key != "train.duration"),
    *("pretrained", "data.dataset", "folds", "tracking", "num_ranks"),
    *("engine.cuda_graphs", "refit", "chunk_mb"),  # of earlier versions
)
"""Settings that are not part of a recipe. Instead of paths, a recipe contains the recipe of the
weights and the hash of the dataset."""
SCALED = (
    *("train.duration", "schedule.cooldown", "model.depth", "model.width"),
    *("model.num_channels", "model.num_tokens", "model.patch_size", "model.density"),
    *("model.token_hidden", "model.channel_hidden"),
)
"""Settings that may differ between the runs of one scaling law, in addition to the dataset."""
AUGMENTATIONS = (
    *("crop_scale", "crop_padding", "flip_probability", "auto_augment", "erase_probability"),
    *("mixup_alpha", "cutmix_alpha"),
)
PUBLIC = re.compile(r"imagenet21_epochs_(\d+)")
"""Names of the checkpoints published by the authors of Scaling MLPs."""
REAL_LABELS = "top-1, ReaL labels"
SPEC = TypeAdapter[AnySpec](ModelSpec)
_run_at, _card_in = lru_cache(maxsize=1024)(run_of), lru_cache(maxsize=1024)(card_of)


def rows_of_run(run: Run) -> list[dict[str, Any]]:
    """Return a row for each accuracy of a finished run, but none for a group of repetitions."""
    if run.is_group or not run.result:
        return []
    chain = [run]
    """The run, the run of its pretrained weights, and so on."""
    while (source := chain[-1].pretrained) is not None and (above := _run_at(source)) is not None:
        chain.append(above)
    scores = {name: 1 - accuracy for name, accuracy in run.accuracies.items()}
    row = _about(run, chain)
    row |= {"error": scores.get("top-1"), "error_real": scores.get(REAL_LABELS)}
    if run.task in TRAININGS:
        return _rows_of_training(run, row)
    base = next((each for each in chain if each.task in TRAININGS), None)
    if base is not None:
        step = chain[chain.index(base) - 1].record.parents[0].checkpoint
        row |= {**_about_training(base, step), "weights": os.path.relpath(base.directory)}
    elif source is not None:  # imported weights
        row["weights"] = os.path.relpath(source)
        if (card := _card_in(source)) is not None:
            row |= about_model(card) | {"step": card.step, "trained_on": card.dataset}
    if run.task == "tune":
        row |= _curves(run)
    neighbors = {
        int(name.rpartition(" ")[2]): score
        for name, score in scores.items()
        if name.startswith("top-1, k = ")
    }
    return [row | {"neighbors": k, "error": error} for k, error in neighbors.items()] or [row]


def _about(run: Run, chain: Sequence[Run]) -> dict[str, Any]:
    """Return the columns that follow from the settings of all runs in `chain` (see
    `rows_of_run`)."""
    trained = next((each for each in chain if each.task == "tune"), run)
    manifest = run.manifest
    split = manifest.splits.get(run.split) if manifest else None
    recipes = [_recipe(each) for each in chain]
    repetition = [each.params.get(key, "") for each in chain for key in REPEATED]
    fold = trained.data.get("fold")
    labels = {axis: label for each in chain[::-1] for axis, label in each.record.labels.items()}
    row: dict[str, Any] = {
        "plan": run.record.plan, "stage": run.record.stage, "member": run.record.member,
        "labels": json.dumps(labels), "run": str(run.directory), "task": run.task,
        "commit": run.tags.get("mlflow.source.git.commit"), "hardware": run.tags.get("hardware"),
        "began_ms": run.began_ms, "model": run.model_name,
        "recipe": _hash(recipes),
        "family": _hash([_kept(flatten(each.settings), *SCALED) for each in chain]),
        "repetition": json.dumps(repetition), "fold": None if fold is None else str(fold),
        "start": _start(run, chain), "target": run.dataset_name,
        "benchmark": run.tags.get("target"),
        "target_hash": manifest.content_hash if manifest else None, "split": run.split,
        "num_test": split.num_samples if split else None,
        "num_views": run.settings.get("num_views"), "images_per_s": run.result.get("images_per_s"),
        "loss": run.result.get("eval/loss"),
    }  # fmt: skip
    row["method"] = run.task
    if run.task == "pretrain":
        row["method"] = None if run.record.parents else "scratch"
    elif run.task == "evaluate":
        is_tuned = trained.task == "tune"
        row["method"] = "tta" if is_tuned and run.settings.get("num_views") else None
    if run.task not in TRAININGS:
        row["own_seed"] = trained.record.seed
        row["own_lr"] = float(trained.params.get("optimizer.lr", "nan"))
        row["own_augmented"] = is_augmented(trained)
    return row


def _recipe(run: Run) -> list[str]:
    return [run.model_name, run.dataset_name, run.tags.get("origin", ""), *_kept(run.params)]


def _kept(params: Mapping[str, Any], *apart: str) -> list[str]:
    apart = (*REPEATED, *APART, *apart)
    return [
        f"{key}={value}"
        for key, value in sorted(params.items())
        if not any(key == free or key.startswith(f"{free}.") for free in apart)
    ]


def _hash(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _start(run: Run, chain: Sequence[Run]) -> str:
    """Return a description of the earlier trainings, the last training first: "cifar10, of
    imagenet21k for 400 epochs"."""
    parts = []
    for below, each in pairwise(chain):
        if each.task in TRAININGS:
            length = each.length_at(below.record.parents[0].checkpoint)
            without = "" if is_augmented(each) else " without DA"
            parts.append(f"{_benchmark(each)} for {plain_length(length)}{without}")
        elif each.task == "tune":
            is_own = run.task == "evaluate" and below is run and _benchmark(each) == _benchmark(run)
            parts += [] if is_own else [_benchmark(each)]
    first = chain[-1]
    if first.record.parents:  # imported weights, or weights of a deleted run
        origin = next((each.tags["origin"] for each in chain if each.tags.get("origin")), "")
        public = PUBLIC.search(origin)
        if first.record.parents[0].record is not None or not origin:
            parts.append("unknown")
        else:
            parts.append(
                f"published imagenet21k weights ({public[1]} epochs)" if public else origin
            )
    return ", of ".join(parts)


def _benchmark(run: Run) -> str:
    return run.tags.get("target") or run.dataset_name


def plain_length(length: str) -> str:
    """Return `50epochs` as `50 epochs`, and `1_000 epochs` as `1000 epochs`."""
    return re.sub(r"^(\d+) ?(epochs?)$", r"\1 \2", length.strip().replace("_", ""))


def is_augmented(run: Run) -> bool:
    if run.task in ("probe", "knn"):
        return bool(run.settings.get("num_views"))
    augment = run.settings.get("augment") or {}
    return any(augment.get(name) for name in AUGMENTATIONS)


def _rows_of_training(run: Run, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for the end, and for each milestone with an evaluation in the event log."""
    row["weights"] = str(run.directory)
    last, rows = int(run.result.get("step", 0)), []
    _, losses, accuracies = (dict(zip(*curve, strict=True)) for curve in run.curves(*CURVES))
    milestones = (run.settings.get("checkpoint") or {}).get("milestones") or ()
    for step in sorted({run.step_at(length) for length in milestones}):
        if step in accuracies and step < last:
            scores = {"error": 1 - accuracies[step], "loss": losses.get(step)}
            about = {**_about_training(run, step), "images_per_s": None, "error_real": None}
            rows.append({**row, **about, **scores})
    return [*rows, {**row, **_about_training(run, last), **_curves(run)}]


def _about_training(run: Run, step: int) -> dict[str, Any]:
    settings, data, card = run.settings, _data_of(run), _card_in(run.directory)
    train, optimizer = settings.get("train") or {}, settings.get("optimizer") or {}
    about: dict[str, Any] = {
        name: (train | optimizer).get(name)
        for name in ("seed", "global_batch_size", "lr", "weight_decay")
    }
    about |= {"step": step, "optimizer": optimizer.get("name"), "augmented": is_augmented(run)}
    about["length"] = (
        plain_length(run.length_at(step)) if step else run.params.get("train.duration")
    )
    if card is not None:
        about |= about_model(card)
    else:
        with suppress(ValueError):  # settings without a model, or of another version
            about["model"] = model_words(SPEC.validate_python(settings.get("model")))
    if "global_batch_size" in train:
        samples = about["samples"] = step * train["global_batch_size"]
        if data is not None:
            num_samples, name = data
            about |= {"images": num_samples, "epochs": samples / num_samples, "trained_on": name}
        if about.get("multiply_adds"):
            about["compute"] = 3.0 * about["multiply_adds"] * samples
            about["flop"] = 2 * about["compute"]
    return about


def model_words(spec: AnySpec) -> str:
    """Return the model's label, and its settings that are neither defaults nor in the label."""
    hidden = [
        f"{name} {getattr(spec, name)}"
        for name, field in type(spec).model_fields.items()
        if not field.is_required()
        and getattr(spec, name) != field.default
        and spec.model_copy(update={name: field.default}).label == spec.label
    ]
    return ", ".join([spec.label, *hidden])


def about_model(card: ModelCard) -> dict[str, Any]:
    spec, size = card.model, card.image_size
    cost = cost_of(spec, num_classes=len(card.classes), image_size=size)
    width, omega = width_and_connections(spec, image_size=size)
    about: dict[str, Any] = {"model": model_words(spec), "width": width, "omega": omega}
    about |= {name: getattr(spec, name, None) for name in ("kind", "depth", "patch_size")}
    if cost.multiply_adds:  # unknown for other models of timm
        about |= {"multiply_adds": cost.multiply_adds, "parameters": cost.num_parameters}
        about["block_parameters"] = num_block_parameters(spec, image_size=size)
    match spec:
        case MlpSpec():
            about["gamma"] = spec.expansion if spec.bottleneck == "inverted" else 1.0
        case MixerSpec():
            tokens, is_single = spec.tokens(image_size=size), spec.layers_per_mixing == 1
            sides = (tokens, spec.num_channels)
            hidden = sides if is_single else spec.hidden_sizes(num_tokens=tokens)
            about |= {"kind": "smixer" if is_single else "mixer", "tokens": tokens}
            about |= {"channels": spec.num_channels}
            about["gamma"] = max(hidden[0] / tokens, hidden[1] / spec.num_channels)
            about["permuted_blocks"] = sum(map(spec.is_permuted, range(spec.depth)))
        case SparseMlpSpec():
            about |= {"density": spec.density, "channels": spec.num_channels}
            about["gamma"] = spec.expansion or 1.0
    if width is not None and "gamma" in about:
        about["hidden_width"] = about["gamma"] * width
    return about


def _curves(run: Run) -> dict[str, Any]:
    """Return the loss and error curves of the event log, with steps converted to epochs."""
    train, test, top1 = run.curves(*CURVES)
    data, batch = _data_of(run), (run.settings.get("train") or {}).get("global_batch_size")
    if data is None or batch is None:
        return {}
    curves: dict[str, Any] = {}

    def means(values: Sequence[float]) -> list[float]:
        parts = np.array_split(values, min(len(values), LONGEST_CURVE))
        return [float(part.mean()) for part in parts]

    for name, (steps, values) in (("train", train), ("test", test)):
        if steps:
            epochs = [step * batch / data[0] for step in means(steps)]
            curves |= {f"{name}_epochs": epochs, f"{name}_losses": means(values)}
    if train[0]:
        curves["train_loss"] = float(np.mean(train[1][-max(1, len(train[1]) // 10) :]))
    if test[0]:
        curves["test_errors"] = [1 - value for value in means(top1[1])]
    return curves


def _data_of(run: Run) -> tuple[int, str] | None:
    """Return the number of samples in an epoch and the name of the training data. Return None if
    the data cannot be read."""
    if run.data.get("stream"):
        return run.data["samples_per_epoch"], run.dataset_name
    extra = [
        {**each, "dataset": str(run.path_of(each["dataset"]))}
        for each in run.data.get("extra_datasets") or ()
    ]
    data = {**run.data, "dataset": str(run.dataset), "extra_datasets": extra}
    return _load_data(json.dumps(data))


@lru_cache(maxsize=64)
def _load_data(settings: str) -> tuple[int, str] | None:
    try:
        data = load_training_data(validate(DataSettings, json.loads(settings)))
    except (ValueError, OSError) as problem:
        print(f"{problem} Runs with this data get no epochs or curves.", file=sys.stderr)
        return None
    return data.num_samples, data.name
