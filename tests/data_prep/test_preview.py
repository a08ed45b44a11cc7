"""A contact sheet shows the stored pixels enlarged without smoothing, with their labels. Two sheets
are equal."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.check.contact_sheet import contact_sheet
from data_prep.cli import main
from data_prep.images.lettering import Letters
from data_prep.images.sheet import CELL, shortened
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, encoded, files_of, write_files

COLORS = {"blue": (0, 0, 255), "green": (0, 128, 0), "red": (255, 0, 0)}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each class has one color and 4 images of 40 x 20 with a black left half."""
    files = {}
    for name, color in COLORS.items():
        flag = Image.new("RGB", (40, 20), color)
        flag.paste("black", (0, 0, 20, 20))
        files |= {f"{name}/{number}.png": encoded(flag, "PNG") for number in range(4)}
    root = tmp_path_factory.mktemp("flags")
    source = write_files(root / "source", files)
    for encoding in ("raw", "keep"):
        assert build(source, root / encoding, f"encoding={encoding}", "samples_per_shard=6") == 0
    return root


@pytest.mark.parametrize("encoding", ["raw", "keep"])
def test_pictures_stand_in_the_order_of_their_classes_in_whole_enlarged_pixels(
    flags: Path, encoding: str
) -> None:
    sheet = np.asarray(contact_sheet(flags / encoding, count=12))
    assert CELL == 112  # seven times the image's 16 pixels
    black, white = ~sheet.any(axis=2), (sheet == 255).all(axis=2)
    seen = []
    for top, left in 1 + np.argwhere(black[1:, 1:] & white[:-1, 1:] & white[1:, :-1]):
        cell = sheet[top : top + CELL, left : left + CELL]
        small = cell[::7, ::7]
        if (
            cell.shape[:2] == (CELL, CELL)
            and not small[:, 0].any()
            and (cell == small.repeat(7, axis=0).repeat(7, axis=1)).all()
        ):
            seen.append(tuple(small[8, 14].tolist()))
    assert seen == [COLORS["blue"]] * 4 + [COLORS["green"]] * 4 + [COLORS["red"]] * 4


def test_a_sheet_is_the_same_every_time_and_another_with_another_seed(shapes: Path) -> None:
    first = contact_sheet(shapes, count=20).tobytes()
    assert contact_sheet(shapes, count=20).tobytes() == first
    assert contact_sheet(shapes, count=20, seed=1).tobytes() != first
    assert contact_sheet(shapes, count=20, shard=1).tobytes() != first


def test_the_command_writes_the_picture_and_leaves_the_dataset_alone(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(shapes)
    out = tmp_path / "deep" / "sheet.png"
    assert (
        main(["preview", str(shapes), "--split", "val", "--count", "500", "--out", str(out)]) == 0
    )
    with Image.open(out) as sheet:
        assert f"{out}: {sheet.width} x {sheet.height} pixels" in capsys.readouterr().out
        assert sheet.width < 10 * (CELL + 20) + 60
    assert files_of(shapes) == before


def test_long_names_keep_both_ends_and_fit() -> None:
    font = Letters(13)
    name = "Tyrannus tyrannus, the eastern kingbird, in flight"
    short = shortened(name, font, width=CELL)
    assert font.getlength(short) <= CELL
    assert short.startswith("Tyran")
    assert short.endswith("ight")
    assert shortened("ant", font, width=CELL) == "ant"
    assert shortened(name, font, width=3) == "…"


def test_a_mistake_is_one_line(shapes: Path, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "sheet.png"
    refused(main(["preview", str(shapes), "--out", str(out), "--shard", "4"]), "[bad-value]")
    refused(main(["preview", str(shapes), "--out", str(out), "--split", "vla"]), "[unknown-name]")
    assert not out.exists()


def test_only_a_png_is_written_and_only_over_a_png(
    shapes: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "mine.png").write_bytes(b"a drawing of another kind")
    (tmp_path / "notes.txt").write_text("mine")
    before = files_of(tmp_path)
    for name, words in [
        ("notes.txt", "[bad-value]"),
        ("mine.png", "[exists]"),
        ("folder.png", "[unreadable]"),
    ]:
        refused(main(["preview", str(shapes), "--out", str(tmp_path / name)]), "out: ", name, words)
    assert files_of(tmp_path) == before
    for seed in ("0", "1"):
        words = ["--count=2", f"--seed={seed}", f"--out={tmp_path}/new.png"]
        assert main(["preview", str(shapes), *words]) == 0
