"""A flat folder with a label table gives the same dataset as folders of classes. Each fault of the
table is a one-line error."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data_prep.manifest import load_manifest
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, encoded, picture, write_classes, write_files

NAMES = {f"{number}.jpg": "cat" if number % 2 else "ant" for number in range(10)}
"""Label of each file."""


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    pictures = {name: encoded(picture(seed=number)) for number, name in enumerate(NAMES)}
    return write_files(tmp_path / "flat", pictures | {"readme.txt": b"how to cite"})


def csv(place: Path, *, head: str = "file,label", rows: list[str] | None = None) -> Path:
    place.write_text(
        "\n".join([head, *(rows or [f"{name},{label}" for name, label in NAMES.items()])]) + "\n"
    )
    return place


def test_a_table_and_folders_of_classes_hold_the_same_pictures(tmp_path: Path, flat: Path) -> None:
    folders = {f"{label}/{name}": (flat / name).read_bytes() for name, label in NAMES.items()}
    assert (
        build(
            write_files(tmp_path / "folders", folders),
            tmp_path / "one",
            "source.val_fraction=0.4",
            "order=listed",
        )
        == 0
    )
    table = {
        "Image_ID": [name.removesuffix(".jpg") for name in NAMES],
        "Class": list(NAMES.values()),
    }
    parquet.write_table(
        pyarrow.table(table), flat / "labels.parquet"
    )  # no suffixes, other names, and a table in the folder itself
    given = f"source.labels={flat / 'labels.parquet'}"
    assert build(flat, tmp_path / "two", given, "source.val_fraction=0.4", "order=listed") == 0
    one, two = (load_manifest(tmp_path / name) for name in ("one", "two"))
    assert one.classes == two.classes == ("ant", "cat")
    for split, count in {"train": (3, 3), "val": (2, 2)}.items():
        assert one.splits[split].class_counts == two.splits[split].class_counts == count
    assert one.num_held_out == two.num_held_out == 4


def test_the_tables_own_splits_count_and_another_table_is_another_dataset(
    tmp_path: Path, flat: Path, refused: Refused
) -> None:
    rows = [
        f"{name};{label};{split}"
        for (name, label), split in zip(
            NAMES.items(), ["Training"] * 6 + ["valid"] * 4, strict=True
        )
    ]
    table = csv(tmp_path / "table.csv", head="\ufefffile;label;split", rows=rows)
    assert build(flat, tmp_path / "out", f"source.labels={table}", "source.val_fraction=0.5") == 0
    splits = load_manifest(tmp_path / "out").splits
    assert {name: split.class_counts for name, split in splits.items()} == {
        "train": (3, 3),
        "val": (2, 2),
    }
    csv(table, head="file;label;split", rows=rows[::-1])  # the same labels
    assert build(flat, tmp_path / "out", f"source.labels={table}", "source.val_fraction=0.5") == 0
    csv(table, head="file;label;split", rows=[row.replace("valid", "test") for row in rows])
    refused(
        build(flat, tmp_path / "out", f"source.labels={table}", "source.val_fraction=0.5"),
        "was made with another config",
    )


def test_labels_that_are_numbers_keep_their_order(tmp_path: Path, flat: Path) -> None:
    table = csv(
        tmp_path / "t.csv", rows=[f"{name},{number % 5 * 7}" for number, name in enumerate(NAMES)]
    )
    assert build(flat, tmp_path / "out", f"source.labels={table}") == 0
    assert load_manifest(tmp_path / "out").classes == ("0", "7", "14", "21", "28")


ROWS = [f"{name},{label}" for name, label in NAMES.items()]
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda table: table.unlink(), "missing-path"),
    "empty": (lambda table: table.write_text(""), "empty"),
    "no rows": (lambda table: table.write_text("file,label\n"), "empty"),
    "no column": (lambda table: csv(table, head="file,kind"), "unknown-name"),
    "doubled": (lambda table: csv(table, rows=[*ROWS, ROWS[3]]), "bad-value"),
    "unlabeled": (lambda table: csv(table, rows=[*ROWS[:-1], "9.jpg,"]), "bad-value"),
    "without a row": (lambda table: csv(table, rows=ROWS[1:]), "mismatch"),
    "no picture": (lambda table: csv(table, rows=[*ROWS, "x/y.png,ant"]), "mismatch"),
    "one image twice": (
        lambda table: csv(table, rows=[*ROWS, ROWS[0].replace(".jpg,", ",")]),
        "mismatch",
    ),
    "a note": (lambda table: csv(table, rows=[*ROWS, "readme.txt,ant"]), "mismatch"),
    "two files": (
        lambda table: csv(
            table, head="id,file,label", rows=[f"{row.partition('.')[0]},{row}" for row in ROWS]
        ),
        "conflict",
    ),
    "two labels": (
        lambda table: csv(table, head="file,label,Class", rows=[f"{row},x" for row in ROWS]),
        "conflict",
    ),
    "no train": (
        lambda table: csv(table, head="file,label,set", rows=[f"{row},test" for row in ROWS]),
        "empty",
    ),
    "odd split": (
        lambda table: csv(table, head="file,label,set", rows=[f"{row},a" for row in ROWS]),
        "bad-value",
    ),
    "no parquet": (lambda table: table.rename(table.with_suffix(".parquet")), "missing-path"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_table_is_one_line(
    fault: str, tmp_path: Path, flat: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damage, code = FAULTS[fault]
    damage(csv(Path("t.csv")))
    refused(build("flat", Path("out"), "source.labels=t.csv"), "source.labels: ", f"[{code}]")


def test_a_column_is_named_or_the_table_is(tmp_path: Path, flat: Path, refused: Refused) -> None:
    table = csv(tmp_path / "t.csv", head="a,b")
    assert (
        build(
            flat, tmp_path / "out", f"source.labels={table}", "source.columns={file: a, label: b}"
        )
        == 0
    )
    assert load_manifest(tmp_path / "out").num_left_out == {".txt files": 1}
    ids = csv(
        tmp_path / "ids.csv",
        head="id,name,label",
        rows=[f"1{number},{row}" for number, row in enumerate(ROWS)],
    )
    assert (
        build(flat, tmp_path / "ids", f"source.labels={ids}") == 0
    )  # there are no files 10, 11, ...
    assert load_manifest(tmp_path / "ids").num_read == len(NAMES)
    refused(
        build(flat, tmp_path / "two", f"source.labels={table}", "source.columns.file=c"),
        "has no column 'c', only a, b",
    )
    refused(build(flat, tmp_path / "two"), "source.labels=FILE.csv")


def test_a_tenth_is_held_out_by_default_and_the_build_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from data_prep.cli import main  # not the tests' helper, which holds out no images

    source = write_classes(tmp_path / "source", {"ant": 20, "bee": 2, "cat": 1})
    write_files(
        source,
        {
            f"{path.relative_to(source)}.{end}": b"x"
            for path in source.glob("*/*.jpg")
            for end in ("txt", "xml")
        },
    )
    write_files(source, {"bee/damaged.jpg": b"x", "cat/LICENSE": b"x"})
    more = "image_size=16 num_workers=1 max_reject_fraction=0.05 --out"
    words = ["build", "--source", "folder", f"source.path={source}", *more.split()]
    assert main([*words, str(tmp_path / "out")]) == 0
    splits = load_manifest(tmp_path / "out").splits
    said = capsys.readouterr().out
    assert (
        "skipped without reading: .txt files 23, .xml files 23, files without an ending 1\n" in said
    )
    val = splits["val"].class_counts
    assert (
        val[0] == 2
        and val[2] == 0
        and np.add(splits["train"].class_counts, val).tolist() == [20, 2, 1]
    )
    assert f"held out as val: {sum(val)} images (source.val_fraction=0.1; set 0 to" in said
    write_classes(tmp_path / "split", {"train/ant": 2, "val/ant": 2})
    words[3] = f"source.path={tmp_path / 'split'}"
    assert main([*words, str(tmp_path / "own")]) == 0
    assert "held out" not in capsys.readouterr().out
    write_classes(tmp_path / "ones", {"ant": 1, "bee": 1})
    words[3] = f"source.path={tmp_path / 'ones'}"
    assert main([*words, str(tmp_path / "none")]) == 0
    assert list(load_manifest(tmp_path / "none").splits) == ["train"]
    write_files(tmp_path / "ones", {"cow/notes.txt": b"x"})
    assert main([*words, str(tmp_path / "more")]) == 2
    assert "1 class folders of this folder source have no images (cow)" in capsys.readouterr().err


def test_a_build_that_ended_before_its_first_shard_refuses_no_other_settings(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 4}), tmp_path / "out"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data_prep.build.build.write_shards", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(source, out, "seed=1")
    assert len(list(out.glob("*/begun.json"))) == 1
    assert build(source, out, "seed=2") == 0
    assert load_manifest(out).seed == 2
