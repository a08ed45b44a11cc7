"""README.md of an export: a model card as the Hugging Face hub reads it, filled from what is known, and "not stated" for the rest.

Pure: facts in, text out. No torch here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.export.config import ONNX, PT2, ExportSettings
from finetune.runs import Result, Run
from pretrain.checkpoints.card import ModelCard, timms_own
from pretrain.models.cost import cost_of
from pretrain.models.spec import TIMM_NORM_EPS, MixerSpec

NUM_NAMED = 10
UNKNOWN = "not stated"
TASKS = {
    "pretrain": "training",
    "tune": "fine-tuning",
    "scratch": "training from scratch",
    "probe": "linear probe",
    "knn": "nearest neighbours",
    "evaluate": "evaluation",
}
RECIPE = ("optimizer", "schedule", "train", "augment", "engine")
"""Sections of a training's config, without its paths."""
PROBE = ("lrs", "lr", "weight_decay", "weight_decays", "epochs", "optimizer", "batch_size", "seed")


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
    front = yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True, width=120)
    card = facts.card
    parts = [
        f"---\n{front}---",
        f"# {card.model.label} · {card.dataset}",
        _origin(facts),
        _table(_model_rows(facts)),
        "## Training",
        _training(facts),
        "## Results",
        _results(facts.results),
        "## Use",
        _use(facts),
        "## Limitations",
        f"Intended use, biases, and what the pictures show: {UNKNOWN}. "
        f"The model answers with one of its {len(card.classes):,} classes for any picture.",
        "## License",
        _license(facts.settings.license),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(facts: Facts) -> dict[str, Any]:
    card, own = facts.card, [each for each in facts.results if each.is_of_these_weights]
    front: dict[str, Any] = {
        "license": facts.settings.license,
        "library_name": "timm" if timms_own(card) else "wide-mlps",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "wide-mlps", card.model.kind.replace("_", "-")],
        "datasets": [card.dataset],
    }
    if own:
        front |= {"metrics": ["accuracy"], "model-index": [{"name": card.model.label, "results": _index(own)}]}
    return front


def _index(results: list[Result]) -> list[dict[str, Any]]:
    """The hub's own form of results; only of the weights as they are here."""
    return [
        {
            "task": {"type": "image-classification"},
            "dataset": {"name": each.dataset, "type": each.dataset, "split": each.split},
            "metrics": [{"type": "accuracy", "name": each.metric, "value": round(each.value, 6)}],
        }
        for each in results
    ]


def _origin(facts: Facts) -> str:
    card = facts.card
    if card.origin:
        return f"Imported from a public file ({card.origin}); its training is not ours, and what is not below is {UNKNOWN}."
    return f"An image classifier for {len(card.classes):,} classes, trained and exported with wide-mlps."


def _model_rows(facts: Facts) -> list[tuple[str, str]]:
    card = facts.card
    cost = cost_of(card.model, num_classes=len(card.classes), image_size=card.image_size)
    fields = ", ".join(f"{name} {_plain(value)}" for name, value in card.model.model_dump(mode="json").items())
    names = ", ".join(card.classes[:NUM_NAMED]) + (", ..." if len(card.classes) > NUM_NAMED else "")
    return [
        ("Architecture", f"{card.model.label} ({fields})"),
        ("Parameters", f"{facts.num_parameters:,}"),
        ("Multiply-adds", f"{cost.multiply_adds:,} for one image"),
        ("Input", f"{card.image_size} x {card.image_size} pixels, RGB, on the scale 0..1, then normalised"),
        ("Pictures", _squares(card)),
        ("Mean", _row(card.channel_mean)),
        ("Std", _row(card.channel_std)),
        ("Classes", f"{len(card.classes):,}: {names}"),
        ("Weights", f"sha256 `{facts.weights_sha256}`{_renamed(card)}"),
    ]


def _squares(card: ModelCard) -> str:
    made = f"squares by {card.stored_crop} and {card.stored_interpolation}" if card.stored_crop else UNKNOWN
    return f"{made}; fed with {card.fed_interpolation}"


def _renamed(card: ModelCard) -> str:
    """Of weights that plain timm takes."""
    if timms_own(card) is None or not isinstance(card.model, MixerSpec):
        return ""
    eps = card.model.norm_eps
    scaled = (
        f", the residual stream scaled by {math.sqrt(TIMM_NORM_EPS / eps):.4g}, for timm's norms have an epsilon of "
        f"{TIMM_NORM_EPS:g} where this model had {eps:g}"
    )
    return " of the checkpoint; here under timm's names" + (scaled if eps != TIMM_NORM_EPS else "")


def _training(facts: Facts) -> str:
    card, run = facts.card, facts.run
    is_same = run is not None and run.manifest is not None and run.manifest.content_hash == card.content_hash
    num_images = run.num_images if run is not None and is_same else None
    images = f", {num_images:,} images" if num_images is not None else f", number of images {UNKNOWN}"
    content = f", content `{card.content_hash}`" if card.content_hash else ""
    rows = [
        ("Data", f"{card.dataset}{images}{content}"),
        ("Started from", (run.started_from if run else "") or UNKNOWN),
        ("Step", f"{card.step:,}" if card.step else UNKNOWN),
        ("Run", run.name if run else UNKNOWN),
        ("Code", f"commit `{run.commit}`" if run and run.commit not in ("", "unknown") else UNKNOWN),
    ]
    if run is None:
        return f"{_table(rows)}\n\nRecipe: {UNKNOWN}."
    sections = RECIPE if "train" in run.settings else PROBE
    settings = {name: run.settings[name] for name in sections if name in run.settings}
    recipe = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)
    return f"{_table(rows)}\n\nRecipe:\n\n```yaml\n{recipe}```"


def _results(results: Sequence[Result]) -> str:
    if not results:
        return f"{UNKNOWN.capitalize()}: no finished evaluation, probe or tuning of these weights was found."
    header = ("task", "dataset", "split", "metric", "value", "run")
    rows = [
        (
            TASKS[each.task] + ("" if each.is_of_these_weights else " *"),
            each.dataset,
            each.split,
            each.metric,
            f"{each.value:.1%}" if abs(each.value) <= 1 else f"{each.value:g}",
            each.run,
        )
        for each in results
    ]
    note = "\n\n\\* of what was trained on top of these weights, or of another step; the others are of the weights here."
    return _table(rows, header=header) + (note if any(not each.is_of_these_weights for each in results) else "")


def _use(facts: Facts) -> str:
    settings, size = facts.settings, facts.card.image_size
    parts = [
        "In timm (from the hub, or `local-dir:DIRECTORY`), which has this architecture:"
        if timms_own(facts.card)
        else "In timm (from the hub, or `local-dir:DIRECTORY`) together with wide-mlps, the Python package that registers the "
        "architecture; timm alone does not know it:",
        f"```python\nimport timm\n{'' if timms_own(facts.card) else 'import pretrain.models.timm_names'}\n\n"
        'model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n```",
        "With the commands of wide-mlps:",
        "```sh\nfinetune evaluate DIRECTORY DATASET\nfinetune tune CONFIG pretrained=DIRECTORY\n```",
    ]
    shape = f"(batch, {size}, {size}, 3), uint8" if settings.with_preprocessing else f"(batch, 3, {size}, {size}), float32"
    name = input_name(settings)
    given = f"{name}, {shape}, " + ("as decoded" if settings.with_preprocessing else "normalised as above")
    if "onnx" in settings.graphs:
        parts += [
            f"Without wide-mlps, under ONNX runtime ({given}):",
            "```python\nimport onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{ONNX}")\n'
            f'(logits,) = session.run(None, {{"{name}": {name}}})\n```',
        ]
    if "torch" in settings.graphs:
        parts += [
            f"Without wide-mlps, in torch alone ({given}):",
            f'```python\nimport torch\n\nmodel = torch.export.load("{PT2}").module()\nlogits = model({name})\n```',
        ]
    return "\n\n".join(parts)


def input_name(settings: ExportSettings) -> str:
    return "pictures" if settings.with_preprocessing else "images"


def _license(given: str) -> str:
    if given == "unknown":
        return f"{UNKNOWN.capitalize()}. Whoever publishes these weights fills it in here and as `license` above."
    return f"{given}, as stated by whoever exported these weights."


def _row(values: tuple[float, float, float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _plain(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _table(rows: Sequence[tuple[str, ...]], *, header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
