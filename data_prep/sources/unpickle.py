"""Reads the pickles that CIFAR is published as, without ever running anything in them.

Python's own unpickler calls what a pickle names, and even with its globals restricted, a damaged length makes it reserve
gigabytes. Here the opcodes of plain values (numbers, strings, lists, tuples, dicts) are interpreted directly. Globals are mere
words: the five that arrays consist of are understood, any other ends the reading with its name. Python-2 strings are bytes.

Invariants: nothing is imported, called or compared; memory is proportional to the length of the pickle.
"""

import codecs
import struct
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class PickleError(ValueError):
    """A pickle that is damaged, or holds more than plain values and arrays; the text says what."""


class _Word(Enum):
    RECONSTRUCT, NDARRAY, DTYPE, ENCODE = range(4)


_WORDS: Final = {
    "numpy.core.multiarray _reconstruct": _Word.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Word.RECONSTRUCT,
    "numpy ndarray": _Word.NDARRAY,
    "numpy dtype": _Word.DTYPE,
    "_codecs encode": _Word.ENCODE,
    "codecs encode": _Word.ENCODE,
}
_MARK: Final = object()
_NUMBER_KINDS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


class PickledType:
    def __init__(self, code: str):
        self.code, self.byte_order = code, "|"


class PickledArray:
    """The fields of an array as they stand in the pickle."""

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()

    def to_numpy(self) -> NDArray[Any]:
        if len(self.state) != 5:
            raise PickleError("an array without content")
        _, shape, kind, fortran, data = self.state
        if not (isinstance(kind, PickledType) and kind.code in _NUMBER_KINDS and isinstance(data, bytes)):
            raise PickleError("an array of something else than integers")
        if not (isinstance(shape, tuple) and all(type(length) is int and length >= 0 for length in shape)):
            raise PickleError("an array with a wrong shape")
        dtype = np.dtype(("<" if kind.byte_order == "|" else kind.byte_order) + kind.code)
        if _product(shape) * dtype.itemsize != len(data):
            raise PickleError(f"an array of the shape {shape} with {len(data):,} bytes")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def load_plain(data: bytes) -> Any:
    """The value of the pickle `data`; raises `PickleError`."""
    return _Machine(data).run()


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


class _Machine:
    """The stack machine of pickle, for plain values."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while (code := self.take(1)) != b".":
            push, do = _PUSHED.get(code), _DONE.get(code)
            if push is not None:
                self.stack.append(push(self))
            elif do is not None:
                do(self)
            else:
                raise PickleError(
                    f"holds the instruction {code!r} at byte {self.place - 1:,}, which plain values never need"
                )
        return self.pop()

    def take(self, length: int) -> bytes:
        begin, self.place = self.place, self.place + length
        if length < 0 or self.place > len(self.data):
            raise PickleError("ends in the middle of a value")
        return self.data[begin : self.place]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.place)
        return self.take(end + 1 - self.place)[:-1]

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleError("takes a value from an empty stack")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise PickleError(f"fills something that is no {kind.__name__}")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self.stack:
            item = self.stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise PickleError("has no beginning of a sequence")

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(self.pop() for _ in range(count))[::-1]

    def remember(self, place: int) -> None:
        self.memo[place] = self.top(object)

    def recall(self, place: int) -> Any:
        if place not in self.memo:
            raise PickleError("refers to a value that it never stored")
        return self.memo[place]

    def extend_dict(self, items: list[Any]) -> None:
        found: dict[Any, Any] = self.top(dict)
        if len(items) % 2 or not all(isinstance(key, bytes | str | int) for key in items[::2]):
            raise PickleError("has a dict whose keys are no words")
        found.update(zip(items[::2], items[1::2], strict=True))

    def build(self) -> None:
        """Fills an array or its type with a state."""
        state, target = self.pop(), self.top(object)
        if isinstance(target, PickledArray) and isinstance(state, tuple):
            target.state = state
        elif isinstance(target, PickledType) and isinstance(state, tuple) and len(state) > 1:
            target.byte_order = _text(state[1])
            if target.byte_order not in ("<", ">", "|"):
                raise PickleError("has an array of an unknown byte order")
        else:
            raise PickleError("gives a state to something that is no array")


def _word(module: str, name: str) -> _Word:
    word = _WORDS.get(f"{module} {name}")
    if word is None:
        raise PickleError(f"asks for the global {module}.{name}, which arrays of numbers never need")
    return word


def _reduce(machine: _Machine) -> Any:
    arguments, word = machine.pop(), machine.pop()
    if word is _Word.RECONSTRUCT:
        return PickledArray()
    if isinstance(arguments, tuple) and arguments:
        if word is _Word.DTYPE:
            return PickledType(_text(arguments[0]))
        if word is _Word.ENCODE and isinstance(arguments[0], str) and arguments[1:] == ("latin1",):
            return arguments[0].encode("latin1")
    raise PickleError("calls something that makes no array")


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _quoted(line: bytes) -> bytes:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise PickleError("has a string without quotes")
    return codecs.escape_decode(line[1:-1])[0]


def _integer(line: bytes) -> int | bool:
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L"))


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_PUSHED: Final[dict[bytes, Callable[[_Machine], Any]]] = {
    b"(": lambda m: _MARK,
    b"N": lambda m: None,
    b"\x88": lambda m: True,
    b"\x89": lambda m: False,
    b"I": lambda m: _integer(m.line()),
    b"L": lambda m: _integer(m.line()),
    b"J": lambda m: m.number("<i"),
    b"K": lambda m: m.number("<B"),
    b"M": lambda m: m.number("<H"),
    b"\x8a": lambda m: _little(m.take(m.number("<B"))),
    b"\x8b": lambda m: _little(m.take(m.number("<i"))),
    b"F": lambda m: float(m.line()),
    b"G": lambda m: m.number(">d"),
    b"S": lambda m: _quoted(m.line()),
    b"T": lambda m: m.take(m.number("<i")),
    b"U": lambda m: m.take(m.number("<B")),
    b"V": lambda m: m.line().decode("raw-unicode-escape"),
    b"X": lambda m: _utf8(m.take(m.number("<I"))),
    b"\x8c": lambda m: _utf8(m.take(m.number("<B"))),
    b"\x8d": lambda m: _utf8(m.take(m.number("<Q"))),
    b"B": lambda m: m.take(m.number("<I")),
    b"C": lambda m: m.take(m.number("<B")),
    b"\x8e": lambda m: m.take(m.number("<Q")),
    b"]": lambda m: [],
    b"}": lambda m: {},
    b")": lambda m: (),
    b"l": lambda m: m.pop_to_mark(),
    b"t": lambda m: tuple(m.pop_to_mark()),
    b"\x85": lambda m: m.pop_many(1),
    b"\x86": lambda m: m.pop_many(2),
    b"\x87": lambda m: m.pop_many(3),
    b"g": lambda m: m.recall(int(m.line())),
    b"h": lambda m: m.recall(m.number("<B")),
    b"j": lambda m: m.recall(m.number("<I")),
    b"c": lambda m: _word(_text(m.line()), _text(m.line())),
    b"\x93": lambda m: _word(*map(_text, m.pop_many(2))),
    b"R": _reduce,
}
"""Instructions that push one value."""


def _dict(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({})
    machine.extend_dict(items)


def _extend(machine: _Machine, kind: type) -> None:
    items = machine.pop_to_mark()
    if kind is dict:
        machine.extend_dict(items)
    else:
        machine.top(list).extend(items)


def _append(machine: _Machine) -> None:
    item = machine.pop()
    machine.top(list).append(item)


_DONE: Final[dict[bytes, Callable[[_Machine], object]]] = {
    b"\x80": lambda m: m.take(1),
    b"\x95": lambda m: m.take(8),
    b"d": _dict,
    b"a": _append,
    b"e": lambda m: _extend(m, list),
    b"s": lambda m: m.extend_dict(list(m.pop_many(2))),
    b"u": lambda m: _extend(m, dict),
    b"p": lambda m: m.remember(int(m.line())),
    b"q": lambda m: m.remember(m.number("<B")),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"b": lambda m: m.build(),
}
"""Instructions that change what is there."""
