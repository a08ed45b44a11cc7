"""`finetune evaluate`: a checkpoint's answers on a split, and everything that follows from them.

1. every rank answers its share, and the first one gathers the rows (`answers.py`);
2. from that table alone come the scores (`scoring.py`), the files (`files.py`) and the pictures (`pictures.py`);
3. MLflow gets them, and then result.json is written: a directory that has it is a whole evaluation, and a recorded one.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.manifest import DatasetError
from finetune.evaluate.answers import Answers, answer
from finetune.evaluate.files import CONFUSION, PER_CLASS, PREDICTIONS, write_confusion, write_per_class, write_predictions
from finetune.evaluate.identity import Evaluation
from finetune.evaluate.pictures import CALIBRATION_PNG, CONFUSION_PNG, VIEWS_PNG, draw_calibration, draw_confusion, draw_views, save
from finetune.evaluate.scoring import Confusion, PerClass, calibration, moments, overall
from finetune.session import Backbone, open_backbone, register, session
from finetune.split import class_numbers
from pretrain.checkpoints.run import save_result
from pretrain.data.datasets import Part
from pretrain.data.reader import ShardReader, reading
from pretrain.data.real_labels import RealLabels
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import Tracker

NUM_CONFUSED, NUM_EXTREME, NUM_NAMED = 30, 10, 20
"""In the result: pairs of classes, worst and best classes, pictures that do not decode."""


def evaluate_checkpoint(evaluation: Evaluation, world: World) -> dict[str, Any] | None:
    """The result, on the first rank."""
    settings = evaluation.settings
    numbers = class_numbers(evaluation.card, evaluation.manifest, dataset=settings.dataset)
    part = Part(Path(settings.dataset), evaluation.manifest, settings.split, numbers)
    with session(
        evaluation.begun_settings,
        world,
        run_dir=evaluation.run_dir,
        used=[(part, "evaluation")],
        checkpoint=evaluation.checkpoint,
        task="evaluate",
        tracking=evaluation.tracking,
    ) as joined:
        if world.is_first:
            evaluation.mark()
        with reading([part], settings.data, image_size=evaluation.card.image_size) as reader:
            began_s = time.perf_counter()
            answers = _answers(evaluation, reader, device=joined.device, world=world)
            seconds = time.perf_counter() - began_s
            if answers is None:
                return None  # nothing is collective from here on, so nobody waits for the pictures
            if not len(answers):
                raise DatasetError("evaluation: no picture of the split decodes; run data_prep verify on the dataset")
            return _report(evaluation, answers, reader, joined.tracker, seconds=seconds)


def _answers(evaluation: Evaluation, reader: ShardReader, *, device: torch.device, world: World) -> Answers | None:
    settings = evaluation.settings
    backbone = open_backbone(evaluation.checkpoint, evaluation.manifest, device=device)
    augmentation = settings.augment if settings.views else None
    return answer(
        _logits_of(backbone, device, precision=settings.precision),
        reader,
        backbone.augmentation(augmentation, seed=settings.seed, device=device),
        views=settings.view_numbers,
        local_batch_size=settings.local_batch_size,
        world=world,
    )


def _logits_of(backbone: Backbone, device: torch.device, *, precision: str) -> Callable[[Tensor], Tensor]:
    model = backbone.model
    assert model is not None

    def logits_of(images_BCHW: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
            logits: Tensor = model(images_BCHW)
        return logits

    return logits_of


def _report(evaluation: Evaluation, answers: Answers, reader: ShardReader, tracker: Tracker, *, seconds: float) -> dict[str, Any]:
    """Files, pictures, MLflow and last the result, all from the table."""
    (part,) = reader.parts
    names, numbers = part.manifest.classes, part.classes or range(len(part.manifest.classes))
    confusion = Confusion.of(answers, names=names, numbers=numbers)
    per_class = PerClass.of(answers, confusion, numbers=numbers)
    run_dir = evaluation.run_dir
    facts = {"weights_sha256": evaluation.checkpoint.sha256, "content_hash": part.manifest.content_hash}
    facts |= {"dataset": part.manifest.name, "split": part.split}
    PROGRESS.mark("writing the results")
    write_predictions(run_dir / PREDICTIONS, answers, reader, classes=evaluation.card.classes, facts=facts)
    write_per_class(run_dir / PER_CLASS, per_class, confusion, numbers=numbers)
    write_confusion(run_dir / CONFUSION, confusion)
    _draw(evaluation, answers, confusion)
    result = _result(evaluation, answers, reader, confusion, per_class) | facts | {"seconds": seconds}
    result["images_per_s"] = reader.num_samples / seconds
    result["views_per_s"] = result["images_per_s"] * len(evaluation.settings.view_numbers)
    step = evaluation.card.step
    tracker.metrics({name: value for name, value in result.items() if name.startswith("eval/")}, step=step)
    for moment in moments(answers):
        tracker.metrics({"views/top1": moment.top1, "views/loss": moment.loss}, step=moment.num_views)
    for name in (PREDICTIONS, PER_CLASS, CONFUSION, CONFUSION_PNG, CALIBRATION_PNG, VIEWS_PNG):
        if (run_dir / name).exists():
            tracker.artifact(run_dir / name, folder="evaluation")
    views = f"_{evaluation.settings.views}views" if evaluation.settings.views else ""
    found = {f"evaluate/top1{views}": result["eval/top1"]}
    register(tracker, evaluation.checkpoint, found, target=f"{target_of(part.manifest)}-{part.split}")
    save_result(run_dir, result)
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
    curve = [asdict(moment) for moment in moments(answers)]
    return {f"eval/{name}": value for name, value in eval_scores.items()} | {
        "identity": evaluation.identity,
        "model": evaluation.card.model.label,
        "pretrained": str(evaluation.checkpoint.directory),
        "step": evaluation.card.step,
        "run_dir": str(evaluation.run_dir),
        "num_samples": len(answers),
        "num_unreadable": len(left_out),
        "unreadable": ["/".join(name) for name in reader.names(left_out[:NUM_NAMED])],
        "views": settings.views,
        "num_views": len(settings.view_numbers),
        "augment": settings.augment.model_dump(mode="json") if settings.views else None,
        "augment_from": evaluation.augment_from,
        "plain_top1": curve[0]["top1"] if settings.include_plain else evaluation.plain_top1(),
        "curve": curve,
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
