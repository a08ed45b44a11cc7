"""Offload, activation checkpointing, and models with buffers, on 2 ranks."""

import resource
from typing import Any

import pytest

from pretrain.cli import main as pretrain
from pretrain.config import EngineSettings
from tests.distributed.engine_options import ACTIVATION, OFFLOADED, UPDATED
from tests.distributed.engines import CLIP
from tests.distributed.test_engine import GRADIENT_LIMIT, MOVE_LIMIT

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("identity", OFFLOADED)
def test_offloaded_training_is_the_same_training(results: dict[str, Any], identity: str) -> None:
    found = results["options"]["offloaded"][identity]
    limit = GRADIENT_LIMIT[OFFLOADED[identity][2]]
    assert found["gradient"] < limit
    assert found["clipped"] == pytest.approx(CLIP, rel=1e-5)
    assert found["applied"] is False
    assert found["untouched"] == 0
    assert found["moved"] == 0
    assert found["from_resident"] < 1e-5


def judge_update(found: dict[str, Any], identity: str) -> None:
    clips = not identity.endswith("-0.0")
    assert found["applied"] is False and found["skipped"] == 0
    assert found["weights"] <= 1e-6 * clips
    assert found["state"] <= 1e-6 * clips
    assert found["norms"] == pytest.approx([found["norms"][0]] * 3, rel=1e-6)
    assert found["overlapped"] == 0
    assert found["updates"] == [2, 2]
    assert found["theirs_waits"] is True  # otherwise the check for waits does not work


@pytest.mark.parametrize("identity", UPDATED)
def test_the_update_on_the_device_is_deepspeeds_and_waits_for_nothing(
    results: dict[str, Any], alone: dict[str, Any], identity: str
) -> None:
    """On two ranks, and on one rank. On one rank stage 1 updates from the parameters' own
    gradients."""
    judge_update(results["options"]["updated"][identity], identity)
    judge_update(alone["updated"][identity], identity)


def test_gradients_of_micro_batches_are_added_up_in_fp32(
    results: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Ranks exchange bf16. Sums in bf16 would be off by 6e-3, even on one rank."""
    assert alone["accumulated"] == 0
    assert max(results["options"]["accumulated"].values()) < 4e-3


@pytest.mark.parametrize(("stage", "offload"), [(0, "optimizer"), (0, "all"), (2, "all")])
def test_a_stage_that_has_nothing_to_offload_says_so(stage: int, offload: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.offload: "):
        EngineSettings(zero_stage=stage, offload=offload)


def test_recomputed_activations_change_nothing_even_with_dropout(results: dict[str, Any]) -> None:
    assert results["options"]["checkpointed"] == 0


def test_permutations_are_restored_on_every_rank(results: dict[str, Any]) -> None:
    assert results["options"]["permutations"] is True


def test_running_averages_are_those_of_all_ranks(results: dict[str, Any]) -> None:
    found = results["options"]["averages"]
    assert found["differed"] > 1e-3
    assert found["logits"] == 0
    assert found["saved"] < 1e-6


def test_sparse_weights_go_on(results: dict[str, Any]) -> None:
    assert results["options"]["sparse"] is True


def test_tuning_skips_a_step_that_one_rank_spoils(results: dict[str, Any]) -> None:
    assert results["options"]["tuned"] == {"applied": [False, False], "apart": 0, "updates": [2, 2]}


def test_tuning_that_goes_on_ends_at_the_same_bits(results: dict[str, Any]) -> None:
    """Both an optimizer with a step counter and one without it; the uninterrupted tuning recomputes
    activations."""
    assert results["options"]["tuning_goes_on"] == {"lion": 0, "adamw": 0, "sgd": 0}


def test_a_step_in_which_the_loss_scale_grows_is_the_step_that_it_would_be(
    results: dict[str, Any],
) -> None:
    every = results["options"]["grown"]
    for found in every:
        assert found["scale"] == {
            "cur_scale": 4096,
            "cur_iter": 3,
            "last_overflow_iter": -1,
            "cur_hysteresis": 2,
        }
        assert found["norms"] == pytest.approx(every[0]["norms"], rel=0.02)
        assert found["from_plain"] < MOVE_LIMIT["sgd"]


def test_an_error_while_weights_are_averaged_waits_for_no_other_rank(
    results: dict[str, Any],
) -> None:
    """Refreshing is a collective at stages 1 to 3. An interruption reaches all ranks, another error
    perhaps only one."""
    for found in results["options"]["left_early"]:
        assert found == {"OSError": 1, "Interrupted": 2, "left": 0, "logits": 0}


def test_steps_take_the_memory_that_others_have_freed(results: dict[str, Any]) -> None:
    """If malloc returned memory between steps, the kernel would clear all pages five times."""
    assert results["options"]["pages"] < 5 * 3 * ACTIVATION / resource.getpagesize() / 4


def test_nothing_of_deepspeeds_talk_reaches_the_console(results: dict[str, Any]) -> None:
    found = results["options"]["noise"]
    assert found["console"] == ""
    assert "untested optimizer" in found["log"]
    assert "a warning of Python's" in found["log"]
    assert "a word of the compiler's" in found["log"]


def test_the_word_that_the_deepspeed_launcher_adds_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pretrain(["--local_rank=1", "models", "--match", "mlp_b6_wi256"]) == 0
    assert "mlp_b6_wi256" in capsys.readouterr().out
