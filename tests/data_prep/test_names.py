"""Names that are not UTF-8 (unzip writes such names) reach every record and reader, and lead back
to their files."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.errors import UserError
from data_prep.manifest import load_manifest
from data_prep.settings import printable
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import (
    build,
    encoded,
    files_of,
    picture,
    tar_of,
    write_classes,
    write_files,
)
from tests.data_prep.sources.layouts import SYNSETS
from tests.data_prep.stock import index, paths, read, rejects

CAFE, NAIVE, BAD = (os.fsdecode(name) for name in (b"caf\xe9", b"na\xefve.jpg", b"b\xe4d.jpg"))
CUT = ("max_reject_fraction=0.5", "samples_per_shard=3", "encoding=keep")


def had_back(spelled: str) -> str:
    """Return the file name: \xe9 is the byte e9."""
    data = re.sub(
        rb"\\x([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), spelled.encode()
    )
    return os.fsdecode(data)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_classes(tmp_path / "source", {"ant": 2, CAFE: 3, "caf\\xe9": 1, "café": 1})
    return write_files(
        root, {f"{CAFE}/{NAIVE}": encoded(picture(seed=99)), f"{CAFE}/{BAD}": b"no picture"}
    )


def test_no_two_names_are_spelled_alike_and_each_can_be_had_back() -> None:
    names = [
        b"caf\xe9",
        b"caf\\xe9",
        b"caf\\x5cxe9",
        b"caf\\",
        b"a\\b",
        b"\xff\\xff",
        "café\\xa".encode(),
    ]
    spelled = [printable(os.fsdecode(name)) for name in names]
    assert len(set(spelled)) == len(names)
    assert [os.fsencode(had_back(name)) for name in spelled] == names
    assert (spelled[0], spelled[4]) == ("caf\\xe9", "a\\b")


@pytest.mark.processes
def test_classes_pictures_and_rejects_of_a_build_and_of_its_tasks(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one" / "animals"
    assert build(source, out, *CUT) == 0
    assert load_manifest(out).classes == ("ant", "caf\\x5cxe9", "café", "caf\\xe9")
    assert load_manifest(out).splits["train"].class_counts == (2, 1, 1, 4)
    spelled = [*paths(out), *rejects(out)]
    assert sorted(map(had_back, spelled)) == sorted(
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()
    )
    assert "caf\\xe9/b\\xe4d.jpg" in rejects(out)
    for words in (["verify", str(out)], ["stats", str(out)]):
        assert main(words) == 0
    assert "caf\\xe9" in capsys.readouterr().out
    _, labels = read(out)
    assert sorted(labels) == [0, 0, 1, 2, 3, 3, 3, 3]

    split = tmp_path / "two" / "animals"
    for number in (0, 1):
        assert build(source, split, *CUT, "--task", f"{number}/2") == 0
    assert main(["merge", str(split), "--workers", "1"]) == 0
    assert files_of(split) == files_of(out)


def test_lists_of_classes_and_of_exclusions_find_them(tmp_path: Path, source: Path) -> None:
    for name, line in (("bytes", b"caf\xe9\n"), ("spelled", b"caf\\xe9\n")):
        (tmp_path / name).write_bytes(line)
        assert build(source, tmp_path / f"of-{name}", *CUT, f"classes_file={tmp_path / name}") == 0
        assert load_manifest(tmp_path / f"of-{name}").splits["train"].class_counts == (4,)
    assert (
        build(
            write_files(source, {f"ant/{NAIVE}": encoded(picture(seed=99))}),
            tmp_path / "doubled",
            *CUT,
        )
        == 0
    )
    list_file = tmp_path / "list.jsonl"
    words = ["--workers=1", "--max-hamming=0", f"--out={list_file}"]
    assert main(["dedup", str(tmp_path / "doubled"), *words]) == 0
    assert len(list_file.read_text().splitlines()) == 1
    assert build(source, tmp_path / "single", *CUT, f"exclude=[{list_file}]") == 0
    doubled, single = paths(tmp_path / "doubled"), paths(tmp_path / "single")
    assert {had_back(path) for path in set(doubled) - set(single)} < {
        f"ant/{NAIVE}",
        f"{CAFE}/{NAIVE}",
    }
    assert len(single) == len(doubled) - 1


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_tars(tmp_path: Path, kind: int) -> None:
    files = {NAIVE: encoded(picture(seed=1)), BAD: b"no picture", "é.jpg": encoded(picture(seed=2))}
    synsets = write_files(tmp_path / "synsets", {f"{SYNSETS[0]}.tar": tar_of(files, kind=kind)})
    words = [
        f"source.path={synsets}",
        "source.processing=raw",
        "image_size=16",
        "num_workers=1",
        *CUT,
    ]
    assert main(["build", "--source", "imagenet21k", "--out", str(tmp_path / "built"), *words]) == 0
    found = [*paths(tmp_path / "built"), *rejects(tmp_path / "built")]
    assert {had_back(path) for path in found} == {f"{SYNSETS[0]}.tar/{name}" for name in files}

    stock = {
        name.replace(".jpg", ending): data
        for name, data in files.items()
        for ending in (".jpg", ".cls")
    }
    stock = {name: b"0" if name.endswith("cls") else data for name, data in stock.items()}
    (tmp_path / "stock.tar").write_bytes(tar_of(stock, kind=kind))
    assert index(tmp_path / "indexed", tmp_path / "stock.tar", "max_reject_fraction=0.5") == 0
    found = [*paths(tmp_path / "indexed"), *rejects(tmp_path / "indexed")]
    assert {had_back(path) for path in found} == {
        f"stock.tar/{name.removesuffix('.jpg')}" for name in files
    }


@pytest.mark.processes
def test_a_terminal_that_cannot_show_a_name_stops_nothing(tmp_path: Path, source: Path) -> None:
    assert build(source, tmp_path / "out", *CUT) == 0
    named = (tmp_path / "out").rename(tmp_path / CAFE)
    for verb, encoding in (("verify", "utf-8"), ("stats", "ascii")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "data_prep", verb, named]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        assert b"caf\\udce9" in done.stdout


def test_messages_spell_them_and_a_shard_whose_name_a_manifest_cannot_hold_is_refused(
    tmp_path: Path, source: Path, refused: Refused
) -> None:
    error = UserError(CAFE, f"no {chr(0xD800)}", code="missing-path")
    assert str(error) == f"caf\\xe9: no {chr(0xD800)}"
    (source / os.fsdecode(b"\xe9t\xe9")).mkdir()
    refused(build(source, tmp_path / "out"), "[empty]")
    write_files(tmp_path, {f"{CAFE}.tar": tar_of({"a.cls": b"0"})})
    refused(index(tmp_path / "out", tmp_path / "caf*.tar"), "caf\\xe9.tar", "[unsupported]")
    (tmp_path / "wide").write_text("ant\n", encoding="utf-16")
    refused(
        build(source, tmp_path / "out", f"classes_file={tmp_path / 'wide'}"),
        "classes_file: ",
        "[unreadable]",
    )
