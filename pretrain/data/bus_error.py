"""Print the dataset if SIGBUS ends a process that reads mapped shards: a file was shortened, or its
disk failed.

The kernel ends such a process before Python's signal handlers run. So the handler is machine code
without Python: it writes a prepared text and restores the earlier handler (faulthandler's). Then
the same read faults again, and the process ends as usual.
"""

import ctypes
import signal

import numba

_libc = ctypes.CDLL(None)
_write = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)(
    ("write", _libc)
)
_strlen = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(("strlen", _libc))
_sigaction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)(
    ("sigaction", _libc)
)
_text, _before = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(512)
_TEXT, _BEFORE = ctypes.addressof(_text), ctypes.addressof(_before)
_DATASETS: dict[str, None] = {}


@numba.cfunc("void(int32)")  # type: ignore[untyped-decorator]
def _explain(number: int) -> None:
    _write(2, _TEXT, _strlen(_TEXT))
    _sigaction(number, _BEFORE, 0)


def name_dataset(dataset: str) -> None:
    """Add the dataset to the text that is printed at SIGBUS."""
    if not _DATASETS:
        _sigaction(signal.SIGBUS, 0, _BEFORE)
        _libc.signal(signal.SIGBUS, ctypes.c_void_p(_explain.address))
    _DATASETS[dataset] = None
    verify = " and ".join(f"data_prep verify {each}" for each in _DATASETS)
    text = (
        "\ndata.dataset: a shard was cut short while it was read, or its disk failed (SIGBUS). Run"
        f" {verify}.\n".encode()
    )
    _text.value = text[: len(_text) - 1]
