"""RUN/logs: what libraries warn of, one file per rank, so that the console shows the run alone."""

import logging
from pathlib import Path

LOGGERS = ("DeepSpeed", "py.warnings", "torch.utils.cpp_extension")
"""The last looks for compilers when something is compiled, and warns of it."""


def log_to(path: Path) -> None:
    """From now on what these libraries and Python warn of is kept in this file instead of being shown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)
