"""Names in any script, in the letters of the fonts that are here.

DejaVu Sans, which comes with matplotlib, has Latin, Greek, Cyrillic, Arabic, Hebrew and some emoji. What it lacks is looked for in
the fonts of the machine, then in the one within OpenCV (Chinese, Japanese, Korean), whose pixels are traced into a font that
matplotlib can read. What no font has is written out, never drawn as a box.
"""

import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_FIRST, _EM = "DejaVu Sans", 256
_family_of: dict[str, str | None] = {}
"""Of every character beyond ASCII that was asked for; None: no font has it."""


def families(texts: Iterable[str]) -> list[str]:
    """For matplotlib's `font.family`: together they have all that `legible` leaves of the texts."""
    others = {each for each in set().union(*texts) if not each.isascii()} - _family_of.keys()
    missing = {each for each in others if unicodedata.category(each) != "Co"}  # for which each font has a use of its own
    for name in _searched(missing) if missing else ():
        found = missing & _characters_of(name)
        _family_of.update(dict.fromkeys(found, name))
        missing -= found
    _family_of.update(dict.fromkeys(others - _family_of.keys()))
    return list(dict.fromkeys([_FIRST, *filter(None, _family_of.values())]))


def legible(text: str) -> str:
    """With what no font has written out: an emoji by its name, a letter by its number."""
    families([text])
    return "".join(each if _family_of.get(each, _FIRST) else _written_out(each) for each in text)


def _written_out(character: str) -> str:
    if unicodedata.category(character) == "So" and (name := unicodedata.name(character, "")):
        return f"({name.lower()})"
    return character.encode("unicode_escape").decode()


@cache
def _characters_of(family: str) -> frozenset[str]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(map(chr, get_font(findfont(FontProperties(family=[family]))).get_charmap()))


def _searched(missing: set[str]) -> Iterator[str]:
    """As long as something is missing still."""
    yield _FIRST
    yield from _others() if missing else ()
    yield from _traced(sorted(missing)) if missing else ()


@cache
def _others() -> list[str]:
    """The families of the machine."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    for path in sorted(set(findSystemFonts()) - {entry.fname for entry in fontManager.ttflist}):
        with suppress(OSError, RuntimeError, NotImplementedError):  # newer than matplotlib's list, or of no use to it
            fontManager.addfont(path)
    plain = {entry.name for entry in fontManager.ttflist if (str(entry.weight), entry.style) == ("400", "normal")}
    return sorted(plain - {"Last Resort High-Efficiency"}, key=lambda name: ("Sans" not in name, name))  # that one has boxes


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Goes with the process."""
    return tempfile.TemporaryDirectory(prefix="letters-")


def _traced(characters: list[str]) -> list[str]:
    """The family of those that OpenCV has, from its version 5 on."""
    import cv2
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen
    from matplotlib.font_manager import fontManager

    if not hasattr(cv2, "FontFace"):
        return []
    face = cv2.FontFace("uni")

    def drawn(character: str) -> NDArray[np.uint8]:
        cv2.putText(pixels := np.zeros((2 * _EM, 2 * _EM), np.uint8), character, (0, _EM * 3 // 2), 255, face, _EM)
        return pixels

    pens, widths = {".notdef": TTGlyphPen(None)}, {".notdef": (0, 0)}
    for each in characters:
        if (drawn(each) == drawn("\uffff")).all():  # what it draws for all that it lacks
            continue
        pen = pens[each] = TTGlyphPen(None)
        for outline in cv2.findContours(drawn(each) // 128, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)[0]:
            for number, (x, y) in enumerate(outline[:, 0].tolist()):
                (pen.lineTo if number else pen.moveTo)((x, _EM * 3 // 2 - y))
            pen.closePath()
        widths[each] = (cv2.getTextSize((0, 0), each, (0, 0), face, _EM)[2], 0)
    font, family = FontBuilder(_EM, isTTF=True), f"traced {len(_family_of)}"
    font.setupGlyphOrder(list(pens))
    font.setupCharacterMap({ord(each): each for each in pens if each != ".notdef"})
    font.setupGlyf({name: pen.glyph() for name, pen in pens.items()})
    font.setupHorizontalMetrics(widths)
    font.setupHorizontalHeader(ascent=_EM, descent=-_EM // 4)
    font.setupNameTable({"familyName": family, "styleName": "Regular"})
    font.setupOS2()
    font.setupPost(keepGlyphNames=False)
    path = Path(_folder().name) / f"{family}.ttf"
    font.save(path)
    fontManager.addfont(path)
    return [family]


class Letters:
    """Of one size in pixels, for a sheet of Pillow's."""

    def __init__(self, size: int):
        self._size = size

    def getlength(self, text: str) -> float:
        return float(self._set(text).get_width_height()[0] / 64)

    def draw(self, sheet: Image.Image, place: tuple[int, int], text: str, ink: tuple[int, int, int]) -> None:
        font = self._set(text)
        font.draw_glyphs_to_bitmap()
        mask = Image.fromarray(np.array(font.get_image()))
        sheet.paste(ink, (place[0], place[1] + self._size - mask.height + font.get_descent() // 64), mask)

    def _set(self, text: str) -> Any:
        from matplotlib.font_manager import FontProperties, findfont, get_font

        font = get_font([findfont(FontProperties(family=[each])) for each in families([text])])
        font.set_size(0.9 * self._size, 72)
        font.set_text(legible(text))
        return font
