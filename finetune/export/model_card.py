"""README.md of an export: a model card as the Hugging Face hub reads it, filled from what is known,
and "not stated" for the rest.

Pure: facts in, text out. No torch here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.export.config import ONNX, PT2, ExportSettings
from finetune.runs import TASKS, Result, Run
from pretrain.checkpoints.card import ModelCard, timms_own
from pretrain.models.cost import cost_of
from pretrain.models.spec import TIMM_NORM_EPS, MixerSpec

NUM_NAMED = 10
UNKNOWN = "not stated"
RECIPE = (
    "lrs",
    "weight_decays",
    "epochs",
    "batch_size",
    "seed",
    "optimizer",
    "schedule",
    "train",
    "augment",
    "engine",
)
"""Settings of a probe and sections of a training, without their paths."""


@dataclass(frozen=True)
class Facts:
    card: ModelCard
    run: Run | None
    """That made the weights; None of weights from elsewhere."""
    results: Sequence[Result]
    num_parameters: int
    weights_sha256: str
    settings: ExportSettings


def readme(facts: Facts) -> str:
    card, given = facts.card, facts.settings.license
    front = yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True, width=120)
    num_classes = f"{len(card.classes):,} classes"
    about = f"An image classifier for {num_classes}, trained and exported with wide-mlps."
    if card.origin:
        about = (
            f"Imported from a public file ({card.origin}); its training is not ours, and what is"
            f" not below is {UNKNOWN}."
        )
    terms = f"{given}, as stated by whoever exported these weights."
    if given == "unknown":
        terms = (
            f"{UNKNOWN.capitalize()}. Whoever publishes these weights fills it in here and as"
            " `license` above."
        )
    return f"""---
{front}---

# {card.model.label} · {card.dataset}

{about}

{_table(_model_rows(facts))}

## Training

{_training(facts)}

## Results

{_results(facts.results)}

## Use

{_use(facts)}

## Limitations

Intended use, biases, and what the pictures show: {UNKNOWN}. The model answers with one of its {num_classes} for any picture.

## License

{terms}
"""  # noqa: E501 (a table)


def front_matter(facts: Facts) -> dict[str, Any]:
    card, own = (
        facts.card,
        {each[1:5]: each for each in facts.results if each.is_of_these_weights}.values(),
    )  # each once
    front: dict[str, Any] = {
        "license": facts.settings.license,
        "library_name": "timm" if timms_own(card) else "wide-mlps",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "wide-mlps", card.model.kind.replace("_", "-")],
        "datasets": [card.dataset],
    }
    if own:
        results = [
            {
                "task": {"type": "image-classification"},
                "dataset": {"name": each.dataset, "type": each.dataset, "split": each.split},
                "metrics": [
                    {"type": "accuracy", "name": each.metric, "value": round(each.value, 6)}
                ],
            }
            for each in own
        ]
        # the hub's own form of results; only of the weights as they are here
        front |= {
            "metrics": ["accuracy"],
            "model-index": [{"name": card.model.label, "results": results}],
        }
    return front


def _model_rows(facts: Facts) -> list[tuple[str, str]]:
    card = facts.card
    cost = cost_of(card.model, num_classes=len(card.classes), image_size=card.image_size)
    fields = ", ".join(
        f"{name} {value}".lower() for name, value in card.model.model_dump(mode="json").items()
    )
    names = ", ".join(card.classes[:NUM_NAMED]) + (", ..." if len(card.classes) > NUM_NAMED else "")
    squares = (
        f"squares by {card.stored_crop} and {card.stored_interpolation}"
        if card.stored_crop
        else UNKNOWN
    )
    mean, std = (
        ", ".join(f"{value:.6g}" for value in values)
        for values in (card.channel_mean, card.channel_std)
    )
    renamed = ""
    if timms_own(card) is not None and isinstance(card.model, MixerSpec):
        renamed, eps = " of the checkpoint; here under timm's names", card.model.norm_eps
        if eps != TIMM_NORM_EPS:
            renamed += (
                f", the residual stream scaled by {math.sqrt(TIMM_NORM_EPS / eps):.4g}, for timm's"
                " norms have an epsilon of "
            )
            renamed += f"{TIMM_NORM_EPS:g} where this model had {eps:g}"
    return [
        ("Architecture", f"{card.model.label} ({fields})"),
        ("Parameters", f"{facts.num_parameters:,}"),
        (
            "Multiply-adds",
            f"{cost.multiply_adds:,} for one image" if cost.multiply_adds else UNKNOWN,
        ),
        (
            "Input",
            (
                f"{card.image_size} x {card.image_size} pixels, RGB, on the scale 0..1, then"
                " normalised"
            ),
        ),
        ("Pictures", f"{squares}; fed with {card.fed_interpolation}"),
        ("Mean", mean),
        ("Std", std),
        ("Classes", f"{len(card.classes):,}: {names}"),
        ("Weights", f"sha256 `{facts.weights_sha256}`{renamed}"),
    ]


def _training(facts: Facts) -> str:
    card, run = facts.card, facts.run
    is_same = (
        run is not None
        and run.manifest is not None
        and run.manifest.content_hash == card.content_hash
    )
    num_images = run.num_images if run is not None and is_same else None
    images = f"{num_images:,} images" if num_images is not None else f"number of images {UNKNOWN}"
    commit = run.tags.get("mlflow.source.git.commit", "") if run else ""
    content = f", content `{card.content_hash}`" if card.content_hash else ""
    rows = [
        ("Data", f"{card.dataset}, {images}{content}"),
        ("Started from", (run.started_from if run else "") or UNKNOWN),
        ("Step", f"{card.step:,}" if card.step else UNKNOWN),
        ("Run", run.name if run else UNKNOWN),
        ("Code", f"commit `{commit}`" if commit not in ("", "unknown") else UNKNOWN),
    ]
    if run is None:
        return f"{_table(rows)}\n\nRecipe: {UNKNOWN}."
    settings = {name: run.settings[name] for name in RECIPE if name in run.settings}
    recipe = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)
    return f"{_table(rows)}\n\nRecipe:\n\n```yaml\n{recipe}```"


def _results(results: Sequence[Result]) -> str:
    if not results:
        return (
            f"{UNKNOWN.capitalize()}: no finished evaluation, probe or tuning of these weights was"
            " found."
        )
    rows = []
    for each in results:
        task = TASKS[each.task] + ("" if each.is_of_these_weights else " *")
        value = f"{each.value:.1%}" if abs(each.value) <= 1 else f"{each.value:g}"
        rows.append((task, each.dataset, each.split, each.metric, value, each.run))
    table = _table(rows, header=("task", "dataset", "split", "metric", "value", "run"))
    if all(each.is_of_these_weights for each in results):
        return table
    return (
        f"{table}\n\n\\* of what was trained on top of these weights, or of another step; the"
        " others are of the weights here."
    )


def _use(facts: Facts) -> str:
    settings, size, name = facts.settings, facts.card.image_size, input_name(facts.settings)
    known, registered = ", which has this architecture", ""
    if timms_own(facts.card) is None:
        known = (
            " together with wide-mlps, the Python package that registers the architecture; timm"
            " alone does not know it"
        )
        registered = "import pretrain.models.timm_names"
    given = f"{name}, (batch, 3, {size}, {size}), float32, normalised as above"
    if settings.with_preprocessing:
        given = f"{name}, (batch, {size}, {size}, 3), uint8, as decoded"
    place = f"hf-hub:{settings.push_to}" if settings.push_to else "DIRECTORY"
    text = f"""In timm (from the hub, or `local-dir:DIRECTORY`){known}:

```python
import timm
{registered}

model = timm.create_model("hf-hub:{settings.push_to or "OWNER/NAME"}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

With the commands of wide-mlps:

```sh
finetune predict {place} PICTURES --out predictions.csv
finetune evaluate pretrained={place} dataset=DATASET
finetune tune CONFIG pretrained={place}
```"""
    onnx = f"""

Without wide-mlps, under ONNX runtime ({given}):

```python
import onnxruntime

session = onnxruntime.InferenceSession("{ONNX}")
(logits,) = session.run(None, {{"{name}": {name}}})
```"""
    torch = f"""

Without wide-mlps, in torch alone ({given}):

```python
import torch

model = torch.export.load("{PT2}").module()
logits = model({name})
```"""
    return (
        text
        + (onnx if "onnx" in settings.graphs else "")
        + (torch if "torch" in settings.graphs else "")
    )


def input_name(settings: ExportSettings) -> str:
    return "pictures" if settings.with_preprocessing else "images"


def _table(rows: Sequence[tuple[str, ...]], *, header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
