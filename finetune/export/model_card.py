"""README.md of an export: a model card for the Hugging Face hub. Unknown facts are "not stated"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub import ModelCard as HubCard

from finetune.export.config import ExportSettings
from finetune.runs import NOT_STATED, TASKS, Result, Run
from pretrain.checkpoints.card import ModelCard, timms_own
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.cost import cost_of
from pretrain.models.spec import TIMM_NORM_EPS, MixerSpec

TEMPLATE = Path(__file__).with_name("README.md.jinja")
NUM_NAMED = 10
RECIPE = (
    *("lrs", "weight_decays", "epochs", "batch_size", "seed"),
    *("optimizer", "schedule", "train", "augment", "engine"),
)
"""Config keys that the model card shows: settings of a probe, and sections of a training config.
They contain no paths."""


@dataclass(frozen=True)
class Facts:
    source: Checkpoint
    run: Run | None
    """The run that trained the weights, if known."""
    results: Sequence[Result]
    num_parameters: int
    settings: ExportSettings

    @property
    def card(self) -> ModelCard:
        return self.source.card


def readme(facts: Facts) -> str:
    card, run, settings = facts.card, facts.run, facts.settings
    recipe = {name: run.settings[name] for name in RECIPE if name in run.settings} if run else {}
    rows = []
    for each in facts.results:
        task = TASKS[each.task] + ("" if each.is_of_these_weights else " *")
        value = f"{each.value:.1%}" if abs(each.value) <= 1 else f"{each.value:g}"
        rows.append((task, each.dataset, each.split, each.metric, value, each.run))
    header = ("task", "dataset", "split", "metric", "value", "run")
    hub_card = HubCard.from_template(
        front_matter(facts),
        template_path=str(TEMPLATE),
        card=card,
        settings=settings,
        unknown=NOT_STATED,
        num_classes=f"{len(card.classes):,} classes",
        is_timms=timms_own(card) is not None,
        model=_table(_model_rows(facts)),
        training=_table(_training_rows(facts)),
        recipe=yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=100)
        if recipe
        else "",
        results=_table(rows, header) if rows else "",
        are_others=not all(each.is_of_these_weights for each in facts.results),
        place=f"hf-hub:{settings.push_to}" if settings.push_to else "DIRECTORY",
        input=input_name(settings),
    )
    return f"{hub_card}\n"


def front_matter(facts: Facts) -> ModelCardData:
    """Return the hub's metadata, with results of only the exported weights."""
    card = facts.card
    own = {each[1:5]: each for each in facts.results if each.is_of_these_weights}  # each once
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=each.dataset,
            dataset_name=each.dataset,
            dataset_split=each.split,
            metric_type="accuracy",
            metric_name=each.metric,
            metric_value=round(each.value, 6),
        )
        for each in own.values()
    ]
    return ModelCardData(
        license=facts.settings.license,
        library_name="timm" if timms_own(card) else "wide-mlps",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "wide-mlps", card.model.kind.replace("_", "-")],
        datasets=[card.dataset],
        model_name=card.model.label,
        metrics=["accuracy"] if results else None,
        eval_results=results or None,
    )


def _model_rows(facts: Facts) -> list[tuple[str, str]]:
    card, model = facts.card, facts.card.model
    macs = cost_of(model, num_classes=len(card.classes), image_size=card.image_size).multiply_adds
    fields = ", ".join(f"{name} {value}" for name, value in model.model_dump(mode="json").items())
    stored = NOT_STATED
    if card.stored_crop:
        stored = f"squares (crop={card.stored_crop}, {card.stored_interpolation})"
    renamed = ""
    if timms_own(card) is not None and isinstance(model, MixerSpec):
        renamed = " of the checkpoint. This export uses timm's names"
        if model.norm_eps != TIMM_NORM_EPS:
            scale = math.sqrt(TIMM_NORM_EPS / model.norm_eps)
            renamed += (
                f", and scales the residual stream by {scale:.4g}, because timm's norms have an"
                f" epsilon of {TIMM_NORM_EPS:g}, but the norms of this model {model.norm_eps:g}"
            )
    mean, std = (
        ", ".join(f"{value:.6g}" for value in values)
        for values in (card.channel_mean, card.channel_std)
    )
    names = ", ".join((*card.classes[:NUM_NAMED], *(["..."] * (len(card.classes) > NUM_NAMED))))
    size = card.image_size
    return [
        ("Architecture", f"{model.label} ({fields.lower()})"),
        ("Parameters", f"{facts.num_parameters:,}"),
        ("Multiply-adds", f"{macs:,} for one image" if macs else NOT_STATED),
        ("Input", f"{size} x {size} pixels, RGB, on the scale 0..1, then normalized"),
        ("Images", f"{stored}; resized with {card.fed_interpolation}"),
        ("Mean", mean),
        ("Std", std),
        ("Classes", f"{len(card.classes):,}: {names}"),
        ("Weights", f"sha256 `{facts.source.sha256}`{renamed}"),
    ]  # fmt: skip


def _training_rows(facts: Facts) -> list[tuple[str, str]]:
    card, run = facts.card, facts.run
    manifest = run.manifest if run else None
    is_same = manifest is not None and manifest.content_hash == card.content_hash
    num_images = run.num_images if run and is_same else None
    images = f"number of images {NOT_STATED}" if num_images is None else f"{num_images:,} images"
    content = f", content `{card.content_hash}`" if card.content_hash else ""
    commit = run.tags.get("mlflow.source.git.commit", "unknown") if run else "unknown"
    return [
        ("Data", f"{card.dataset}, {images}{content}"),
        ("Started from", (run.started_from if run else "") or NOT_STATED),
        ("Step", f"{card.step:,}" if card.step else NOT_STATED),
        ("Run", run.name if run else NOT_STATED),
        ("Code", NOT_STATED if commit == "unknown" else f"commit `{commit}`"),
    ]


def input_name(settings: ExportSettings) -> str:
    return "pictures" if settings.with_preprocessing else "images"


def _table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
