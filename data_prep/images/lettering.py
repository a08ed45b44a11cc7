"""Draw names in any script, with DejaVu Sans, which comes with matplotlib (Latin, Greek, Cyrillic,
Arabic, Hebrew), and the fonts of the machine (Debian: `fonts-noto-cjk` has Chinese, Japanese and
Korean). A letter that no font has is written out as its number, never drawn as a box.
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
    """For matplotlib's `font.family`: together they have all that `legible` leaves of the texts."""
    return list(
        dict.fromkeys([_FIRST, *filter(None, map(_family_of, sorted(set().union(*texts))))])
    )


def legible(text: str) -> str:
    """With what no font has written out: an emoji by its name, a letter by its number."""
    return "".join(each if _family_of(each) else _written_out(each) for each in text)


def short(text: str, *, length: int) -> str:
    """Without its middle: names of one kind often begin alike, and end alike."""
    half = length // 2
    return (
        text
        if len(text) <= length
        else f"{text[:half].rstrip()}…{text[len(text) - (length - 1 - half) :].lstrip()}"
    )


def _written_out(character: str) -> str:
    if unicodedata.category(character) == "So" and (name := unicodedata.name(character, "")):
        return f"({name.lower()})"
    return character.encode("unicode_escape").decode()


@cache
def _family_of(character: str) -> str | None:
    """The first that has it. None: no font, or each has another use for it (Co)."""
    if character.isascii() or character in _characters_of(_FIRST):
        return _FIRST
    is_private = unicodedata.category(character) == "Co"
    return (
        None
        if is_private
        else next((name for name in _others() if character in _characters_of(name)), None)
    )


@cache
def _characters_of(family: str) -> frozenset[str]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(map(chr, get_font(findfont(FontProperties(family=[family]))).get_charmap()))


@cache
def _others() -> list[str]:
    """The upright families of normal weight."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    for name in sorted(
        set(findSystemFonts()) - {entry.fname for entry in fontManager.ttflist}
    ):  # newer than matplotlib's list
        with suppress(
            OSError, RuntimeError, NotImplementedError
        ):  # matplotlib cannot use this font
            fontManager.addfont(name)
    plain = {
        entry.name
        for entry in fontManager.ttflist
        if (str(entry.weight), entry.style) == ("400", "normal")
    }
    return sorted(plain - {_BOXES}, key=lambda name: ("Sans" not in name, name))


class Letters:
    """Of one size in pixels, for a sheet of Pillow's."""

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
        sheet.paste(
            ink, (place[0], place[1] + self._size - mask.height + font.get_descent() // 64), mask
        )

    def _set(self, text: str) -> Any:
        from matplotlib.font_manager import FontProperties, findfont, get_font

        font = get_font([findfont(FontProperties(family=[each])) for each in families([text])])
        font.set_size(0.9 * self._size, 72)
        font.set_text(legible(text))
        return font
