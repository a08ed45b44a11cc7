"""A probe in which a rank lives but does not get on is ended, and says where; ranks that are done hold nobody up."""

import os
import re
import time
from pathlib import Path

from finetune.probe import features, probe
from pretrain.ranks.hangs import PROGRESS, Standing
from pretrain.ranks.heartbeat import Heartbeat, Message, encoded
from tests import training
from tests.forked import begin, environments, wait

TARGET = "tests.finetune.test_probe_hang:"


def is_stuck(*_given: object) -> None:
    PROGRESS._touched_s = time.monotonic() - 1000  # so that the test need not wait so long
    time.sleep(600)


def with_one_stuck_rank(words: list[str]) -> int:
    if os.environ["RANK"] == "1":
        features.view_of = is_stuck  # type: ignore[assignment]
    return training.main("finetune", words)


def with_long_work_of_the_first_rank(words: list[str]) -> int:
    """For some beats after the other one has left, which stood still for long in its last one."""
    plain_scores, plain_leave = probe.test_scores, Heartbeat._leave

    def slow(*given: object) -> object:
        time.sleep(5)
        return plain_scores(*given)  # type: ignore[arg-type]

    def leave(heartbeat: Heartbeat, message: Message) -> None:
        (wire,) = heartbeat._wires.values()
        stalled = Standing(1, 0, "training heads", stalled_s=1000)
        wire.send(encoded({"beat": {}, "at": stalled}) + encoded(message))
        plain_leave(heartbeat, message)

    if os.environ["RANK"] == "0":
        probe.test_scores = slow  # type: ignore[assignment]
    else:
        Heartbeat._leave = leave  # type: ignore[method-assign]
    return training.main("finetune", words)


def run_probe(case: str, folder: Path, place: Path, dataset: Path, **settings: object) -> tuple[list[int | None], str]:
    config = place / "probe.yaml"
    config.write_text("tracking: {enabled: false}\nlrs: [0.1]\nfeature_batch_size: 8\nweight_decays: [0]\nepochs: [2]\n")
    given = {"run_dir": place / "run", "dataset": dataset, "pretrained": folder, "features_dir": place / "features"}
    words = ["probe", str(config), *(f"{name}={value}" for name, value in (given | settings).items())]
    ranks = [begin(TARGET + case, words, environment=each, output=place / "output") for each in environments(2)]
    return wait(ranks, timeout_s=90), (place / "output").read_text()


def test_a_stuck_rank_is_named_and_all_show_where_they_are(folder: Path, other_shapes: Path, tmp_path: Path) -> None:
    case = with_one_stuck_rank.__name__
    codes, output = run_probe(case, folder, tmp_path, other_shapes, **{"ranks.hang_timeout_s": 500})
    assert codes == [1, 1], output
    (line,) = re.findall("^rank 1 .* has made no progress for 1,0.*$", output, re.MULTILINE)
    assert "; the other rank is waiting for the other ranks; the run stops" in line
    waiting, stuck = ((tmp_path / "run" / "stacks" / f"rank-{rank:04}.txt").read_text() for rank in (0, 1))
    assert " in is_stuck\n" in stuck and " in all_sum\n" in waiting


def test_ranks_that_have_left_hold_nobody_up(folder: Path, other_shapes: Path, tmp_path: Path) -> None:
    case = with_long_work_of_the_first_rank.__name__
    codes, output = run_probe(case, folder, tmp_path, other_shapes, **{"ranks.hang_timeout_s": 500})
    assert codes == [0, 0], output
    assert (tmp_path / "run" / "result.json").exists() and not (tmp_path / "run" / "stacks").exists()
