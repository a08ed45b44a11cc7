"""Policies with timm's names are timm's policies, and draws have the distributions in timm's
documentation."""

import random

import numpy as np
import pytest
from timm.data import auto_augment as timm_policies

from data_prep.errors import Code
from pretrain.augment.plan import Operation, draw_plan
from pretrain.auto_augment import Policy, PolicyStep, parse_policy
from tests.errors import fails
from tests.pretrain.augment.pictures import draws_of

RAND = [
    "rand-m9-mstd0.5-inc1",
    "rand",
    "rand-m7-n3-p0.3",
    "rand-m9-mstd101-inc1",
    "rand-m20-mmax30-inc0",
    "rand-n4-tweights-mstd1",
]
SEARCHED = ["original", "originalr", "v0", "v0r", "original-mstd0.5"]


@pytest.mark.parametrize("name", RAND)
def test_a_rand_name_means_what_timm_means(name: str) -> None:
    theirs = timm_policies.rand_augment_transform(name, {"img_mean": (1, 2, 3)})
    ours = parse_policy(name)
    assert ours.steps == tuple(PolicyStep(op.name, op.prob, op.magnitude) for op in theirs.ops)
    assert ours.num_layers == theirs.num_layers and not ours.chained
    assert {op.magnitude_std for op in theirs.ops} == {ours.magnitude_std}
    assert {op.magnitude_max or 10 for op in theirs.ops} == {ours.magnitude_max}
    if theirs.choice_weights is None:
        assert ours.weights is None
    else:
        assert ours.weights is not None
        np.testing.assert_allclose(
            np.array(ours.weights) / sum(ours.weights), theirs.choice_weights
        )


@pytest.mark.parametrize("name", SEARCHED)
def test_a_searched_policy_is_timms(name: str) -> None:
    theirs = timm_policies.auto_augment_transform(name, {"img_mean": (1, 2, 3)})
    ours = parse_policy(name)
    assert ours.chained and ours.num_layers == 2 and len(theirs.policy) == 25
    assert ours.steps == tuple(
        PolicyStep(op.name, op.prob, op.magnitude) for chain in theirs.policy for op in chain
    )
    assert {op.magnitude_std for chain in theirs.policy for op in chain} == {ours.magnitude_std}


ALL_NAMES = sorted({step.name for name in RAND + SEARCHED for step in parse_policy(name).steps})


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_strength_is_timms_function_of_the_magnitude(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    level_to_argument = timm_policies.LEVEL_TO_ARG[name]
    for magnitude in (0.0, 0.3, 2.5, 4.99, 5.0, 7.49, 9.0, 9.7, 10.0, 17.0):
        plan = draw_plan(
            Policy((PolicyStep(name, 1.0, magnitude),), num_layers=1, magnitude_max=30.0),
            draws_of(32),
        )
        assert (plan.operations_LB != Operation.NONE).all()
        if level_to_argument is None:
            assert (plan.strengths_LB == 0).all()
            continue
        expected = set()
        for sign in (0.1, 0.9):
            monkeypatch.setattr(random, "random", lambda value=sign: value)
            expected.add(float(level_to_argument(magnitude, {})[0]))
        assert {round(value, 12) for value in plan.strengths_LB[0]} == {
            round(value, 12) for value in expected
        }


def test_the_distributions_of_rand_m9_mstd05_inc1() -> None:
    """15 equally likely operations, each applied with probability 1/2. The magnitude is normal (9,
    0.5), clipped at 10."""
    count = 40_000
    plan = draw_plan(parse_policy("rand-m9-mstd0.5-inc1"), draws_of(count))
    assert plan.operations_LB.shape == (2, count)
    for layer in range(2):
        share = np.bincount(plan.operations_LB[layer], minlength=16) / count
        assert abs(share[Operation.NONE] - 0.5) < 0.01
        assert np.abs(share[1:] - 1 / 30).max() < 0.004
    assert abs(np.corrcoef(plan.operations_LB)[0, 1]) < 0.02
    angle = plan.strengths_LB[plan.operations_LB == Operation.ROTATE]
    magnitude = np.abs(angle) / 3
    assert abs((angle > 0).mean() - 0.5) < 0.03
    # A normal (9, 0.5) clipped at 10: median 9, 2.3 % at 10, 15.9 % below 8.5.
    assert abs(np.median(magnitude) - 9) < 0.03 and magnitude.max() == 10
    assert abs((magnitude == 10).mean() - 0.0228) < 0.01
    assert abs((magnitude < 8.5).mean() - 0.1587) < 0.02
    assert abs(plan.cubic_LB.mean() - 0.5) < 0.01


def test_uniform_magnitudes_and_no_spread() -> None:
    wide = draw_plan(parse_policy("rand-m8-mstd101-n1-p1-inc1"), draws_of(30_000))
    magnitude = np.abs(wide.strengths_LB[wide.operations_LB == Operation.ROTATE]) / 3
    assert abs(magnitude.mean() - 4) < 0.15 and magnitude.min() < 0.1 and 7.9 < magnitude.max() < 8
    still = draw_plan(parse_policy("rand-m8-n1-p1-inc1"), draws_of(3000))
    assert set(np.abs(still.strengths_LB[still.operations_LB == Operation.ROTATE]).round(9)) == {
        24.0
    }


def test_weighted_choice_is_without_repetition_and_by_weight() -> None:
    plan = draw_plan(parse_policy("rand-m9-p1-tweights"), draws_of(40_000))
    assert (plan.operations_LB[0] != plan.operations_LB[1]).all()
    theirs = timm_policies.rand_augment_transform("rand-m9-p1-tweights", {"img_mean": (1, 2, 3)})
    np.random.seed(0)
    weights = theirs.choice_weights
    expected = np.array([np.random.choice(15, 2, replace=False, p=weights) for _ in range(6000)])
    names = [step.name for step in parse_policy("rand-m9-p1-tweights").steps]
    for layer in range(2):
        for name, operation in (
            ("Rotate", Operation.ROTATE),
            ("ShearX", Operation.SHEAR_X),
            ("Equalize", Operation.EQUALIZE),
        ):
            share = (plan.operations_LB[layer] == operation).mean()
            assert abs(share - (expected[:, layer] == names.index(name)).mean()) < 0.02


def test_a_chain_is_applied_whole() -> None:
    """In v0, ShearX precedes only Rotate (0.2, 0.6) and Solarize, before which it is never
    applied."""
    plan = draw_plan(parse_policy("v0"), draws_of(60_000))
    sheared = plan.operations_LB[0] == Operation.SHEAR_X
    assert abs(sheared.mean() - 0.2 / 25) < 0.0015
    assert set(plan.operations_LB[1, sheared]) == {Operation.NONE, Operation.ROTATE}
    assert abs((plan.operations_LB[1, sheared] == Operation.ROTATE).mean() - 0.6) < 0.08


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("unknown-name", "rnad-m9 orginal augmix-m5"),
        ("bad-value", "rand-m9.5 rand-x3 rand-inc rand-inc2 rand-m9-m8 rand-p1.5 rand-n0"),
        ("bad-value", "rand-mmax0 rand-t3a v0-m9 cifar10-mstd0.5"),
    ],
)
def test_a_name_that_is_not_a_policy_is_an_error(code: Code, names: str) -> None:
    for name in names.split():
        with fails(code, "augment.auto_augment"):
            parse_policy(name)
