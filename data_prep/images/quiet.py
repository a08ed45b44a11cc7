"""Python's warnings held back while pictures are decoded, by any number of threads at once.

`warnings.catch_warnings` changes the filters of the whole process and puts back those that it found: of two threads whose blocks
overlap, the later one to leave puts back the filters of the other's block, and every warning of the process is lost from then on.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_filters = contextlib.ExitStack()


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """The first thread to enter changes the filters, the last one to leave puts them back."""
    global _inside  # noqa: PLW0603 (the filters that it counts for are the process's, too)
    with _lock:
        _inside += 1
        if _inside == 1:
            _filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _filters.close()
