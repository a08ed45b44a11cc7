"""Names in any script are legible: letters without a font are escaped, so no letter becomes a
box."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from data_prep.images.lettering import Letters, families, legible
from finetune.looks import looks

NAMES = (
    "ant",
    "Löwe",
    "кошка",
    "قطة",
    "ネコ いぬ",
    "飞机",
    "고양이",
    "😀",
    "แมว",
    "\ue000 \U0001f9ff",
)


def ink_of(text: str) -> np.ndarray:
    sheet = Image.new("RGB", (200, 30), "white")
    Letters(13).draw(sheet, (2, 2), text, (0, 0, 0))
    return np.asarray(sheet)[:, :, 0] < 128


def test_every_letter_of_a_legible_name_is_in_a_font() -> None:
    """A box fails the test, because matplotlib warns of every letter that it draws as a box."""
    with looks(*NAMES):
        figure = Figure(figsize=(4, 4))
        for number, name in enumerate(NAMES):
            figure.text(0.1, number / 10, legible(name))
        figure.canvas.draw()
    for name in NAMES:
        assert ink_of(name).any(), name


@pytest.mark.parametrize(
    ("one", "other"), [("犬", "猫"), ("ネ", "コ"), ("고", "양"), ("ö", "o"), ("к", "ш"), ("ق", "ط")]
)
def test_two_letters_do_not_look_alike_as_boxes_do(one: str, other: str) -> None:
    """A font of this machine has the letters, or they are escaped. matplotlib's font has the last
    three pairs."""
    assert (ink_of(one) != ink_of(other)).any()
    if one in "犬ネ고" and legible(one) != one:
        assert legible(one) == one.encode("unicode_escape").decode()
        return
    assert (legible(one), legible(other)) == (one, other)
    whole = ink_of(one)
    rows, columns = np.flatnonzero(whole.any(axis=1)), np.flatnonzero(whole.any(axis=0))
    # within its line
    assert rows[0] >= 2 and rows[-1] < 20 and columns[0] >= 2 and columns[-1] < 20


def test_what_no_font_has_is_written_out() -> None:
    assert legible("a\ue000b") == r"a\ue000b"
    assert legible("plain $x_1$ names stay") == "plain $x_1$ names stay"
    assert families(["ant"])[0] == "DejaVu Sans"
