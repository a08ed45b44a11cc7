"""Loops that numba compiles. Compiled code is kept on disk if possible."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba


class Compiled:
    """A function that numba compiles at its first call. If the cache on disk does not work, every
    process compiles the function."""

    def __init__(self, function: Callable[..., None], *, options: dict[str, Any]):
        try:
            self.dispatcher = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no directory for the cache is writable
            self.dispatcher = numba.njit(**options)(function)

    def __call__(self, *arguments: Any) -> None:
        try:
            self.dispatcher(*arguments)
        except (EOFError, pickle.UnpicklingError, OSError):  # an incomplete file, or a full disk
            with suppress(OSError):
                self.dispatcher._cache.flush()
            self.dispatcher._cache.disable()
            self.dispatcher(*arguments)
