"""Points: what finished plans have reached, one row for each (run, checkpoint, downstream result),
for every figure and fit.

A pretraining gives a point for its end and for each length that its checkpoint.keep_at kept; a
probe, a k-NN, a tuning and an evaluation one each, beside the weights that they looked at. What
cannot be known (a pixel baseline has no model) is null. Runs are read by finetune.runs alone; no
torch here.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from analysis.output import write_table
from analysis.tables.table import is_augmented
from cluster import plan_file
from cluster.plan_file import Plan, Stage
from cluster.work import place_of
from data_prep.errors import SettingsError
from data_prep.manifest import DatasetError
from data_prep.publish import sha256_of
from data_prep.settings import validate
from finetune.runs import Curve, Run, card_of, read_run, run_of
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.run import list_checkpoints, run_and_length, step_of
from pretrain.config import DataSettings
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.models.cost import cost_of, num_block_parameters, width_and_connections
from pretrain.models.spec import MixerSpec, MlpSpec, SparseMlpSpec
from pretrain.tracking.run_tags import git_commit

STAGES = ("pretrain", "probe", "knn", "tune", "evaluate")
"""Kinds of work that end with an accuracy."""
CURVES, LONGEST_CURVE = ("train/loss", "eval/loss", "eval/top1"), 200
_run_at, _card_in = lru_cache(maxsize=1024)(run_of), lru_cache(maxsize=1024)(card_of)
"""Members share what they look at, and one run has one model."""
VARIABLES = plan_file.VARIABLES
"""What figures tell points apart by."""


@dataclass(frozen=True)
class Point:
    """A row; the names of the fields are those of the columns."""

    plan: str
    """The name of its file."""
    stage: str
    member: int
    labels: str
    """JSON: what its axes call it, {"model.width": "64", "seed": "0"}, and those of the run that it
    looks at."""
    run: str
    """The directory of the result."""
    task: str
    """pretrain, scratch (by `finetune tune`), probe, knn, tune or evaluate."""
    weights: str | None = None
    """The run that the weights were pretrained by, itself where it is one; a folder of weights
    where they were imported."""
    step: int | None = None
    """Of these weights in that pretraining, as the next seven."""
    epochs: float | None = None
    """T = samples / N: how often each picture was seen."""
    samples: int | None = None
    images: int | None = None
    """N: different ones."""
    compute: float | None = None
    """C as paper B counts it: 3 x multiply-adds of one picture x samples."""
    flop: float | None = None
    """2 C: a multiply-add is two."""
    trained_on: str | None = None

    model: str | None = None
    """Its label, such as B-12/Wi-1024."""
    kind: str | None = None
    """mlp, mixer, sw_mlp, structured or timm; a Mixer of one layer a mixing is smixer."""
    tokens: int | None = None
    """S"""
    channels: int | None = None
    """C"""
    width: int | None = None
    """m: S C of a Mixer."""
    gamma: float | None = None
    """Hidden width of a block by its width; 1 where nothing is hidden."""
    hidden_width: float | None = None
    """gamma m, the greatest width."""
    omega: float | None = None
    """Connections of a layer."""
    density: float | None = None
    """p of a SW-MLP."""
    depth: int | None = None
    patch_size: int | None = None
    permuted_blocks: int | None = None
    """How many blocks of a Mixer are randomly permuted."""
    parameters: int | None = None
    """P"""
    block_parameters: int | None = None
    """P without stem and head."""
    multiply_adds: int | None = None
    """Of one picture forward."""

    seed: int | None = None
    """Of the pretraining."""
    own_seed: int | None = None
    """Of what was trained on top of it."""
    optimizer: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    global_batch_size: int | None = None
    augmented: bool | None = None
    """Any of crop, flip, auto-augment, erasing and mixing in the pretraining."""
    own_augmented: bool | None = None
    """In what was trained on top of it: a probe's views count."""
    views: int | None = None
    """Of an evaluation or a probe."""

    target: str | None = None
    """The dataset that the accuracy is on, its content's hash, its split and how many pictures that
    has."""
    target_hash: str | None = None
    split: str | None = None
    num_test: int | None = None
    error: float | None = None
    """1 - top-1."""
    error_real: float | None = None
    """By ReaL labels."""
    loss: float | None = None
    train_loss: float | None = None
    """At the end, the mean over the last tenth of the journal."""
    images_per_s: float | None = None

    train_epochs: list[float] | None = None
    """The journal's curves, at most 200 points each: means over equally many steps."""
    train_losses: list[float] | None = None
    test_epochs: list[float] | None = None
    test_losses: list[float] | None = None
    test_errors: list[float] | None = None

    @property
    def label_of(self) -> Mapping[str, str]:
        return json.loads(self.labels)  # type: ignore[no-any-return]


_TYPES: dict[Any, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_TYPES[list[float]] = pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        (
            each.name,
            _TYPES[next((kind for kind in get_args(each.type) if kind in _TYPES), each.type)],
        )
        for each in fields(Point)
    ]
)


def table_of(points: Sequence[Point], *, metadata: Mapping[str, str]) -> pa.Table:
    return pa.Table.from_pylist(
        [asdict(point) for point in points], schema=SCHEMA.with_metadata(dict(metadata))
    )


def write(points: Sequence[Point], path: Path, *, plans: Iterable[str] = ()) -> None:
    """With the commit, and the hashes of the plans."""
    hashes = {f"sha256 of {plan}": sha256_of(Path(plan)) for plan in plans}
    write_table(table_of(points, metadata={"commit": git_commit(), **hashes}), path)


def read_points(paths: Iterable[Path]) -> list[Point]:
    """Of files that `analysis points` has written; columns of later versions are left out, and of
    earlier ones null."""
    import pyarrow.parquet as pq

    known, found = {each.name for each in fields(Point)}, list[Point]()
    for path in paths:
        try:
            rows = pq.read_table(path).to_pylist()
            found += [
                Point(**{name: value for name, value in row.items() if name in known})
                for row in rows
            ]
        except FileNotFoundError:
            raise ValueError(
                f"{path}: no such file; `analysis points PLAN --out {path}` writes it"
            ) from None
        except (pa.ArrowException, OSError, TypeError) as problem:
            words = str(problem).partition("\n")[0]
            raise ValueError(
                f"{path}: holds no points ({words}); `analysis points PLAN --out FILE.parquet`"
                " writes them"
            ) from None
    return found


def collect(plans: Sequence[Plan], *, partial: bool = False) -> list[Point]:
    """`partial`: of what is finished; else what is not is an error that names it."""
    names = [Path(plan.path).stem for plan in plans]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingsError(
            f"{twice[0]}: two of the plans are called so, and points tell plans apart by their"
            " names; leave one out"
        )
    found, undone = list[Point](), list[str]()
    for plan in plans:
        labels = dict[Path, Mapping[str, str]]()
        for stage in [stage for stage in plan.stages if stage.kind in STAGES]:
            points = list(_of_stage(stage, plan=Path(plan.path).stem, undone=undone, labels=labels))
            if not points and not undone:
                raise SettingsError(
                    f"{plan.path}: {stage.name} has no accuracies; its configs need data.eval_split"
                )
            found += points
    if undone and not partial:
        more = f" and {len(undone) - 3} more" if len(undone) > 3 else ""
        raise SettingsError(
            f"{', '.join(undone[:3])}{more}: not finished; run the plan to its end, or give"
            " --partial"
        )
    if not found:
        raise SettingsError(
            f"{', '.join(plan.path for plan in plans)}: nothing in it is finished; run it first"
        )
    return found


def _of_stage(
    stage: Stage, *, plan: str, undone: list[str], labels: dict[Path, Mapping[str, str]]
) -> Iterator[Point]:
    """`labels`: by run; what a member looks at has its labels from the stages before."""
    for member in stage.members:
        source = place_of(run_and_length(member.work.pretrained or "")[0])
        above = next(
            (labels[place] for place in (source, source.parent) if place in labels), {}
        )  # or a run of one seed
        own = {axis: label for axis, label in member.labels.items() if axis != "name"}
        labels[place_of(member.work.writes)] = {**above, **own}
        if not member.work.is_finished():
            undone.append(f"{plan}: {stage.title(member)}")
            continue
        named = json.dumps(labels[place_of(member.work.writes)])
        place = {"plan": plan, "stage": stage.name, "member": member.index, "labels": named}
        run = read_run(Path(member.work.writes))
        repeats = (
            [read_run(run.directory / name) for name in run.result["runs"]]
            if run.is_group
            else [run]
        )
        for repeat in repeats:
            yield from _of_run(repeat, place)


def _of_run(run: Run, stage: Mapping[str, Any]) -> Iterator[Point]:
    known: dict[str, Any] = {
        **stage,
        "run": str(run.directory),
        "task": run.task,
        "images_per_s": run.result.get("images_per_s"),
    }
    manifest = run.manifest
    known |= {"target": run.dataset_name, "split": run.split}
    if manifest is not None:
        split = manifest.splits.get(run.split)
        known |= {
            "target_hash": manifest.content_hash,
            "num_test": split.num_samples if split else None,
        }
    top1 = next(
        (run.accuracies[words] for words in ("top-1", *run.accuracies) if words in run.accuracies),
        None,
    )
    right = {"error": top1, "error_real": run.accuracies.get("top-1, ReaL labels")}
    scores: dict[str, Any] = {name: 1 - value for name, value in right.items() if value is not None}
    scores["loss"] = run.result.get("eval/loss")
    if run.task in ("pretrain", "scratch"):
        yield from _of_training(run, {**known, "weights": str(run.directory)}, scores)
        return
    chain = [run]  # to the run that was pretrained; a tuning in between has weights of it
    while (
        chain[-1].task not in ("pretrain", "scratch")
        and (source := chain[-1].pretrained) is not None
    ):
        above = _run_at(source)
        if above is None:
            break
        chain.append(above)
    base = chain[-1] if chain[-1].task in ("pretrain", "scratch") else None
    weights = base.directory if base else source
    known["weights"] = weights and os.path.relpath(weights)
    if base is not None:
        known |= _of_weights(
            base, step=int(chain[-2].result.get("weights_step", base.result.get("step", 0)))
        )
    elif source is not None and (card := _card_in(source)) is not None:  # imported
        known |= _of_model(card) | {"step": card.step, "trained_on": card.dataset}
    tuned = next((each for each in chain if each.task == "tune"), run)
    own_seed = tuned.settings.get("seed", (tuned.settings.get("train") or {}).get("seed"))
    known |= {
        "own_seed": own_seed,
        "own_augmented": is_augmented(tuned),
        "views": run.settings.get("views"),
    }
    yield Point(
        **known, **scores, **(_curves(run, *run.curves(*CURVES)) if run.task == "tune" else {})
    )


def _of_training(run: Run, known: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[Point]:
    """Its end, and before that the kept checkpoints of which the journal has an evaluation."""
    last = int(run.result.get("step", 0))
    kept = (
        [step_of(each) for each in list_checkpoints(run.directory)]
        if run.settings["checkpoint"].get("keep_at")
        else []
    )
    curves = run.curves(*CURVES)
    losses, seen = (dict(zip(*each, strict=True)) for each in curves[1:])
    for step in [step for step in kept if step in seen and step < last]:
        then = {"error": 1 - seen[step], "loss": losses.get(step), "images_per_s": None}
        yield Point(**{**known, **_of_weights(run, step=step), **then})
    yield Point(**known, **_of_weights(run, step=last), **scores, **_curves(run, *curves))


def _of_weights(run: Run, *, step: int) -> dict[str, Any]:
    """Of a pretraining at one of its steps."""
    card, optimizer, train, data = (
        _card_in(run.directory),
        run.settings["optimizer"],
        run.settings["train"],
        _data_of(run),
    )
    found: dict[str, Any] = _of_model(card) if card is not None else {}
    samples = step * train["global_batch_size"]
    if data is not None:
        found |= {
            "images": data.num_samples,
            "epochs": samples / data.num_samples,
            "trained_on": data.name,
        }
    if "multiply_adds" in found:
        compute = 3.0 * found["multiply_adds"] * samples
        found |= {"compute": compute, "flop": 2 * compute}
    found |= {
        "step": step,
        "samples": samples,
        "optimizer": optimizer["name"],
        "augmented": is_augmented(run),
    }
    return found | {
        name: (train | optimizer)[name]
        for name in ("seed", "global_batch_size", "lr", "weight_decay")
    }


def _of_model(card: ModelCard) -> dict[str, Any]:
    spec, size = card.model, card.image_size
    cost = cost_of(spec, num_classes=len(card.classes), image_size=size)
    width, omega = width_and_connections(spec, image_size=size)
    found: dict[str, Any] = {
        name: getattr(spec, name, None) for name in ("kind", "depth", "patch_size")
    }
    found |= {"model": spec.label, "width": width, "omega": omega}
    if cost.multiply_adds:  # which of any other model of timm's nobody knows
        found |= {"multiply_adds": cost.multiply_adds, "parameters": cost.num_parameters}
        found["block_parameters"] = num_block_parameters(spec, image_size=size)
    match spec:
        case MlpSpec():
            found["gamma"] = spec.expansion if spec.bottleneck == "inverted" else 1.0
        case MixerSpec():
            tokens, one_layer = spec.tokens(image_size=size), spec.layers_per_mixing == 1
            found |= {
                "kind": "smixer" if one_layer else "mixer",
                "tokens": tokens,
                "channels": spec.num_channels,
            }
            across = (
                (tokens, spec.num_channels) if one_layer else spec.hidden_sizes(num_tokens=tokens)
            )
            found["gamma"] = max(across[0] / tokens, across[1] / spec.num_channels)
            found["permuted_blocks"] = sum(spec.is_permuted(block) for block in range(spec.depth))
        case SparseMlpSpec():
            found |= {
                "density": spec.density,
                "gamma": spec.expansion or 1.0,
                "channels": spec.num_channels,
            }
    if width is not None and "gamma" in found:
        found["hidden_width"] = found["gamma"] * width
    return found


def _curves(run: Run, train: Curve, test: Curve, top1: Curve) -> dict[str, Any]:
    """In epochs; {} without a journal."""
    data, batch = _data_of(run), run.settings["train"]["global_batch_size"]
    found: dict[str, Any] = {}

    def means(values: Sequence[float]) -> list[float]:
        return [
            float(each.mean()) for each in np.array_split(values, min(len(values), LONGEST_CURVE))
        ]

    for name, (steps, values) in (("train", train), ("test", test)):
        if steps and data is not None:
            found |= {
                f"{name}_epochs": [step * batch / data.num_samples for step in means(steps)],
                f"{name}_losses": means(values),
            }
    if "train_losses" in found:
        found["train_loss"] = float(np.mean(train[1][-max(1, len(train[1]) // 10) :]))
    if "test_losses" in found:
        found["test_errors"] = [1 - each for each in means(top1[1])]
    return found


def _data_of(run: Run) -> TrainingData | None:
    data = run.settings["data"]
    also = [
        {**each, "dataset": str(run.path_of(each["dataset"]))} for each in data.get("also") or ()
    ]
    return _loaded(json.dumps({**data, "dataset": str(run.dataset), "also": also}))


@lru_cache(maxsize=64)
def _loaded(data: str) -> TrainingData | None:
    try:
        return load_training_data(validate(DataSettings, json.loads(data)))
    except (DatasetError, ValueError, OSError) as problem:
        print(f"{problem}; without it epochs and curves are not known", file=sys.stderr)
        return None
