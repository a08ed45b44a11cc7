"""Bad samples in stock shards have one line each, a damaged shard has one line, and a dataset is
complete or absent."""

import gzip
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.check.verify import verify
from data_prep.cli import main
from data_prep.manifest import PARTS, load_manifest
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, encoded, files_of, picture, write_classes
from tests.data_prep.stock import (
    hashes,
    index,
    paths,
    read,
    rejects,
    sample,
    seen,
    write_stock,
    write_tar,
)
from tests.errors import printed_errors

# stock webdataset does not close the files that it has read
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


# ---- bad samples


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_every_bad_sample_has_its_line_and_no_pickle_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    jpg = encoded(picture(seed=1))
    huge = b"P6\n99999 99999\n255\n"
    members = [
        ("README", b"no key"),
        ("__index__", b"meta"), ("__all__/a.jpg", b"meta"),
        ("good.jpg", jpg), ("good.cls", b" 2\n"), ("good.pyd", pickle.dumps(Trap())), ("good.PTH", b"x"),
        ("two.jpg", jpg), ("two.PNG", encoded(picture(seed=2), "PNG")), ("two.cls", b"1"),
        ("same.jpg", jpg), ("same.cls", b"1"), ("same.cls", b"2"),
        ("unlabeled.jpg", jpg),
        ("blind.cls", b"1"),
        ("only.pkl", pickle.dumps(Trap())), ("only.cls", b"0"),
        ("a.jpg", jpg), ("b.jpg", jpg), ("a.cls", b"0"), ("b.cls", b"0"),
        ("cut.jpg", jpg[:-60]), ("cut.cls", b"1"),
        ("damaged.jpg", jpg[:-40] + b"\xff\xd0" + jpg[-38:]), ("damaged.cls", b"1"),
        ("empty.jpg", b""), ("empty.cls", b"1"),
        ("text.jpg", b"no picture"), ("text.cls", b"1"),
        ("huge.ppm", huge), ("huge.cls", b"1"),
        ("word.jpg", jpg), ("word.cls", b"cat"),
        ("real.jpg", jpg), ("real.cls", b"1.0"),
        ("minus.jpg", jpg), ("minus.cls", b"-1"),
        ("giant.jpg", jpg), ("giant.cls", b"99999999"),
        ("last.Jpeg", jpg), ("last.cls", b"0"),
    ]  # fmt: skip
    shard = write_tar(tmp_path / "in" / "s.tar", members)
    before = hashes(tmp_path / "in")
    assert index(tmp_path / "out", shard) == 1
    assert index(tmp_path / "out", shard, "max_reject_fraction=1") == 0
    assert rejects(tmp_path / "out") == {
        f"s.tar/{key}": reason
        for key, reason in {
            "two": "several_images", "same": "doubled_member", "unlabeled": "no_label", "blind": "no_image",
            "only": "no_image", "a": "interleaved", "b": "interleaved", "cut": "truncated", "empty": "empty",
            "damaged": "damaged",
            "text": "not_an_image", "huge": "too_many_pixels", "word": "bad_label", "real": "bad_label",
            "minus": "label_out_of_range", "giant": "label_out_of_range",
        }.items()
    }  # fmt: skip
    manifest = load_manifest(tmp_path / "out")
    assert (manifest.num_read, manifest.num_written, manifest.num_rejected) == (18, 2, 16)
    assert manifest.num_left_out == {"without_key": 1}
    assert read(tmp_path / "out")[1] == [2, 0]
    assert hashes(tmp_path / "in") == before
    assert not (tmp_path / "sprung").exists()


NO_LABELS = {
    b"{": "bad_label",
    b"[" * 100_000: "bad_label",
    b"\xff\xfe": "bad_label",
    b"[1]": "no_label",
    b"{}": "no_label",
    b'{"label": null}': "bad_label",
    b'{"label": true}': "bad_label",
    b'{"label": 1.5}': "bad_label",
    b'{"label": [1]}': "bad_label",
    b'{"label": -3}': "label_out_of_range",
    b'{"label": ' + b"9" * 400 + b"}": "label_out_of_range",
    b'{"label": ' + b"9" * 5000 + b"}": "bad_label",
}


def test_json_that_holds_no_label_is_a_line(tmp_path: Path) -> None:
    jpg = encoded(picture(seed=1))
    members = [("good.jpg", jpg), ("good.json", b'{"label": 1}')]
    for number, data in enumerate(NO_LABELS):
        members += [(f"b{number}.jpg", jpg), (f"b{number}.json", data)]
    assert (
        index(
            tmp_path / "out",
            write_tar(tmp_path / "s.tar", members),
            "label=json:label",
            "max_reject_fraction=1",
        )
        == 0
    )
    assert rejects(tmp_path / "out") == {
        f"s.tar/b{number}": reason for number, reason in enumerate(NO_LABELS.values())
    }
    assert read(tmp_path / "out")[1] == [1]


FOREIGN = [
    (
        {"json": b'{"n; set n": 3, "class": "ant"}'},
        "found .json with keys n; set n, class. Set label=json:class",
    ),
    ({"json": b'{"n": 3, "name": "ant"}'}, "found .json with keys n, name. Set label=json:n"),
    ({"json": b'{"n": 3}', "txt": b"ant\n"}, "found .txt (ant). Set label=txt"),
    ({"json": b"[", "txt": b"ant"}, "found .txt (ant). Set label=txt"),
    ({}, "found .jpg. Set label=none to read images without labels"),
]


@pytest.mark.parametrize(("others", "words"), FOREIGN)
def test_shards_without_the_label_are_refused_with_where_it_may_be_and_leave_nothing_behind(
    others: dict[str, bytes], words: str, tmp_path: Path, refused: Refused
) -> None:
    """The fix in the message works with the same command in the same directory."""
    names = ["ant", "bee", "ant"]
    members = [
        (f"{number}.{ending}", data.replace(b"ant", name.encode()))
        for number, name in enumerate(names)
        for ending, data in {"jpg": encoded(picture(seed=number)), **others}.items()
    ]
    shard, out = write_tar(tmp_path / "s.tar", members), tmp_path / "out"
    refused(index(out, shard), f"label: s.tar/0: no member ends in .cls; {words}")
    setting = next(word for word in words.replace(";", " ").split() if word.startswith("label="))
    assert index(out, shard, setting) == 0 and main(["verify", str(out)]) == 0
    labels = read(out)[1]
    if "ant" in words or "class" in words:
        assert [load_manifest(out).classes[label] for label in labels] == names
    else:
        assert labels == [-1] * 3 if "none" in setting else [3] * 3


def test_a_key_that_is_no_utf_8_and_one_of_two_pictures_that_is_chosen(tmp_path: Path) -> None:
    jpg, other = encoded(picture(seed=1)), encoded(picture(seed=2))
    members = [
        ("\udcff\udcfe.in.jpg", jpg),
        ("\udcff\udcfe.out.jpg", other),
        ("\udcff\udcfe.cls", b"0"),
    ]
    out = tmp_path / "out"
    assert index(out, write_tar(tmp_path / "s.tar", members), "image_member=.out.JPG") == 0
    np.testing.assert_array_equal(read(out)[0][0], seen(other))
    assert paths(out) == ["s.tar/\\xff\\xfe"]


def test_a_hint_at_what_most_rejects_need_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images with two-part suffixes, two images for each key, and repeated keys."""
    jpg, png = encoded(picture(seed=1)), encoded(picture(seed=2), "PNG")
    for members, reason, words in (
        ([("a.image.png", png), ("a.cls", b"0"), ("b.image.png", png), ("b.cls", b"1")], "no_image", "image.png"),
        ([("a.jpg", jpg), ("a.png", png), ("a.cls", b"0")], "several_images", "png"),
        ([("a.jpg", jpg), ("a.cls", b"0"), ("b.jpg", jpg), ("b.cls", b"1"), ("a.jpg", jpg), ("a.cls", b"0")],
         "doubled_member", None),
    ):  # fmt: skip
        shard = write_tar(tmp_path / reason / "s.tar", members)
        assert index(tmp_path / reason / "out", shard, "max_reject_fraction=1") == 0
        assert rejects(tmp_path / reason / "out")["s.tar/a"] == reason
        said = capsys.readouterr().out
        assert (
            f"most frequent reason ({len(rejects(tmp_path / reason / 'out'))} inputs): {reason}, such as s.tar/a ("
            in said
        )
        assert ("image_member" in said) == (words is not None)
        if words is not None:
            assert index(tmp_path / reason / "better", shard, f"image_member={words}") == 0


def test_a_tar_after_a_tar_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [write_stock(tmp_path / f"{name}.tar", [sample(n) for n in numbers]) for name, numbers in
            (("a", (0, 1)), ("b", (2, 3, 4)))]  # fmt: skip
    shard = tmp_path / "ab.tar"
    shard.write_bytes(b"".join(path.read_bytes() for path in both))
    assert index(tmp_path / "first", shard) == 0
    assert read(tmp_path / "first")[1] == [0, 1]
    at = both[0].stat().st_size
    assert f"have data after their end mark ({shard} at byte {at:,})" in capsys.readouterr().err


# ---- complete or absent


@pytest.mark.parametrize(
    "damage", [lambda data: data[:700], gzip.compress, lambda _: b"<html>sign in</html>" * 100]
)
def test_a_damaged_shard_is_one_line_and_no_dataset(
    tmp_path: Path, damage: Callable[[bytes], bytes], refused: Refused
) -> None:
    path = write_stock(tmp_path / "in" / "1.tar", [sample(4)])
    write_stock(tmp_path / "in" / "0.tar", [sample(1)])
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    refused(index(tmp_path / "out", tmp_path / "in" / "*.tar"), f"data_prep: {path}: ", "[damaged]")
    assert not (tmp_path / "out" / "manifest.json").exists()
    path.write_bytes(whole)
    record = (
        tmp_path / "out" / PARTS / "train-000000.json"
    )  # the known facts of the good shard are read again
    record.write_text(re.sub(r'"num_bytes": \d+', '"num_bytes": 7', record.read_text()))
    assert index(tmp_path / "out", tmp_path / "in" / "*.tar") == 0
    assert read(tmp_path / "out")[1] == [1, 1]
    assert verify(tmp_path / "out").faults == []


@pytest.mark.processes
def test_the_number_of_workers_changes_nothing_and_a_second_run_nothing_either(
    tmp_path: Path,
) -> None:
    for shard in range(4):
        write_stock(
            tmp_path / "in" / f"{shard}.tar", [sample(10 * shard + number) for number in range(5)]
        )
    for workers in (1, 3):
        assert (
            index(
                tmp_path / f"{workers}" / "out", tmp_path / "in" / "*.tar", f"num_workers={workers}"
            )
            == 0
        )
    before = files_of(tmp_path / "1")
    assert len(before) == 1 + 2 * 4 + 3
    assert before == files_of(tmp_path / "3")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "1" / "out").glob("[!.]*")}
    assert index(tmp_path / "1" / "out", tmp_path / "in" / "*.tar") == 0
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "1" / "out").glob("[!.]*")
    } == times


def test_a_changed_shard_is_refused_but_a_touched_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_stock(tmp_path / "in.tar", [sample(1), sample(2)])
    out = tmp_path / "out"
    assert index(out, path) == 0
    os.utime(path, ns=(1, 1))
    assert index(out, path) == 0
    versions = json.loads((out / "versions.json").read_text())
    assert versions == {"train-000000": f"{path.stat().st_size} 1"}
    write_stock(path, [sample(1), sample(3)])
    before = files_of(out)
    capsys.readouterr()
    assert index(out, path) == 2
    assert printed_errors(capsys.readouterr().err) == [(str(path), "changed")]
    assert files_of(out) == before


def test_another_config_or_other_shards_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    path = write_stock(tmp_path / "0.tar", [sample(1), sample(2)])
    other = write_stock(tmp_path / "1.tar", [sample(3)])
    out = tmp_path / "out"
    assert index(out, path) == 0
    before = files_of(out)
    capsys.readouterr()
    attempts = [
        ([path], "crop=squash", "(crop: squash, was center)"),
        ([path], "name=other", "(name: other, was stock)"),
        ([path, other], "seed=0", "other files"),
        ([other], "seed=0", "other files"),
    ]
    for shards, word, why in attempts:
        refused(index(out, shards, word), "out: ", why, "[changed]")
    assert files_of(out) == before
    assert build(write_classes(tmp_path / "source", {"ant": 2}), out) == 2
    write_stock(path, [])
    broken = tmp_path / "broken"
    refused(index(broken, path), "splits.train: ", "[empty]")
    refused(index(broken, path, "crop=squash"), "(crop: squash, was center)", "[changed]")
