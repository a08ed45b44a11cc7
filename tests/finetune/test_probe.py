"""Heads of a grid equal plain optimizers and scikit-learn, ranks share them, and what is chosen is what is judged and saved."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from data_prep.manifest import DatasetError, load_manifest
from data_prep.settings import SettingsError, UserError, validate
from finetune.judging.config import EvaluateSettings
from finetune.judging.evaluate import evaluate_checkpoint
from finetune.probing.apart import check_apart
from finetune.probing.cache import Writing
from finetune.probing.classifier import Classifier
from finetune.probing.config import ProbeSettings
from finetune.probing.features import Table
from finetune.probing.grid import Judged, best_of, cells_of, edges
from finetune.probing.heads import Cell, Score, judge, order_of, train_heads
from finetune.probing.lbfgs import minimise
from finetune.probing.probe import Splits, choose_and_test, held_out, probe, tables_of
from finetune.probing.report import draw_grid
from finetune.probing.rows import Rows, Standard
from finetune.probing.updates import AdamWUpdate, LionUpdate, SgdUpdate, Update
from pretrain.card import read_card
from pretrain.config import TrackingSettings
from pretrain.optim.lion import Lion
from pretrain.world import World
from tests.conftest import Command
from tests.finetune.conftest import ALONE, CPU, CROPS, feature_settings, maker_of
from tests.ranks import run_ranks

FEATURES, CLASSES = 6, 3


def settings_of(**changes: Any) -> ProbeSettings:
    tree = {"run_dir": "r", "dataset": "d", "optimizer": "sgd", "batch_size": 32, "epochs": (3,)}
    return ProbeSettings.model_validate(tree | changes, strict=False)


def blobs(count: int, *, seed: int, spread: float = 3.0) -> Table:
    """Clusters about the same centres for every seed, on unequal scales."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * spread
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    values = (centres[labels] + torch.randn(count, FEATURES, generator=generator)) * torch.arange(1.0, 1 + FEATURES)
    return Table(values + 5, labels)


def rows_of(*tables: Table) -> Rows:
    return Rows(list(tables), standard=Standard.of(tables[0].features_ND), device=CPU)


def standardised(table: Table) -> Tensor:
    return (table.features_ND - table.features_ND.mean(dim=0)) / table.features_ND.std(dim=0)


def plain_head(tables: list[Table], cell: Cell, settings: ProbeSettings, make: Any) -> Tensor:
    """One nn.Linear, autograd and torch's own cosine; `make` takes parameter groups with their decays."""
    head = torch.nn.Linear(FEATURES, CLASSES)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    count = len(tables[0].labels_N)
    values = [(table.features_ND - tables[0].features_ND.mean(0)) / tables[0].features_ND.std(0) for table in tables]
    optimizer = make(
        [{"params": [head.weight], "weight_decay": cell.weight_decay}, {"params": [head.bias], "weight_decay": 0.0}]
    )
    steps = cell.epochs * math.ceil(count / settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(cell.epochs):
        order = torch.from_numpy(order_of(count, seed=settings.seed, epoch=epoch))
        assert sorted(order.tolist()) == list(range(count))
        for chosen in torch.split(order, settings.batch_size):
            logits = head(values[epoch % len(tables)][chosen])
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(logits, tables[0].labels_N[chosen]))
            optimizer.step()
            schedule.step()
    return torch.cat([head.weight.detach().T, head.bias.detach()[None]])


@pytest.mark.parametrize("nesterov", [True, False])
def test_cells_of_a_grid_are_plain_sgd_with_views_and_lengths_of_their_own(nesterov: bool) -> None:
    tables = [blobs(70, seed=1)]
    tables.append(Table(tables[0].features_ND * 1.5 + 1, tables[0].labels_N))
    settings = settings_of(
        lrs=(0.01, 0.3), weight_decays=(0.0, 0.1), epochs=(3, 2), views=2, augment=CROPS, nesterov=nesterov
    )
    cells = cells_of(settings)
    assert len(cells) == 8
    heads = train_heads(rows_of(*tables), cells, settings=settings, num_classes=CLASSES)
    for cell, head in zip(cells, heads, strict=True):
        expected = plain_head(
            tables,
            cell,
            settings,
            lambda groups, lr=cell.lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=nesterov),
        )
        torch.testing.assert_close(head[: FEATURES + 1], expected, rtol=1e-4, atol=1e-6)
        assert (head[FEATURES + 1 :] == 0).all()
        alone = train_heads(rows_of(*tables), [cell], settings=settings, num_classes=CLASSES)[0]
        torch.testing.assert_close(head, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "peer"),
    [
        (lambda w: LionUpdate(w, num_features=FEATURES), lambda groups, lr: Lion(groups, lr=lr, betas=(0.9, 0.99))),
        (lambda w: AdamWUpdate(w, num_features=FEATURES), lambda groups, lr: torch.optim.AdamW(groups, lr=lr)),
        (
            lambda w: SgdUpdate(w, num_features=FEATURES, momentum=0.9, nesterov=True),
            lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True),
        ),
    ],
)
def test_an_update_is_the_plain_optimizer_step_for_step(kind: Any, peer: Any) -> None:
    """On the same gradients, some of them zero; each column has a rate and a decay of its own."""
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(8, 2, generator=generator)
    start[FEATURES + 1 :] = 0
    update: Update = kind(start.clone())
    lrs, decays = (0.01, 0.2), (0.5, 0.0)
    pieces = [
        [start[:FEATURES, c].clone().requires_grad_(), start[FEATURES, c].clone().requires_grad_()] for c in range(2)
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
            weight.grad, bias.grad = gradient[:FEATURES, column].clone(), gradient[FEATURES, column].clone()
            peers[column].step()
        update.step(gradient, lr_C=torch.tensor(lrs), decay_C=torch.tensor(decays))
        for column, (weight, bias) in enumerate(pieces):
            found = update.weights_EC[: FEATURES + 1, column]
            torch.testing.assert_close(found, torch.cat([weight, bias[None]]).detach(), rtol=1e-5, atol=1e-6)
        assert number > 0 or "Lion" not in type(update).__name__ or update.weights_EC[2, 1] == start[2, 1]


def test_lbfgs_is_scikit_learns_logistic_regression() -> None:
    table = blobs(300, seed=1, spread=0.6)
    decays = (1e-4, 1e-2, 1.0)
    cells = [Cell(1.0, decay, 500) for decay in decays]
    heads, have_converged = minimise(rows_of(table), cells, tolerance=1e-6, num_classes=CLASSES)
    assert have_converged == [True, True, True]
    values = standardised(table).double().numpy()
    for head, decay in zip(heads, decays, strict=True):
        peer = LogisticRegression(C=1 / (decay * 300), tol=1e-9, max_iter=5000).fit(values, table.labels_N.numpy())
        torch.testing.assert_close(head[:FEATURES].T.double(), torch.from_numpy(peer.coef_), rtol=2e-3, atol=2e-4)
        logits = values @ head[:FEATURES].double().numpy() + head[FEATURES].double().numpy()
        found = torch.softmax(torch.from_numpy(logits), dim=1).numpy()
        np.testing.assert_allclose(found, peer.predict_proba(values), atol=2e-4)


def test_a_head_is_judged_as_by_hand() -> None:
    table = blobs(50, seed=2)
    heads = torch.randn(2, 8, CLASSES, generator=torch.Generator().manual_seed(1))
    scores = judge(rows_of(table), heads)
    for head, score in zip(heads, scores, strict=True):
        logits = standardised(table) @ head[:FEATURES] + head[FEATURES]
        assert score.top1 == pytest.approx(float((logits.argmax(1) == table.labels_N).double().mean()))
        assert score.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, table.labels_N)), rel=1e-5)


def test_a_folded_head_says_of_plain_features_what_it_said_of_standardised_ones() -> None:
    table, head = blobs(40, seed=2), torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(1))
    folded = Classifier.of(head, Standard.of(table.features_ND))
    expected = standardised(table) @ head[:FEATURES] + head[FEATURES]
    found = table.features_ND @ folded.weight_KD.T + folded.bias_K
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def verdict_of(splits: Splits, **changes: Any) -> dict[str, Any]:
    verdict = choose_and_test(splits, settings=settings_of(**changes), num_classes=CLASSES, device=CPU, world=ALONE)
    assert verdict is not None
    return verdict.result


@pytest.mark.parametrize("optimizer", ["lion", "sgd", "adamw", "lbfgs"])
def test_a_probe_learns_what_is_there_and_nothing_from_shuffled_labels(optimizer: str) -> None:
    train, test = blobs(400, seed=1), blobs(300, seed=2)
    more = {} if optimizer == "lbfgs" else {"epochs": (20,)}
    settings: dict[str, Any] = {"optimizer": optimizer, "lrs": (1e-2,)} | more
    if optimizer == "lbfgs":
        settings |= {"lrs": (1.0,), "epochs": (100,)}
    assert verdict_of(Splits([train], train, test), **settings)["test_top1"] > 0.95
    shuffled = [torch.from_numpy(np.random.default_rng(seed).integers(0, CLASSES, 400)) for seed in (3, 4)]
    sham, judge_of_sham = Table(train.features_ND, shuffled[0]), Table(train.features_ND, shuffled[1])
    top1 = verdict_of(Splits([sham], sham, judge_of_sham), **settings)["test_top1"]
    low, high = (
        binom.ppf([1e-4, 1 - 1e-4], 400, 1 / CLASSES) / 400
    )  # whatever is answered, each label is right by chance
    assert low <= top1 <= high


def test_the_choice_is_the_best_with_the_smallest_rate_and_never_a_diverged_cell() -> None:
    def judged(lr: float, decay: float, top1: float, loss: float = 1.0) -> Judged:
        return Judged(Cell(lr, decay, 5), Score(top1, loss))

    grid = [
        judged(0.3, 0.0, 0.8),
        judged(0.1, 0.0, 0.8),
        judged(0.1, 0.5, 0.8),
        judged(0.01, 0.0, 0.7),
        judged(0.001, 0.0, 0.9, math.nan),
    ]
    assert best_of(grid).cell == Cell(0.1, 0.5, 5)
    with pytest.raises(UserError, match="all 1 cells have diverged"):
        best_of(grid[-1:])
    settings = settings_of(lrs=(0.1, 0.2, 0.3), weight_decays=(0.0, 0.5), epochs=(5,))
    assert edges(Cell(0.3, 0.0, 5), settings) == ["lrs: the best, 0.3, is the largest; try larger ones, too"]
    assert edges(Cell(0.2, 0.0, 5), settings) == []
    picture = draw_grid(grid[1:3], Cell(0.1, 0.5, 5), facts="facts")
    assert picture.width > 200 and len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 3


def test_held_out_samples_are_apart_and_the_test_split_is_never_chosen_on() -> None:
    kept, held = held_out(101, settings_of(holdout_share=0.25))
    assert kept is not None and held is not None and len(held) == 25
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(101))
    train, test = blobs(200, seed=1, spread=0.3), blobs(100, seed=2, spread=0.3)
    grid = {"lrs": (1e-4, 1e-2, 1.0), "epochs": (4,)}
    one = verdict_of(Splits([train], train, test), **grid)
    other = verdict_of(Splits([train], train, Table(test.features_ND, (test.labels_N + 1) % CLASSES)), **grid)
    assert one["cells"] == other["cells"] and one["chosen_lr"] == other["chosen_lr"]
    assert one["test_top1"] != other["test_top1"] and one["test_top5"] == 1.0


def test_splits_that_share_samples_are_refused(shapes: Path) -> None:
    manifest = load_manifest(shapes)
    train, val = manifest.splits["train"], manifest.splits["val"]
    both = train.model_copy(update={"shards": (*train.shards[:1], *val.shards)})
    mixed = manifest.model_copy(update={"splits": {**manifest.splits, "both": both}})
    check_apart(shapes, mixed, train="train", test="val", holdout=None)
    with pytest.raises(DatasetError, match="test_split: 72 of the 72 samples of 'val' are in 'both' as well"):
        check_apart(shapes, mixed, train="both", test="val", holdout=None)
    with pytest.raises(DatasetError, match="holdout_split: 72 of the 136 samples of 'both' are in 'val' as well"):
        check_apart(shapes, mixed, train="train", test="val", holdout="both")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"views": 3}, "views: 3 will not do without augment"),
        ({"augment": {}}, "augment: has no effect without views"),
        ({"views": 2, "augment": {"mixup_alpha": 0.8}}, "augment.mixup_alpha: MixUp will not do here"),
        ({"views": 2, "augment": {"cutmix_alpha": 1.0}}, "augment.cutmix_alpha: CutMix will not do here"),
        ({"optimizer": "lbfgs", "lrs": [0.1, 0.2]}, "optimizer: 'lbfgs' finds its own steps"),
        ({"optimizer": "lbfgs", "views": 2, "augment": {}}, "views: 2 will not do with lbfgs"),
        ({"optimizer": "lamb"}, "optimizer: 'lamb' is not one of its values"),
        ({"weight_decays": [-1.0]}, "weight_decays: [-1.0] will not do; every decay must be 0 or above"),
        ({"epochs": [5, 5]}, "epochs: [5, 5] will not do; name each value once"),
        ({"holdout_split": "val"}, "holdout_split: 'val' is the test_split too"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        validate(ProbeSettings, {"run_dir": "r", "dataset": "d"} | changes)
    assert words in str(refused.value)


def test_what_is_left_out_fits_the_optimizer() -> None:
    tree = {"run_dir": "r", "dataset": "d"}
    assert len(cells_of(validate(ProbeSettings, tree))) == 25
    lbfgs = validate(ProbeSettings, tree | {"optimizer": "lbfgs", "weight_decays": 0.1})
    assert lbfgs.lrs == (1.0,) and lbfgs.weight_decays == (0.1,)


PROBE: dict[str, Any] = {
    "optimizer": "sgd",
    "lrs": (1e-3, 1e-1),
    "weight_decays": (0.0, 1e-2),
    "epochs": (6,),
    "batch_size": 16,
}


def rank_case(world: World, folder: str, dataset: str, place: str) -> list[Any]:
    """The rows that this rank computes, and the cells as all ranks know them."""
    from finetune.accelerator import start_accelerator
    from finetune.probing.grid import judged_cells

    start_accelerator(world)
    written: list[int] = []
    plain_write = Writing.write

    def write(self: Writing, rows: Any, *, start: int) -> None:
        if "-val-" in self.place.name:
            written.extend(range(start, start + len(rows)))
        plain_write(self, rows, start=start)

    Writing.write = write  # type: ignore[method-assign]
    settings = feature_settings(Path(dataset), Path(place), Path(folder), **PROBE)
    splits = tables_of(settings, maker_of(settings, world=world))
    rows, held = rows_of(splits.train[0]), rows_of(splits.test)
    judged, heads = judged_cells(rows, held, settings=settings, num_classes=5, world=world)
    assert len(heads) == len(range(world.rank, 4, world.num_ranks))
    return [written, splits.test.features_ND.tolist(), [[each.score.top1, each.score.loss] for each in judged]]


def test_three_ranks_make_each_row_once_and_share_the_cells(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    words = (str(backbone_folder), str(other_shapes))
    _, one_table, one_cells = rank_case(ALONE, *words, str(tmp_path / "one"))
    said = run_ranks(rank_case, *words, str(tmp_path / "three"), num_ranks=3)
    rows = [row for written, _, _ in said for row in written]
    assert sorted(rows) == list(range(35)) and all(written for written, _, _ in said)
    for _, table, cells in said:
        np.testing.assert_allclose(table, one_table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(cells, one_cells, rtol=1e-4, atol=1e-6)


def test_evaluation_of_what_a_probe_leaves_is_the_probes_own_number(
    backbone_folder: Path, other_shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = feature_settings(other_shapes, tmp_path, backbone_folder, **PROBE)
    result = probe(settings, ALONE)
    assert result is not None and len(result["cells"]) == 4 and "held-out top-1" in capsys.readouterr().out
    silent = TrackingSettings(enabled=False)
    asked = EvaluateSettings(pretrained=settings.run_dir, dataset=str(other_shapes), tracking=silent)
    scores = evaluate_checkpoint(asked, ALONE)
    assert scores is not None and scores["num_samples"] == 35
    assert scores["eval/top1"] == pytest.approx(result["test_top1"], abs=1e-9)
    assert scores["eval/top5"] == pytest.approx(result["test_top5"], abs=1e-9) == 1.0
    card = read_card(Path(settings.run_dir))
    assert card.classes == load_manifest(other_shapes).classes and card.dataset == "shapes-b"
    assert card.step == result["steps"] == 6 * 4 and card.run_key != "0" * 32


def test_the_command_goes_on_with_the_features_of_a_killed_probe(
    command: Command, backbone_folder: Path, other_shapes: Path, tmp_path: Path
) -> None:
    words = ["tracking.enabled=false", "run_dir=runs/p", "optimizer=lbfgs", f"dataset={other_shapes}"]
    (tmp_path / "probe.yaml").write_text(f"pretrained: {backbone_folder}\n")
    maker_of(feature_settings(other_shapes, tmp_path / "runs", backbone_folder)).tables(
        "train", [None]
    )  # as if killed then
    done = command("finetune", "probe", "probe.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert "train: features found in runs/features" in done.stdout and "val: features found" not in done.stdout
    result = json.loads((tmp_path / "runs" / "p" / "result.json").read_text())
    assert len(result["cells"]) == 5 and result["chosen_weight_decay"] in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    again = command("finetune", "probe", "probe.yaml", *words)
    assert again.returncode == 0 and "finished before" in again.stdout
