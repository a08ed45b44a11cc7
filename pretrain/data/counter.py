"""Counter-based random numbers: every value is a hash of what it is for, so no generator has a state to lose.

`hash64` mixes integers (SplitMix64's finaliser, vectorised with numpy); what is drawn for sample 17 of epoch 3 is the same on
every rank, for every worker count and after every resume.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hash64(*parts: ArrayLike) -> U64:
    """One 64-bit hash of the parts, broadcast over arrays; the order of the parts matters."""
    with np.errstate(over="ignore"):
        state = np.asarray(_GOLDEN)
        for part in parts:
            state = _mix(state + _GOLDEN + np.asarray(part).astype(np.uint64))
    return state


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def uniform(*parts: ArrayLike) -> NDArray[np.float64]:
    """Uniform in [0, 1) with 53 bits, a function of the parts."""
    return (hash64(*parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hex_key(text: str) -> int:
    """The first 63 bits of a hex digest, as a part for `hash64`."""
    return int(text[:16], 16) >> 1
