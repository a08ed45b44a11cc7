"""The note, the tags and the datasets on a run's page in MLflow."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.manifest import Manifest, load_index
from data_prep.settings import without_commands
from pretrain.config import PretrainSettings
from pretrain.data.datasets import Part, StreamData, TrainingData
from pretrain.ranks.launch import LAUNCHED_WITH
from pretrain.tracking.node import describe_hardware

LABEL_COLUMN = 2
DIGEST_LENGTH = 32
"""Number of digits of a content hash in MLflow's datasets, where at most 36 fit. The run's
parameters have all 64."""


def run_tags(*, dataset: str, target: str, model: str) -> dict[str, str]:
    """Return the tags of every run, without the note (see `with_note`)."""
    return {
        "mlflow.source.name": shown_command(sys.argv),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git_commit(),
        "hardware": describe_hardware(),
        "dataset": dataset,
        "target": target,
        "model": model,
    } | slurm_tags()


def with_note(
    tags: dict[str, str], *, title: str, lines: Sequence[str] = (), run_dir: Path
) -> dict[str, str]:
    """Return the tags with a Markdown note. The run's page shows the note at the top."""
    on_slurm = (
        f"; on SLURM: job {tags['slurm.job_id']} on {tags['slurm.nodes']}"
        if "slurm.job_id" in tags
        else ""
    )
    code = f"code {tags['mlflow.source.git.commit']}{on_slurm}"
    place = f"In `{run_dir.absolute()}`, by `{tags['mlflow.source.name']}`, {code}"
    return tags | {"mlflow.note.content": "\n\n".join([title, *lines, place])}


def training_tags(
    settings: PretrainSettings, data: TrainingData, *, num_weights: int
) -> dict[str, str]:
    engine, optimizer, train = settings.engine, settings.optimizer, settings.train
    shards = (
        len(data.urls)
        if isinstance(data, StreamData)
        else sum(len(part.content.shards) for part in data.parts)
    )
    target = "+".join(target_of(part.manifest) for part in data.parts)
    return with_note(
        run_tags(dataset=data.name, target=target, model=settings.model.label),
        title=(
            f"**{settings.model.label}**, {num_weights / 1e6:,.2f} M weights, on **{data.name}**"
            f" ({data.num_samples:,} images in {shards:,} shards, {len(data.classes):,} classes,"
            f" {data.image_size} px)"
        ),
        lines=[
            (
                f"{train.duration} at a batch of {train.global_batch_size:,}; {optimizer.name} at"
                f" {optimizer.lr:g}, {settings.schedule.name}; {engine.precision}, ZeRO"
                f" {engine.zero_stage}"
            ),
            "The same command resumes the run.",
        ],
        run_dir=Path(settings.run_dir),
    ) | {"duration": train.duration}  # MLflow's parameter keeps the first duration


def slurm_tags() -> dict[str, str]:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    return (
        {"slurm.job_id": job, "slurm.nodes": os.environ.get("SLURM_JOB_NODELIST", "")}
        if job
        else {}
    )


KNOWN = ("cifar", "stl10", "tinyimagenet", "mnist", "imagenet1k", "imagenet21k")
"""Kinds of sources with a common name, which replaces the dataset's own name."""


def target_of(manifest: Manifest) -> str:
    """Return the dataset's common name (cifar10, stl10, imagenet1k), or its own name."""
    kind = manifest.source.get("kind")
    if kind not in KNOWN or manifest.source.get("variant", kind) != kind:  # e.g. Fashion-MNIST
        return manifest.name
    return f"{kind}{len(manifest.classes)}" if kind == "cifar" else str(kind)


def datasets_of(data: TrainingData) -> tuple[dict[str, str], ...]:
    """Return one entry for each training part (a stream has none), and one for the evaluation
    part."""
    used = [(part, "training") for part in data.parts if not data.settings.stream]
    evaluated = data.eval_part()
    return tuple(
        dataset_of(part, context)
        for part, context in used + ([(evaluated, "evaluation")] if evaluated else [])
    )


def dataset_of(part: Part, context: str) -> dict[str, str]:
    manifest = part.manifest
    tensor = {"dtype": "uint8", "shape": [-1, 3, manifest.image_size, manifest.image_size]}
    features = [{"name": "images", "type": "tensor", "tensor-spec": tensor}]
    labels = [
        {"name": "labels", "type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1]}}
    ]
    spec = {"features": json.dumps(features), "targets": json.dumps(labels)}
    return {
        "name": f"{manifest.name} {part.split}"[:500],
        "digest": manifest.content_hash[:DIGEST_LENGTH],
        "source_type": "local",
        "source": json.dumps({"uri": str(part.directory.resolve())}),
        "schema": json.dumps({"mlflow_tensorspec": spec}),
        "profile": json.dumps(summary(part)),
        "context": context,
    }


def summary(part: Part) -> dict[str, Any]:
    """Return facts about the split, or about its fold if the run uses one fold."""
    manifest, split = part.manifest, part.content
    counts = list(split.class_counts)
    if part.chosen is not None:
        shards = [shard for shard in split.shards if shard.num_samples]
        labels = np.concatenate(
            [load_index(part.directory, shard)[:, LABEL_COLUMN] for shard in shards]
        )
        counts = np.bincount(labels[part.chosen]).tolist()
    counts = [count for count in counts if count]
    return {
        "split": part.split,
        "num_samples": part.num_samples,
        "num_classes": len(manifest.classes),
        "fewest_per_class": min(counts, default=0),
        "most_per_class": max(counts, default=0),
        "num_shards": len(split.shards),
        "num_bytes": sum(shard.num_bytes for shard in split.shards),
        "encoding": manifest.encoding,
        "image_size": manifest.image_size,
        "channel_mean": [round(value, 4) for value in manifest.channel_mean],
        "channel_std": [round(value, 4) for value in manifest.channel_std],
        "num_rejected": manifest.num_rejected,
        "content_hash": manifest.content_hash,
    }


_OPTIONS = re.compile(r"^([\w.]*storage[\w.]*|(?:data|checkpoint)(?==.*storage))=.*", re.DOTALL)
"""Pattern of overrides with storage options, which may contain secrets."""


def shown_command(words: list[str]) -> str:
    """Return the command line as typed, without storage options and without the commands of a
    stream."""
    program = Path(words[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    known = [_OPTIONS.sub(r"\1=...", _given(word)) for word in words[1:]]
    return shlex.join(
        [
            name,
            *(without_commands(word) for word in known),
            *os.environ.get(LAUNCHED_WITH, "").split(),
        ]
    )


def _given(word: str) -> str:
    """Return the original path of a config if `word` is a cluster job's copy, otherwise `word`."""
    copy = re.fullmatch(r"([^=]*)/jobs/snapshots/[^/]+(/given)?/(.+)", word)
    if copy is None:
        return word
    root, is_whole, path = copy.groups()
    return path if not is_whole else f"/{path}".removeprefix(f"{root}/")


@cache
def git_commit() -> str:
    """Return the commit of the running code, with -dirty if the code was changed, or the version of
    an installed package. A cluster job's copy of the code contains the commit."""
    here = Path(__file__).parents[1]
    said = here.parent / "COMMIT"
    try:
        if said.exists():
            return said.read_text().strip() or "unknown"
        # a git repository around an installed package is not ours
        if not (here.parent / "pyproject.toml").exists():
            return f"wide_mlps-{version('wide-mlps')}"
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
