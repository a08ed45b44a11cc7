"""Every form of each published layout has the published samples, and each damage is a one-line
error."""

import gzip
import hashlib
import io
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data_prep.manifest import load_annotation, load_manifest, load_paths
from data_prep.sources import SourceError, records
from data_prep.sources.cifar import CIFAR_FILES
from data_prep.sources.mnist import MNIST_FILES
from data_prep.sources.stl10 import Stl10Source
from tests.data_prep.samples import tar_of, write_files
from tests.data_prep.sources import layouts
from tests.data_prep.sources.layouts import idx_of, listed, opened, pixels, python2_pickle, written
from tests.data_prep.sources.published import (
    ANNOTATIONS,
    CIFAR_10,
    DIGITS,
    FOLDS,
    FORMS,
    LAYOUTS,
    LINES,
    MNIST,
    MNIST_GZ,
    NUMBERS,
    STL10,
    TINY,
    Layout,
    batch,
    by_columns,
    jpeg,
    pickled,
    zip_of,
)
from tests.errors import fails

PACKED = {name: layout for name, layout in LAYOUTS.items() if layout.archive}


def build(layout: Layout, path: Path, out: Path, *more: str) -> int:
    words = [f"source.{key}={str(value).lower()}" for key, value in layout.options.items()]
    words += ["source.md5=off"] * (layout.kind != "tinyimagenet")
    return layouts.build(layout.kind, out, f"source.path={path}", *words, *more)


@pytest.mark.parametrize(("name", "packed"), FORMS)
def test_every_form_has_the_published_samples(tmp_path: Path, name: str, packed: bool) -> None:
    layout = LAYOUTS[name]
    source = layout.open(layout.place(tmp_path, packed=packed))
    assert source.outline().classes == layout.classes
    found: dict[str, dict[str, tuple[bytes, int]]] = {}
    for entry in listed(source):
        data = source.read(entry)
        assert len(data) == entry.num_bytes
        found.setdefault(entry.container.split, {})[entry.locator] = (data, entry.label)
    assert found == layout.samples


@pytest.mark.parametrize("name", ["cifar-10", "mnist", "stl10", "tinyimagenet"])
def test_all_forms_build_the_same_dataset_of_these_samples(tmp_path: Path, name: str) -> None:
    layout, manifests = LAYOUTS[name], set()
    for packed in (False, True)[: 1 + bool(layout.archive)]:
        path, out = layout.place(tmp_path, packed=packed), tmp_path / str(packed) / "out"
        assert (
            build(layout, path, out, "encoding=keep", "image_size=28", "samples_per_shard=5") == 0
        )
        manifests.add((out / "manifest.json").read_bytes())
        assert {split: written(out, split) for split in layout.samples} == layout.samples
        assert not list(out.rglob("unpacked*"))
    assert len(manifests) == 1 and str(tmp_path) not in manifests.pop().decode()


# ---- damages

TRAIN, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DAMAGES: list[tuple[Layout, str, bytes | None, str]] = [
    (CIFAR_10, "data_batch_3", None, "lacks data_batch_3 of CIFAR-10"),
    (CIFAR_10, "data_batch_1", batch(labels=[0, 1, 2]), "has 3 labels for 4 images"),
    (CIFAR_10, "data_batch_1", batch(labels=[0, 1, -2, 3]), "the label -2 in record 2"),
    (CIFAR_10, "data_batch_1", batch(labels="abcd"), "labels is no list of integers"),
    (CIFAR_10, "data_batch_1", batch(data=pixels(4, 3071)), "(4, 3071)"),
    (CIFAR_10, "data_batch_1", batch(data=np.zeros((4, 3072), np.int64)), "i8"),
    (CIFAR_10, "data_batch_1", batch(data=[1, 2]), "data_batch_1"),
    (CIFAR_10, "data_batch_1", python2_pickle({"data": 1}), "data_batch_1"),
    (CIFAR_10, "data_batch_1", python2_pickle([1]), "no dict"),
    (CIFAR_10, "batches.meta", python2_pickle({"label_names": 1}), "batches.meta"),
    (CIFAR_10, "batches.meta", b"", "batches.meta"),
    (MNIST, TRAIN, idx_of(DIGITS["train"])[:-1], "5,487 values, but the shape is [7, 28, 28]"),
    (MNIST, TRAIN, b"\x89PNG" + bytes(20), "no idx file with uint8 values in 3 dimensions"),
    (MNIST, TRAIN, idx_of(NUMBERS["train"]), "no idx file with uint8 values in 3 dimensions"),
    (MNIST, TRAIN, b"", "no idx file"),
    (MNIST, TRAIN, idx_of(pixels(7, 0, 28)), "[7, 0, 28]"),
    (MNIST, LABELS, idx_of(NUMBERS["train"][:6]), "has 6 labels for 7 images"),
    (MNIST, LABELS, idx_of(NUMBERS["train"] + 2), "the label 11 in record 4"),
    (STL10, "train_X.bin", bytes(27647), "train_X.bin"),
    (STL10, "test_X.bin", b"", "test_X.bin"),
    (STL10, "train_y.bin", bytes([1] * 11), "has 11 labels for 12 images"),
    (STL10, "test_y.bin", bytes([1, 2, 0, 3]), "in record 2"),
    (STL10, "test_y.bin", bytes([1, 2, 10, 11]), "in record 3"),
    (STL10, "class_names.txt", b"", "no class names"),
    (STL10, "class_names.txt", b"a\na\n", "one of them twice"),
    (STL10, "class_names.txt", b"\xff\n", "class_names.txt"),
    (STL10, "fold_indices.txt", b"0 1\n" * 9, "9 lines, but 10 folds are published"),
    (STL10, "fold_indices.txt", b"0 12\n" * 10, "fold_indices.txt"),
    (STL10, "fold_indices.txt", b"0 one\n" * 10, "fold_indices.txt"),
    (TINY, "val/images/val_3.JPEG", None, "val_3.JPEG"),
    (TINY, "val/images/val_9.JPEG", jpeg(1), "val_9.JPEG"),
    (TINY, ANNOTATIONS, LINES.replace(b"n01641577", b"n99999999"), "val_3.JPEG with the class"),
    (TINY, ANNOTATIONS, LINES + LINES.splitlines(keepends=True)[0], "names val_0.JPEG again"),
    (TINY, ANNOTATIONS, b"\xff\xfe", "val_annotations.txt"),
    (TINY, "wnids.txt", b"n01443537\n", "train/n01629819/images"),
    (TINY, "train/n00000001/images/a.JPEG", jpeg(1), "train/n00000001/images"),
    (TINY, "train/n01629819/images/more/a.JPEG", jpeg(1), "more/a.JPEG"),
    (TINY, "val/images/n01443537/val_1.JPEG", jpeg(1), "n01443537/val_1.JPEG"),
    (TINY, "train/n01629819/a.JPEG", jpeg(1), "train/n01629819/a.JPEG"),
    (TINY, "train/n01629819/more/a.JPEG", jpeg(1), "train/n01629819/more/a.JPEG"),
    (TINY, "val/a.png", jpeg(1), "val/a.png"),
    (TINY, "wnids.txt", b"", "names no classes"),
    (TINY, "wnids.txt", b"../../etc\n", "a path"),
]
LACKS = [(MNIST_GZ, "t10k-labels-idx1-ubyte.gz"), (STL10, "class_names.txt")]
LACKS += [(STL10, "unlabeled_X.bin"), (TINY, "wnids.txt"), (TINY, ANNOTATIONS)]


@pytest.mark.parametrize(("layout", "name", "data", "words"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damage_is_one_line_in_every_form(
    tmp_path: Path, layout: Layout, name: str, data: bytes | None, words: str
) -> None:
    for packed in (False, True)[: 1 + bool(layout.archive)]:
        with fails("damaged", "source.path") as caught:
            listed(layout.open(layout.place(tmp_path, packed=packed, **{name: data})))
        assert words in str(caught.value) and "\n" not in str(caught.value)
        if not packed and data is None:
            (tmp_path / layout.folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(("layout", "name"), LACKS)
def test_a_missing_file_is_named(tmp_path: Path, layout: Layout, name: str) -> None:
    for packed in (False, True)[: 1 + bool(layout.archive)]:
        with fails("missing-path", "source.path") as caught:
            listed(layout.open(layout.place(tmp_path, packed=packed, **{name: None})))
        assert name in str(caught.value)


@pytest.mark.parametrize("name", PACKED)
def test_an_archive_that_is_cut_altered_or_another_one_is_refused(
    tmp_path: Path, name: str
) -> None:
    layout = PACKED[name]
    path = layout.place(tmp_path, packed=True)
    data = path.read_bytes()
    mutants = [data[:length] for length in range(0, len(data) - 1, len(data) // 9)]
    mutants += [data[:-1], b"no archive", zip_of({"a": b""}), gzip.compress(tar_of({"a": b""}))]
    if path.suffix != ".zip":
        mutants += [data[:-8] + struct.pack("<II", 1, len(data))]  # a wrong checksum
        mutants += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (len(data) // 2,)]
    for mutant in mutants:
        path.write_bytes(mutant)
        with pytest.raises(SourceError) as caught:
            listed(layout.open(path))
        assert caught.value.code in ("damaged", "missing-path")
    path.unlink()
    with fails("missing-path", "source.path"):
        listed(layout.open(path))


@pytest.mark.parametrize("name", ["cifar-10", "stl10"])
def test_several_gzip_streams_and_padding_are_an_archive(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    path = layout.place(tmp_path, packed=True)
    plain = gzip.decompress(path.read_bytes())
    half = len(plain) // 2
    path.write_bytes(gzip.compress(plain[:half]) + gzip.compress(plain[half:]) + bytes(512))
    source = layout.open(path)
    entry = listed(source)[0]
    assert source.read(entry) == layout.samples[entry.container.split][entry.locator][0]


def test_published_sums_are_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layout in (CIFAR_10, STL10):
        source_class = type(layout.open(tmp_path))
        archive, folder = (layout.place(tmp_path, packed=packed) for packed in (True, False))
        for path in (archive, folder):
            with monkeypatch.context() as patch, fails("damaged", "source.path"):
                patch.setattr(source_class, "load", None)
                layout.open(path, md5="published").outline()
        sums = {name: hashlib.md5(data).hexdigest() for name, data in layout.files.items()}
        monkeypatch.setattr(source_class, "sums", sums)
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        monkeypatch.setattr(source_class, "archives", {archive.name: md5})
        for path in (archive, folder):
            assert listed(layout.open(path, md5="published"))


# ---- CIFAR's pickles

HOSTILE = {
    "global": b"cos\nsystem\n(S'touch {place}'\ntR.",
    "posix": b"cposix\nsystem\n(S'touch {place}'\ntR.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'touch {place}'\ntR.",
    "inst": b"(S'touch {place}'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch {place}'\no.",
    "newobj": b"\x80\x02cos\nsystem\nS'touch {place}'\n\x85\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "eval": b"c__builtin__\neval\n(S'1'\ntR.",
    "fromfile": b"cnumpy\nfromfile\n(S'/etc/passwd'\ntR.",
    "attribute": b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
    "persistent": b"Ppersistent\n.",
    "memo": b"\x80\x02K\x01r\xff\xff\xff\x7f.",
    "length": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_in_a_pickle_is_ever_run(tmp_path: Path, hostile: str) -> None:
    place = tmp_path / "ran"
    data = HOSTILE[hostile].replace(b"{place}", str(place).encode())
    with fails("damaged", "source.path") as caught:
        listed(CIFAR_10.open(CIFAR_10.place(tmp_path, packed=False, test_batch=data)))
    assert "test_batch" in str(caught.value) and not place.exists()


def test_pickles_of_all_pythons_are_read(tmp_path: Path) -> None:
    """Python 2's pickles are generated as in the published files; the hash of one of these is
    known."""
    assert hashlib.md5(CIFAR_10.files["batches.meta"]).hexdigest() == CIFAR_FILES["batches.meta"]
    for protocol in range(5):
        path = CIFAR_10.place(tmp_path, packed=False, data_batch_1=pickled(protocol))
        source = CIFAR_10.open(path)
        found = {entry.locator: source.read(entry) for entry in listed(source)}
        expected = {**CIFAR_10.samples["train"], **CIFAR_10.samples["test"]}
        assert found == {name: data for name, (data, _) in expected.items()}, protocol


def test_cifar_10_has_no_coarse_labels(tmp_path: Path) -> None:
    with fails("conflict", "source.labels"):
        CIFAR_10.open(CIFAR_10.place(tmp_path, packed=True), labels="coarse").outline()


def test_a_file_twice_in_a_tar_is_refused_and_paths_out_of_it_lead_nowhere(tmp_path: Path) -> None:
    home = tmp_path / "home"
    path = CIFAR_10.place(home, packed=True, **{"../../data_batch_1": b""})
    with fails("damaged", "source.path"):
        listed(CIFAR_10.open(path))
    CIFAR_10.place(home, packed=True, **{"../../escaped": b"x", "/tmp/escaped": b"x"})
    assert len(listed(CIFAR_10.open(path))) == 24
    assert [found.name for found in tmp_path.rglob("*")] == ["home", path.name]


# ---- MNIST's variants


def test_the_sums_of_mnist_are_of_the_content_and_tell_the_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = MNIST_GZ.place(tmp_path / "published", packed=False)
    for variant in ("mnist", "fashion", "kmnist"):
        with fails("damaged", "source.path"):
            MNIST.open(path, md5="published", variant=variant).outline()
    sums = {name: hashlib.md5(data).hexdigest() for name, data in MNIST.files.items()}
    monkeypatch.setitem(MNIST_FILES, "fashion", sums)
    again = {f"{name}.gz": gzip.compress(data, 1, mtime=9) for name, data in MNIST.files.items()}
    others = write_files(tmp_path / "again", again), MNIST.place(tmp_path, packed=False)
    for place in (path, *others):  # the same bytes in any compression
        source = MNIST.open(place, md5="published", variant="fashion")
        assert source.outline().classes[0] == "T-shirt/top"
        with fails("conflict", "source.variant"):
            MNIST.open(place, md5="published").outline()


DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN.exists(), reason="needs Debian's package dataset-fashion-mnist")
def test_the_files_of_debian_are_the_published_ones() -> None:
    assert opened("mnist", DEBIAN, md5="published", variant="fashion").outline()
    with fails("conflict", "source.variant"):
        opened("mnist", DEBIAN, md5="published").outline()


# ---- STL-10


def test_folds_follow_their_images(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = STL10.place(tmp_path, packed=True)
    assert build(STL10, path, out, "image_size=16", "samples_per_shard=5") == 0
    manifest = load_manifest(out)
    train = manifest.splits["train"]
    order = [int(name[-6:]) for shard in train.shards for name in load_paths(out, shard)]
    found = load_annotation(out, train, "folds")
    assert found.shape == (12, 10)
    rows = [{row for row, is_in in zip(order, fold, strict=True) if is_in} for fold in found.T]
    assert rows == [set(fold) for fold in FOLDS]
    assert not any(manifest.splits[split].annotations for split in ("test", "unlabeled"))


def test_images_of_stl10_are_stored_column_by_column() -> None:
    corner = np.zeros((96, 96, 3), np.uint8)
    corner[1, 0, 0] = 7  # the second row of the first column of red
    assert by_columns(corner).index(7) == 1


def test_unlabeled_images_can_be_left_out(tmp_path: Path) -> None:
    path = STL10.place(tmp_path, packed=True, **{"unlabeled_X.bin": None})
    found = listed(STL10.open(path, unlabeled=False))
    assert {entry.container.split for entry in found} == {"train", "test"}


def test_a_disk_without_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = STL10.place(tmp_path, packed=True)
    monkeypatch.setattr(records, "unpacked_bytes", lambda _: 1 << 62)
    with fails("no-space", "source.path"):
        STL10.open(path).outline()


def test_a_bomb_is_unpacked_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stl10Source, "max_bytes", 1 << 20)
    path = STL10.place(tmp_path, packed=True, **{"train_X.bin": bytes(1 << 25)})
    tracemalloc.start()
    with fails("damaged", "source.path"):
        STL10.open(path).outline()
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


# ---- TinyImageNet's zip


def test_images_that_cannot_be_read_are_rejected_and_other_files_are_counted(
    tmp_path: Path,
) -> None:
    more = {"train/n01629819/notes.txt": b"x", "README": b"x"}
    path, out = TINY.place(tmp_path, packed=False, **more), tmp_path / "out"
    for name in ("train/n01629819/images/n01629819_1.JPEG", "val/images/val_3.JPEG"):
        (path / name).unlink()
        (path / name).symlink_to("elsewhere")
    assert build(TINY, path, out, "max_reject_fraction=0.5", "image_size=16") == 0
    manifest = load_manifest(out)
    assert (manifest.num_read, manifest.num_written, manifest.num_rejected) == (19, 17, 2)
    assert manifest.num_left_out == {"other files": 2}


def test_hidden_files_of_a_zip_are_not_read(tmp_path: Path) -> None:
    more = {"../__MACOSX/._wnids.txt": b"x", "train/.DS_Store": b"x"}
    more |= {"train/n01629819/images/.DS_Store": b"", ".hidden/a.JPEG": b"x"}
    files = {f"{TINY.folder}/{name}": data for name, data in (TINY.files | more).items()}
    plain = {name.replace(f"{TINY.folder}/../", ""): data for name, data in files.items()}
    path = write_files(tmp_path, {"t.zip": zip_of(plain)}) / "t.zip"
    assert len(listed(TINY.open(path))) == 19


@pytest.mark.parametrize(
    "name", ["../../escaped", "train//a", "train/..\\..\\escaped", "wnids.txt"]
)
def test_a_path_out_of_a_zip_or_twice_is_refused(tmp_path: Path, name: str) -> None:
    path = TINY.place(tmp_path, packed=True)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{TINY.folder}/{name}", b"other")
    with fails("damaged", "source.path") as caught:
        listed(TINY.open(path))
    assert name.rpartition("\\")[2] in str(caught.value)


def patched(data: bytes, name: str, *, local: int, central: int, value: int) -> bytes:
    """Return a zip with a 16-bit field of a member's local and central header changed."""
    changed = bytearray(data)
    first, last = data.index(name.encode()) - 30, data.rindex(name.encode()) - 46
    assert (changed[first : first + 4], changed[last : last + 4]) == (b"PK\3\4", b"PK\1\2")
    struct.pack_into("<H", changed, first + local, value)
    struct.pack_into("<H", changed, last + central, value)
    return bytes(changed)


def test_encrypted_unsupported_and_damaged_members_are_one_line(tmp_path: Path) -> None:
    path, name, body = TINY.place(tmp_path, packed=True), "val/images/val_0.JPEG", jpeg(100)
    data = path.read_bytes()
    assert data.count(body) == 1 and zipfile.is_zipfile(io.BytesIO(data))
    for content, words in (
        (patched(data, f"{TINY.folder}/{name}", local=6, central=8, value=1), "encrypted"),
        (data.replace(body, body[:-1] + b"\0"), "CRC"),
    ):
        path.write_bytes(content)
        source = TINY.open(path)
        (entry,) = [entry for entry in listed(source) if entry.name == "val_0.JPEG"]
        with fails("damaged", "source.path") as caught:
            source.read(entry)
        assert words in str(caught.value) and name in str(caught.value)
