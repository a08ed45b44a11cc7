"""Warnings go to the log file of the current run."""

import logging
from pathlib import Path

from pretrain.loop.train import log_to


def test_a_second_run_closes_the_log_of_the_first(tmp_path: Path) -> None:
    log_to(tmp_path / "first.log")
    (first,) = logging.getLogger("DeepSpeed").handlers
    log_to(tmp_path / "second.log")
    assert isinstance(first, logging.FileHandler) and first.stream is None
