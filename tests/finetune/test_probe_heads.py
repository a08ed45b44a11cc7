"""Heads trained together equal heads trained separately by plain optimizers and scikit-learn."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from data_prep.manifest import load_manifest
from finetune.probe.config import ProbeSettings
from finetune.probe.features import Table
from finetune.probe.heads import Candidate, Update, judge, order_of, train_heads
from finetune.probe.lbfgs import Minimizer, minimize
from finetune.probe.probe import candidates_of, folded, heads_of
from finetune.probe.rows import OnDevice
from pretrain.config import ScheduleSettings
from pretrain.optim.lion import Lion
from tests.conftest import Capture, Patch
from tests.errors import fails
from tests.finetune.tiny import (
    CLASSES,
    CPU,
    CROPS,
    FEATURES,
    Largest,
    blobs,
    probe_settings,
    rows_of,
    standard_of,
)


def standardized(table: Table) -> Tensor:
    return (table.values_ND - table.values_ND.mean(dim=0)) / table.values_ND.std(dim=0)


def plain_head(
    tables: list[Table], candidate: Candidate, settings: ProbeSettings, make: Any
) -> Tensor:
    """Train one nn.Linear with autograd and torch's cosine. `make` takes parameter groups with
    their weight decays."""
    head = torch.nn.Linear(FEATURES, CLASSES)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    count = len(tables[0].labels_N)
    values = [
        (table.values_ND - tables[0].values_ND.mean(0)) / tables[0].values_ND.std(0)
        for table in tables
    ]
    optimizer = make(
        [
            {"params": [head.weight], "weight_decay": candidate.weight_decay},
            {"params": [head.bias], "weight_decay": 0.0},
        ]
    )
    steps = candidate.epochs * math.ceil(count / settings.batch_size)
    if settings.schedule.name == "cosine":
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    else:
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for epoch in range(candidate.epochs):
        order = torch.from_numpy(order_of(count, seed=settings.seed, epoch=epoch))
        assert sorted(order.tolist()) == list(range(count))
        for chosen in torch.split(order, settings.batch_size):
            logits = head(values[epoch % len(tables)][chosen])
            optimizer.zero_grad()
            smoothing = {"label_smoothing": settings.label_smoothing}
            torch.autograd.backward(
                torch.nn.functional.cross_entropy(logits, tables[0].labels_N[chosen], **smoothing)
            )
            if settings.gradient_clip_norm:
                torch.nn.utils.clip_grad_norm_(head.parameters(), settings.gradient_clip_norm)
            optimizer.step()
            schedule.step()
    return torch.cat([head.weight.detach().T, head.bias.detach()[None]])


PUBLIC = {
    "label_smoothing": 0.3,
    "schedule": ScheduleSettings(name="constant"),
    "gradient_clip_norm": 0.2,
}


@pytest.mark.parametrize("recipe", [{}, PUBLIC], ids=["ours", "public"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_candidates_of_a_grid_are_plain_sgd_with_views_and_lengths_of_their_own(
    nesterov: bool, recipe: dict[str, Any]
) -> None:
    tables = [blobs(70, seed=1)]
    tables.append(Table(tables[0].values_ND * 1.5 + 1, tables[0].labels_N))
    settings = probe_settings(
        lrs=(0.01, 0.3),
        weight_decays=(0.0, 0.1),
        epochs=(3, 2),
        num_views=2,
        augment=CROPS,
        nesterov=nesterov,
        **recipe,
    )
    candidates = candidates_of(settings)
    assert len(candidates) == 8
    heads = train_heads(rows_of(*tables), candidates, settings=settings, num_classes=CLASSES)
    for candidate, head in zip(candidates, heads, strict=True):
        expected = plain_head(
            tables,
            candidate,
            settings,
            lambda groups, lr=candidate.lr: torch.optim.SGD(
                groups, lr=lr, momentum=0.9, nesterov=nesterov
            ),
        )
        torch.testing.assert_close(head[: FEATURES + 1], expected, rtol=1e-4, atol=1e-6)
        assert (head[FEATURES + 1 :] == 0).all()
        alone = train_heads(rows_of(*tables), [candidate], settings=settings, num_classes=CLASSES)[
            0
        ]
        torch.testing.assert_close(head, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "first", "highest"),
    [
        (ScheduleSettings(name="constant", warmup="5 epochs"), 0.1, 0.1),
        (ScheduleSettings(name="constant", warmup="1 epochs"), 0.025, 0.1),
        (ScheduleSettings(name="wsd", warmup="2 epochs", cooldown="4 steps"), 0.1, 0.1),
        (ScheduleSettings(name="wsd", warmup="19 steps", cooldown="17 steps"), None, None),
        (ScheduleSettings(name="wsd", cooldown="3 epochs"), None, None),
    ],
)
def test_the_schedule_is_fitted_to_each_candidate(
    shapes: Path,
    monkeypatch: Patch,
    schedule: ScheduleSettings,
    first: float | None,
    highest: float | None,
) -> None:
    """The first candidate has 2 epochs of 3 steps, so its warm-up of 5 epochs becomes 0 steps."""
    settings = probe_settings(lrs=(0.1,), epochs=(2, 50), schedule=schedule)
    rows, seen, step = rows_of(blobs(70, seed=1)), list[Tensor](), Update.step

    def seeing(self: Update, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        seen.append(lr_C)
        step(self, gradient_EC, lr_C=lr_C, decay_C=decay_C)

    monkeypatch.setattr(Update, "step", seeing)
    if first is None:
        with fails("conflict", "schedule.cooldown"):
            settings.check_against(load_manifest(shapes))
        with fails("conflict", "schedule.cooldown"):
            train_heads(rows, candidates_of(settings), settings=settings, num_classes=CLASSES)
        return
    settings.check_against(load_manifest(shapes))
    train_heads(rows, candidates_of(settings), settings=settings, num_classes=CLASSES)
    rates = [float(lr_C[0]) for lr_C in seen[:6]]
    assert rates[0] == pytest.approx(first) and max(rates) == pytest.approx(highest)


def test_rates_take_no_more_memory_than_the_table() -> None:
    """250 steps of four candidates with 50 classes: learning rates for each column would take 200
    kB."""
    rows = rows_of(blobs(500, seed=1))
    settings = probe_settings(lrs=(0.1, 0.2, 0.3, 0.4), epochs=(1,), batch_size=2)
    with Largest() as largest:
        train_heads(rows, candidates_of(settings)[:4], settings=settings, num_classes=50)
    assert 5_000 < largest.num_bytes < 100_000


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("lion", lambda groups, lr: Lion(groups, lr=lr, betas=(0.9, 0.99))),
        ("adamw", lambda groups, lr: torch.optim.AdamW(groups, lr=lr)),
        ("sgd", lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)),
    ],
)
def test_an_update_is_the_plain_optimizer_step_for_step(name: str, peer: Any) -> None:
    """Equal gradients, some of them zero; each column has its own learning rate and weight
    decay."""
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(8, 2, generator=generator)
    start[FEATURES + 1 :] = 0
    update = Update(start.clone(), probe_settings(optimizer=name), num_features=FEATURES)
    lrs, decays = (0.01, 0.2), (0.5, 0.0)
    pieces = [
        [start[:FEATURES, c].clone().requires_grad_(), start[FEATURES, c].clone().requires_grad_()]
        for c in range(2)
    ]
    peers = [
        peer([{"params": [w], "weight_decay": decay}, {"params": [b], "weight_decay": 0.0}], lr)
        for (w, b), lr, decay in zip(pieces, lrs, decays, strict=True)
    ]
    for number in range(6):
        gradient = torch.randn(8, 2, generator=generator)
        gradient[2] = 0
        gradient[FEATURES + 1 :] = 0
        for column, (weight, bias) in enumerate(pieces):
            weight.grad = gradient[:FEATURES, column].clone()
            bias.grad = gradient[FEATURES, column].clone()
            peers[column].step()
        update.step(gradient, lr_C=torch.tensor(lrs), decay_C=torch.tensor(decays))
        for column, (weight, bias) in enumerate(pieces):
            found = update.weights_EC[: FEATURES + 1, column]
            torch.testing.assert_close(
                found, torch.cat([weight, bias[None]]).detach(), rtol=1e-5, atol=1e-6
            )
        assert number > 0 or name != "lion" or update.weights_EC[2, 1] == start[2, 1]


def test_lbfgs_is_scikit_learns_logistic_regression() -> None:
    table = blobs(300, seed=1, spread=0.6)
    decays = (1e-4, 1e-2, 1.0)
    candidates = [Candidate(1.0, decay, 500) for decay in decays]
    heads, ends = minimize(rows_of(table), candidates, tolerance=1e-6, num_classes=CLASSES)
    assert all(end.has_converged and end.num_passes < 500 for end in ends)
    values = standardized(table).double().numpy()
    for head, decay in zip(heads, decays, strict=True):
        peer = LogisticRegression(C=1 / (decay * 300), tol=1e-9, max_iter=5000).fit(
            values, table.labels_N.numpy()
        )
        torch.testing.assert_close(
            head[:FEATURES].T.double(), torch.from_numpy(peer.coef_), rtol=2e-3, atol=2e-4
        )
        logits = values @ head[:FEATURES].double().numpy() + head[FEATURES].double().numpy()
        found = torch.softmax(torch.from_numpy(logits), dim=1).numpy()
        np.testing.assert_allclose(found, peer.predict_proba(values), atol=2e-4)


def test_lbfgs_says_why_it_ended_and_how_many_passes_it_took(
    capsys: Capture, monkeypatch: Patch
) -> None:
    rows = rows_of(blobs(300, seed=1, spread=0.6))
    settings = probe_settings(optimizer="lbfgs", tolerance=1e-6, lrs=(1.0,))

    def told(epochs: int) -> tuple[int, str]:
        (head,) = heads_of(
            rows, [Candidate(1.0, 0.1, epochs)], settings=settings, num_classes=CLASSES
        )
        return head.num_steps, capsys.readouterr().out

    assert told(5)[0] == 5 and 5 < told(500)[0] < 500 and told(500)[1] == ""
    assert "Increase epochs" in told(5)[1] and "Increase epochs" not in told(500)[1]
    uphill = Minimizer(torch.ones(3), tolerance=1e-6)
    while not uphill.is_done:
        uphill.update(float(uphill.num_passes), torch.full((3,), 1e-4))
    assert uphill.is_stuck and 2 < uphill.num_passes < 50
    assert uphill.largest_gradient == pytest.approx(1e-4) and torch.equal(
        uphill.point, torch.ones(3)
    )


def test_a_table_lies_on_the_device_once_and_only_where_there_is_room() -> None:
    one, other = blobs(40, seed=1), blobs(40, seed=2)
    on_device = OnDevice(CPU, room=1.5 * one.values_ND.nbytes)
    placed = on_device.of(one)
    assert placed is not None and torch.equal(placed, one.values_ND) and placed is not one.values_ND
    assert on_device.of(one) is placed and on_device.of(other) is None


def test_a_head_is_judged_as_by_hand() -> None:
    table = blobs(50, seed=2)
    heads = torch.randn(2, 8, CLASSES, generator=torch.Generator().manual_seed(1))
    scores = judge(rows_of(table), heads)
    for head, score in zip(heads, scores, strict=True):
        logits = standardized(table) @ head[:FEATURES] + head[FEATURES]
        assert score.top1 == pytest.approx(
            float((logits.argmax(1) == table.labels_N).double().mean())
        )
        assert score.loss == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, table.labels_N)), rel=1e-5
        )


def test_a_folded_head_says_of_plain_features_what_it_said_of_standardized_ones() -> None:
    table = blobs(40, seed=2)
    head = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(1))
    weight_KD, bias_K = folded(head, standard_of(table))
    expected = standardized(table) @ head[:FEATURES] + head[FEATURES]
    torch.testing.assert_close(
        table.values_ND @ weight_KD.T + bias_K, expected, rtol=1e-3, atol=1e-4
    )
