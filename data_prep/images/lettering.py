"""Draw names in any script with the fonts of the system.

DejaVu Sans comes with matplotlib (Latin, Greek, Cyrillic, Arabic, Hebrew). Debian's
`fonts-noto-cjk` has Chinese, Japanese and Korean. A letter without a font is drawn as its code
point.
"""

import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

_FIRST, _BOXES = "DejaVu Sans", "Last Resort High-Efficiency"


def families(texts: Iterable[str]) -> list[str]:
    """Return a list for matplotlib's `font.family`, so that every letter of `legible(text)` has a
    font."""
    found = map(_family_of, sorted(set().union(*texts)))
    return list(dict.fromkeys([_FIRST, *filter(None, found)]))


def legible(text: str) -> str:
    """Return the text with code points in place of letters that no font has."""
    return "".join(
        each if _family_of(each) else each.encode("unicode_escape").decode() for each in text
    )


def short(text: str, *, length: int) -> str:
    """Return a long text with an ellipsis in place of its middle, because names often differ at
    their ends."""
    half = length // 2
    if len(text) <= length:
        return text
    return f"{text[:half].rstrip()}…{text[len(text) - (length - 1 - half) :].lstrip()}"


@cache
def _family_of(character: str) -> str | None:
    """Return the first font family that has the character; None for private characters (Co)."""
    if character.isascii():
        return _FIRST
    if unicodedata.category(character) == "Co":
        return None
    return next((name for name in _upright() if character in _characters_of(name)), None)


@cache
def _characters_of(family: str) -> frozenset[str]:
    return frozenset(map(chr, _font([family]).get_charmap()))


@cache
def _upright() -> list[str]:
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {entry.fname for entry in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):  # newer than matplotlib's list
        with suppress(OSError, RuntimeError, NotImplementedError):  # an unusable font
            fontManager.addfont(path)
    plain = {
        entry.name
        for entry in fontManager.ttflist
        if (str(entry.weight), entry.style) == ("400", "normal")
    }
    plain -= {_BOXES}
    return sorted(plain, key=lambda name: (name != _FIRST, "Sans" not in name, name))


def _font(names: list[str]) -> Any:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return get_font([findfont(FontProperties(family=[each])) for each in names])


class Letters:
    """Font for text of one size in pixels on a Pillow image."""

    def __init__(self, size: int):
        self._size = size

    def getlength(self, text: str) -> float:
        return float(self._set(text).get_width_height()[0] / 64)

    def draw(
        self, sheet: Image.Image, place: tuple[int, int], text: str, ink: tuple[int, int, int]
    ) -> None:
        font = self._set(text)
        font.draw_glyphs_to_bitmap()
        mask = Image.fromarray(np.array(font.get_image()))
        top = place[1] + self._size - mask.height + font.get_descent() // 64
        sheet.paste(ink, (place[0], top), mask)

    def _set(self, text: str) -> Any:
        font = _font(families([text]))
        font.set_size(0.9 * self._size, 72)
        font.set_text(legible(text))
        return font
