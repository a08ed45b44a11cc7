"""`finetune evaluate`: a checkpoint's answers on a split, and everything that is told of them.

1. every rank answers its share (`answering.py`), and the first one gathers the rows;
2. from that table alone come the scores (`scoring.py`), the files (`files.py`) and the pictures (`pictures.py`);
3. result.json is written last: a directory that has it is a whole evaluation.
"""

import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.manifest import DatasetError
from data_prep.settings import UserError
from finetune.accelerator import start_accelerator
from finetune.classes import class_numbers
from finetune.judging.answering import Views, answer
from finetune.judging.answers import Answers
from finetune.judging.config import EvaluateSettings
from finetune.judging.files import (
    CONFUSION,
    PER_CLASS,
    PREDICTIONS,
    write_confusion,
    write_per_class,
    write_predictions,
)
from finetune.judging.pictures import (
    CALIBRATION_PNG,
    CONFUSION_PNG,
    VIEWS_PNG,
    draw_calibration,
    draw_confusion,
    draw_views,
    save,
)
from finetune.judging.place import Evaluation
from finetune.judging.scoring import Confusion, PerClass, calibration, moments, overall
from finetune.recording import recorded
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.collectives import same_on_all_ranks
from pretrain.datasets import Part
from pretrain.folder import load_folder
from pretrain.models.image_model import ImageModel
from pretrain.page import target_of
from pretrain.real_labels import RealLabels
from pretrain.run import save_result
from pretrain.shards import ShardReader
from pretrain.tracker import Tracker
from pretrain.world import World

NUM_CONFUSED, NUM_EXTREME, NUM_NAMED = 30, 10, 20
"""In the result: pairs of classes, worst and best classes, pictures that do not decode."""


def evaluate_checkpoint(settings: EvaluateSettings, world: World) -> dict[str, Any] | None:
    """The result, on the first rank."""
    evaluation = Evaluation.of(settings)
    card, manifest = evaluation.card, evaluation.manifest
    numbers = class_numbers(card, manifest, dataset=settings.dataset)
    accelerator = start_accelerator(world, precision=settings.precision)
    if not same_on_all_ranks(int(evaluation.identity[:15], 16), device=accelerator.device):
        raise UserError(
            f"{settings.pretrained}: the ranks found different weights there (is it still being trained?); "
            "name one of its checkpoints/step-*"
        )
    _, model = load_folder(evaluation.checkpoint)
    part = Part(Path(settings.dataset), manifest, settings.split, numbers)
    reader = ShardReader([part], image_size=card.image_size)
    with recorded(
        settings,
        run_dir=evaluation.run_dir,
        tracking=evaluation.tracking,
        world=world,
        used=[(part, "evaluation")],
        weights=evaluation.weights,
        tags={"task": "evaluate"},
    ) as tracker:
        began_s = time.perf_counter()
        answers = _answers(evaluation, model, reader, device=accelerator.device, world=world)
        seconds = time.perf_counter() - began_s
        if answers is None:
            return None  # nothing is collective from here on, so nobody waits for the pictures
        if not len(answers):
            raise DatasetError("evaluation: no picture of the split decodes; run data_prep verify on the dataset")
        return _tell(evaluation, answers, reader, tracker, seconds=seconds)


def _answers(
    evaluation: Evaluation, model: ImageModel, reader: ShardReader, *, device: torch.device, world: World
) -> Answers | None:
    settings, card = evaluation.settings, evaluation.card
    model.to(device).eval()
    augmentation = Augmentation(
        settings.augment,
        seed=settings.seed,
        image_size=card.image_size,
        normalisation=Normalisation(card.channel_mean, card.channel_std),
        device=device,
        dtype=torch.float32,
    )
    is_half = settings.precision == "bf16"

    def logits_of(images_BCHW: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if is_half else nullcontext():
            logits: Tensor = model(images_BCHW)
        return logits

    return answer(
        logits_of,
        reader,
        augmentation,
        views=Views(settings.views, plain=settings.include_plain or settings.views == 0),
        num_classes=len(card.classes),
        local_batch_size=settings.local_batch_size,
        world=world,
    )


def _tell(
    evaluation: Evaluation, answers: Answers, reader: ShardReader, tracker: Tracker, *, seconds: float
) -> dict[str, Any]:
    """Files, pictures, books and last the result, all from the table."""
    (part,) = reader.parts
    names, numbers = part.manifest.classes, part.classes or range(len(part.manifest.classes))
    confusion = Confusion.of(answers, names=names, numbers=numbers)
    per_class = PerClass.of(answers, confusion, numbers=numbers)
    run_dir = evaluation.run_dir
    facts = {"weights_sha256": evaluation.weights.sha256, "manifest_hash": part.manifest.hash}
    facts |= {"dataset": part.manifest.name, "split": part.split}
    write_predictions(run_dir / PREDICTIONS, answers, reader, classes=evaluation.card.classes, facts=facts)
    write_per_class(run_dir / PER_CLASS, per_class, confusion, numbers=numbers)
    write_confusion(run_dir / CONFUSION, confusion)
    _draw(evaluation, answers, confusion)
    result = _result(evaluation, answers, reader, confusion, per_class) | facts | {"seconds": seconds}
    result["images_per_s"] = reader.num_samples / seconds
    result["views_per_s"] = result["images_per_s"] * evaluation.settings.num_answers
    step = evaluation.card.step
    tracker.metrics({name: value for name, value in result.items() if name.startswith("eval/")}, step=step)
    for moment in moments(answers):
        tracker.metrics({"views/top1": moment.top1, "views/loss": moment.loss}, step=moment.num_views)
    for name in (PREDICTIONS, PER_CLASS, CONFUSION, CONFUSION_PNG, CALIBRATION_PNG, VIEWS_PNG):
        if (run_dir / name).exists():
            tracker.artifact(run_dir / name, folder="evaluation")
    save_result(run_dir, result)
    views = f"_{evaluation.settings.views}views" if evaluation.settings.views else ""
    found = {f"evaluate/top1{views}": result["eval/top1"]}
    evaluation.weights.tell(tracker, found, target=f"{target_of(part.manifest)}-{part.split}")
    return result


def _draw(evaluation: Evaluation, answers: Answers, confusion: Confusion) -> None:
    settings, run_dir = evaluation.settings, evaluation.run_dir
    where = f"{evaluation.card.model.label} on {evaluation.manifest.name}, {settings.split}"
    right_N = answers.answers_NA[:, 0] == answers.labels_N
    title = f"{where}: top-1 {right_N.mean():.1%} of {len(answers):,}"
    save(draw_confusion(confusion, title=title), run_dir / CONFUSION_PNG)
    bins = calibration(answers.probabilities_NA[:, 0], right_N)
    save(draw_calibration(bins, title=where), run_dir / CALIBRATION_PNG)
    if len(answers.moments) > 1:
        save(draw_views(moments(answers), title=f"{where}: mean softmax over views"), run_dir / VIEWS_PNG)


def _result(
    evaluation: Evaluation, answers: Answers, reader: ShardReader, confusion: Confusion, per_class: PerClass
) -> dict[str, Any]:
    settings, scores = evaluation.settings, overall(answers)
    eval_scores = {
        "top1": scores.top1,
        "top5": scores.top5,
        "loss": scores.loss,
        "ece": scores.ece,
        "mce": scores.max_calibration_error,
        "brier": scores.brier,
        "entropy": scores.entropy,
        "class_top1": per_class.mean_top1,
    }
    real = _real(answers, reader, num_classes=len(evaluation.card.classes))
    if real is not None:
        eval_scores["real"] = real
    order = per_class.order()
    ranked = [(confusion.names[number], float(per_class.top1_K[number])) for number in order.tolist()]
    left_out = answers.left_out(num_samples=reader.num_samples)
    return {f"eval/{name}": value for name, value in eval_scores.items()} | {
        "identity": evaluation.identity,
        "model": evaluation.card.model.label,
        "pretrained": str(evaluation.checkpoint),
        "step": evaluation.card.step,
        "run_dir": str(evaluation.run_dir),
        "num_samples": len(answers),
        "num_unreadable": len(left_out),
        "unreadable": ["/".join(name) for name in reader.names(left_out[:NUM_NAMED])],
        "views": settings.views,
        "num_views": settings.num_answers,
        "curve": [asdict(moment) for moment in moments(answers)],
        "worst_classes": ranked[:NUM_EXTREME],
        "best_classes": ranked[::-1][:NUM_EXTREME],
        "most_confused": confusion.most_confused(NUM_CONFUSED),
    }


def _real(answers: Answers, reader: ShardReader, *, num_classes: int) -> float | None:
    real = RealLabels.of(reader.parts[0], num_answers=num_classes, device=torch.device("cpu"))
    if real is None:
        return None
    everywhere = torch.ones(len(answers), dtype=torch.bool)
    tops_N = torch.from_numpy(np.ascontiguousarray(answers.answers_NA[:, 0]))
    right, number = real.count(tops_N, answers.samples_N, everywhere).tolist()
    return float(right / number) if number else None
