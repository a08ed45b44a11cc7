"""The worker processes of a build: as many as asked for, and none outlives the process that started them.

Without the watch below, workers of a builder that is killed would finish what is queued, into the files of the builder that
takes its place, and then wait for ever.
"""

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process


def worker_pool(num_workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(num_workers, mp_context=get_context("forkserver"), initializer=_end_with_parent)


def _end_with_parent() -> None:
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
