"""The DeepSpeed engine compared with plain PyTorch, and resumed compared with uninterrupted
training, for every ZeRO stage and precision."""

from typing import Any

import pytest

from tests.distributed.engine_cells import CELLS, KINDS, MOVED
from tests.distributed.engines import CLIP

pytestmark = pytest.mark.processes

GRADIENT_LIMIT = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 2e-2}
"""Relative. A missing micro-batch or rank would give 0.5, a missing loss scale thousands."""
MOVE_LIMIT = {"lion": 0.6, "adamw": 0.3, "sgd": 0.02}
"""Limits for low precision, relative to the change of three steps. Lion and AdamW magnify the
errors of small gradients, up to a change of sign."""
LOSS_LIMIT = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}


@pytest.fixture(params=CELLS)
def identity(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cell(results: dict[str, Any], identity: str) -> dict[str, Any]:
    return dict(results["cells"][identity])


@pytest.mark.parametrize("accumulation", ["once", "twice"])
def test_gradients_are_those_of_plain_pytorch(
    cell: dict[str, Any], identity: str, accumulation: str
) -> None:
    found, limit = cell[accumulation], GRADIENT_LIMIT[CELLS[identity][1]]
    assert found["gradient"] < limit
    assert found["norm"] < limit
    assert found["clipped"] == pytest.approx(CLIP, rel=1e-5)


def test_weights_are_those_of_plain_pytorch(cell: dict[str, Any], identity: str) -> None:
    _, precision, optimizer = CELLS[identity]
    assert cell["from_plain"] < (1e-4 if precision == "fp32" else MOVE_LIMIT[optimizer])


def test_a_step_that_one_rank_spoils_is_skipped_on_all_and_leaves_no_trace(
    cell: dict[str, Any],
) -> None:
    assert cell["applied"] == [[False, False], [False, False]]
    assert cell["untouched"] == 0
    assert cell["updates"] == [0, 1, 2, 3, 1, 3]


def test_a_resumed_engine_ends_at_the_bits_of_one_that_had_skipped_steps(
    cell: dict[str, Any],
) -> None:
    assert cell["resumed"] == 0


def test_the_loss_scale_falls_with_overflows_and_is_part_of_the_state(
    cell: dict[str, Any], identity: str
) -> None:
    before, after, end, resumed = cell["scales"]
    if CELLS[identity][1] != "fp16":
        assert before == after == end == resumed == {}
        return
    assert before == {
        "cur_scale": 1024,
        "cur_iter": 1,
        "last_overflow_iter": -1,
        "cur_hysteresis": 2,
    }
    assert after == {"cur_scale": 512, "cur_iter": 3, "last_overflow_iter": 2, "cur_hysteresis": 1}
    assert end == resumed == after | {"cur_iter": 5}
    assert cell["kept_scale"][0] == cell["kept_scale"][1] == after


def test_the_published_weights_are_the_average_of_the_raw_ones(cell: dict[str, Any]) -> None:
    assert cell["average"] < 1e-6


def test_averaged_weights_are_used_inside_the_block_and_leave_all_bits_as_they_were(
    cell: dict[str, Any], identity: str
) -> None:
    found = cell["averaged"]
    assert found["from_published"] < (1e-6 if CELLS[identity][1] == "fp32" else 2e-2)
    assert found["moved"] > 2e-2
    assert found["left"] == 0


def test_the_state_fits_another_stage(
    cell: dict[str, Any], identity: str, results: dict[str, Any]
) -> None:
    stage, precision, _ = CELLS[identity]
    assert cell["kept"] == 0
    stayed = results["cells"][f"stage{(stage - 1) % 4}-{precision}"]["losses"]
    assert cell["losses_of_moved"] == pytest.approx(stayed, abs=LOSS_LIMIT[precision])


def test_segments_name_each_element_of_each_parameter_once(
    cell: dict[str, Any], identity: str
) -> None:
    """Stage 0 has each element on both ranks."""
    times = 2 if CELLS[identity][0] == 0 else 1
    assert cell["tiling"] == {"least": times, "most": times, "right": True}
    assert cell["stepped"]


def test_optimizer_state_has_the_kinds_that_the_optimizer_has(
    cell: dict[str, Any], identity: str
) -> None:
    assert cell["kinds"] == [*KINDS[CELLS[identity][2]], "weight"]


def test_the_state_fits_another_number_of_ranks(
    results: dict[str, Any], alone: dict[str, Any]
) -> None:
    for identity in MOVED:
        limit = LOSS_LIMIT[CELLS[identity][1]]
        assert alone["losses"][identity] == pytest.approx(
            results["cells"][identity]["losses"], abs=limit
        )
