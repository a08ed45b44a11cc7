"""TinyImageNet's zip and folder: flat val with its annotations, unlabelled test, and zips that are
not what they seem."""

import io
import json
import struct
import warnings
import zipfile
from pathlib import Path

import pytest

from data_prep.manifest import load_manifest
from data_prep.sources import Source, SourceError
from tests.data_prep.samples import encoded, picture, write_files
from tests.data_prep.sources.layouts import build, listed, opened, refuses, written

WNIDS = ["n01443537", "n01629819", "n01641577", "n04596742"]
VAL = ["n04596742", "n01443537", "n01443537", "n01641577", "n01629819"]
TOP = "tiny-imagenet-200"


def jpeg(seed: int) -> bytes:
    return encoded(picture(seed=seed, width=64, height=64), quality=90)


def files() -> dict[str, bytes]:
    """In the order of the file system that it was packed on, not sorted."""
    found = {
        f"{TOP}/words.txt": (
            b"n00001740\tentity\n" + "".join(f"{name}\ta, b\n" for name in WNIDS).encode()
        )
    }
    found[f"{TOP}/wnids.txt"] = "".join(f"{name}\n" for name in reversed(WNIDS)).encode()
    for number, name in enumerate(WNIDS):
        boxes = "".join(f"{name}_{row}.JPEG\t0\t10\t63\t60\n" for row in range(3))
        found[f"{TOP}/train/{name}/{name}_boxes.txt"] = boxes.encode()
        for row in (2, 0, 1):
            found[f"{TOP}/train/{name}/images/{name}_{row}.JPEG"] = jpeg(10 * number + row)
    lines = "".join(f"val_{row}.JPEG\t{name}\t0\t32\t44\t62\n" for row, name in enumerate(VAL))
    found[f"{TOP}/val/val_annotations.txt"] = lines.encode()
    found |= {f"{TOP}/val/images/val_{row}.JPEG": jpeg(100 + row) for row in range(5)}
    found |= {f"{TOP}/test/images/test_{row}.JPEG": jpeg(200 + row) for row in range(2)}
    return found


WHOLE = files()


def zip_of(found: dict[str, bytes]) -> bytes:
    """With entries for some folders, as some programs write none and others all."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        folders = sorted(
            {f"{name[:at]}/" for name in found for at, letter in enumerate(name) if letter == "/"}
        )
        for name in folders[1::2]:
            archive.writestr(zipfile.ZipInfo(name), b"")
        for name, data in found.items():
            method = zipfile.ZIP_STORED if name.endswith(".JPEG") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return buffer.getvalue()


def place(tmp_path: Path, found: dict[str, bytes], *, unpacked: bool = True) -> Path:
    if unpacked:
        return write_files(tmp_path, found) / TOP
    return write_files(tmp_path, {f"{TOP}.zip": zip_of(found)}) / f"{TOP}.zip"


def source_of(path: Path) -> Source:
    return opened("tinyimagenet", path)


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_build_keeps_every_picture_with_its_label(tmp_path: Path, unpacked: bool) -> None:
    path, out = place(tmp_path, WHOLE, unpacked=unpacked), tmp_path / "out"
    words = [f"source.path={path}", "source.unlabelled_test=true", "image_size=64", "encoding=keep"]
    assert build("tinyimagenet", out, *words) == 0
    manifest = load_manifest(out)
    assert manifest.classes == tuple(WNIDS)
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    assert written(out, "train") == {
        f"train/{name}/images/{name}_{row}.JPEG": (jpeg(10 * number + row), number)
        for number, name in enumerate(WNIDS)
        for row in range(3)
    }
    assert written(out, "val") == {
        f"val/images/val_{row}.JPEG": (jpeg(100 + row), WNIDS.index(name))
        for row, name in enumerate(VAL)
    }
    assert written(out, "test") == {
        f"test/images/test_{row}.JPEG": (jpeg(200 + row), -1) for row in range(2)
    }


def test_a_picture_that_leads_nowhere_is_rejected_not_forgotten(tmp_path: Path) -> None:
    path = place(tmp_path, WHOLE, unpacked=True)
    lost = [f"train/{WNIDS[0]}/images/{WNIDS[0]}_1.JPEG", "val/images/val_3.JPEG"]
    for name in lost:
        (path / name).unlink()
        (path / name).symlink_to("elsewhere")
    assert (
        build(
            "tinyimagenet",
            tmp_path / "out",
            f"source.path={path}",
            "max_reject_share=0.5",
            "image_size=16",
        )
        == 0
    )
    manifest = load_manifest(tmp_path / "out")
    assert (manifest.num_read, manifest.num_written, manifest.num_rejected) == (17, 15, 2)
    rejected = [
        json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    ]
    assert {line["path"]: line["detail"] for line in rejected} == dict.fromkeys(
        lost, "a link to nowhere"
    )


@pytest.mark.parametrize("unpacked", [False, True])
def test_other_files_are_counted_and_the_published_ones_are_not(
    tmp_path: Path, unpacked: bool
) -> None:
    for number, more in enumerate(({}, {"train/n01629819/notes.txt": b"x", "README": b"x"})):
        found = WHOLE | {f"{TOP}/{name}": data for name, data in more.items()}
        path, out = (
            place(tmp_path / str(number), found, unpacked=unpacked),
            tmp_path / f"out{number}",
        )
        assert build("tinyimagenet", out, f"source.path={path}", "image_size=16") == 0
        assert load_manifest(out).num_left_out == ({"other files": 2} if more else {})


def test_raw_pictures_from_zip_and_folder_are_the_same_dataset(tmp_path: Path) -> None:
    manifests = set()
    for unpacked in (False, True):
        path, out = (
            place(tmp_path / "in", WHOLE, unpacked=unpacked),
            tmp_path / str(unpacked) / "tiny",
        )
        assert build("tinyimagenet", out, f"source.path={path}", "image_size=64") == 0
        assert set(load_manifest(out).splits) == {"train", "val"}
        manifests.add((out / "manifest.json").read_bytes())
    assert len(manifests) == 1


def without(name: str) -> dict[str, bytes]:
    return {path: data for path, data in WHOLE.items() if not path.startswith(f"{TOP}/{name}")}


def altered(name: str, data: bytes) -> dict[str, bytes]:
    return WHOLE | {f"{TOP}/{name}": data}


ANNOTATIONS = "val/val_annotations.txt"
LINES = WHOLE[f"{TOP}/{ANNOTATIONS}"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (without("wnids.txt"), r"wnids\.txt"),
        (without("val/val_annotations.txt"), r"val_annotations\.txt"),
        (without("val/images"), "val/images"),
        (without("val/images/val_3.JPEG"), r"names pictures that are not there \(val_3\.JPEG\)"),
        (altered("val/images/val_9.JPEG", jpeg(1)), r"lacks pictures that are there \(val_9\.JPEG\)"),
        (altered(ANNOTATIONS, LINES.replace(b"n01641577", b"n99999999")), "val_3.JPEG has the class 'n99999999', which is not"),
        (altered(ANNOTATIONS, LINES + LINES.splitlines(keepends=True)[0]), r"names val_0\.JPEG twice"),
        (altered(ANNOTATIONS, b"\xff\xfe"), r"val_annotations\.txt is damaged"),
        (without("train/n01629819"), r"names classes without a folder in train \(n01629819\)"),
        (altered("train/n00000001/images/a.JPEG", jpeg(1)), r"that wnids\.txt does not name \(n00000001\)"),
        (altered("train/n01629819/images/more/a.JPEG", jpeg(1)), "images/more is a folder where only pictures are published"),
        (altered("val/images/n01443537/val_1.JPEG", jpeg(1)), "val/images/n01443537 is a folder where only pictures are published"),
        (altered("train/n01629819/a.JPEG", jpeg(1)), r"images are outside the published folders \(train/n01629819/a\.JPEG\)"),
        (altered("train/n01629819/more/a.JPEG", jpeg(1)), r"outside the published folders \(train/n01629819/more/a\.JPEG\)"),
        (altered("val/a.png", jpeg(1)), r"outside the published folders \(val/a\.png\)"),
        (altered("wnids.txt", b""), r"wnids\.txt names no classes"),
        (altered("wnids.txt", b"../../etc\n"), r"wnids\.txt names no classes, one twice, or a path"),
    ],
)  # fmt: skip
def test_what_is_missing_or_too_much_is_named(
    tmp_path: Path, found: dict[str, bytes], message: str
) -> None:
    for unpacked in (False, True):
        refuses(source_of(place(tmp_path, found, unpacked=unpacked)), message)


# ---- zips that are not what they seem
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [f"{TOP}/../../escaped", f"{TOP}/train//a", f"{TOP}/train/..\\..\\escaped"]
)
def test_paths_out_of_the_zip_are_refused(tmp_path: Path, name: str) -> None:
    path = place(tmp_path / "deep" / "er", WHOLE | {name: b"x"}, unpacked=False)
    refuses(source_of(path), "holds the path")
    assert not [found for found in tmp_path.rglob("*") if found.name.endswith("escaped")]


def test_what_others_have_added_to_the_zip_is_not_read(tmp_path: Path) -> None:
    more = {
        f"__MACOSX/{TOP}/._wnids.txt": b"x",
        f"{TOP}/train/.DS_Store": b"x",
        f"{TOP}/train/n01629819/images/.DS_Store": b"",
    }
    assert len(listed(source_of(place(tmp_path, WHOLE | more, unpacked=False)))) == 17


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = place(tmp_path, WHOLE, unpacked=False)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{TOP}/wnids.txt", b"other")
    refuses(source_of(path), r"holds wnids\.txt twice")


def patched(data: bytes, name: str, *, local: int, central: int, value: int) -> bytes:
    """`data` with a 16-bit field of both headers of a member changed."""
    patched = bytearray(data)
    first = data.index(name.encode()) - 30
    last = data.rindex(name.encode()) - 46
    assert (patched[first : first + 4], patched[last : last + 4]) == (b"PK\3\4", b"PK\1\2")
    struct.pack_into("<H", patched, first + local, value)
    struct.pack_into("<H", patched, last + central, value)
    return bytes(patched)


def test_encrypted_unsupported_and_damaged_members_are_one_clear_line(tmp_path: Path) -> None:
    data, name = zip_of(WHOLE), f"{TOP}/val/images/val_0.JPEG"
    path = tmp_path / "tiny.zip"

    def refused(content: bytes, message: str) -> None:
        path.write_bytes(content)
        source = source_of(path)
        (entry,) = [entry for entry in listed(source) if entry.name == "val_0.JPEG"]
        with pytest.raises(SourceError, match=message):
            source.read(entry)

    refused(
        patched(data, name, local=6, central=8, value=1),
        r"val_0\.JPEG is encrypted; repack it without a password",
    )
    refused(
        patched(data, name, local=8, central=10, value=99),
        r"val_0\.JPEG is damaged \(.*compression",
    )
    body = jpeg(100)
    assert data.count(body) == 1
    refused(data.replace(body, body[:-1] + b"\0"), r"val_0\.JPEG is damaged \(Bad CRC-32")


def test_a_cut_zip_and_something_else_are_refused(tmp_path: Path) -> None:
    path = place(tmp_path, WHOLE, unpacked=False)
    data = path.read_bytes()
    for mutant in (data[: len(data) // 2], data[:-10], b"", b"no zip", zip_of({"other/file": b""})):
        path.write_bytes(mutant)
        refuses(source_of(path), r"download it again|give tiny-imagenet-200\.zip as downloaded")
    refuses(
        source_of(tmp_path / "nothing"),
        r"does not exist|is not there; give tiny-imagenet-200\.zip as downloaded",
    )
