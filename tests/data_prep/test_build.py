"""A build gives the same bytes for any number of workers and after any kill, and loses nothing
silently. A directory has one owner. Every mistake is a one-line error.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest
from PIL import Image

from data_prep.build.build import build as build_dataset
from data_prep.build.config import BuildSettings
from data_prep.build.workplan import shard_size
from data_prep.cli import main
from data_prep.images import EncodedImage, ImageSpec, convert
from data_prep.manifest import load_manifest
from data_prep.settings import read_yaml, validate
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import (
    build,
    encoded,
    files_of,
    held_at_work,
    picture,
    started,
    webp,
    write_classes,
    write_files,
)
from tests.errors import printed_errors
from tests.moments import Strike, wait_until
from tests.ranks import REPOSITORY

SHAPES = [
    "source.num_classes=6",
    "source.num_train_per_class=40",
    "source.num_val_per_class=6",
    "source.image_size=20",
    "image_size=16",
    "samples_per_shard=16",
]
"""A build that draws 276 images and writes 18 shards, long enough to be interrupted."""


def words_of(out: Path, *overrides: str) -> list[str]:
    return ["build", "--source=synthetic", f"--out={out}", *SHAPES, *overrides]


def running(
    out: Path, *overrides: str, strike: Strike | None = None
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a build of `SHAPES`."""
    return started(*words_of(out, "num_workers=2", *overrides), strike=strike)


def group_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the living processes of the group: the builder, its workers, and the processes between
    them."""
    members = list[psutil.Process]()
    for each in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(each.pid) == process.pid and not has_ended(each):
                members.append(each)
    return members


def has_ended(process: psutil.Process) -> bool:
    """True if the process has ended, even if the container's first process never reaps orphans."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def interrupt_before_the_manifest(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C after the last shard of 2 samples was written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data_prep.build.build.publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(source, out, "samples_per_shard=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the dataset and the images of a build of `SHAPES` by one worker."""
    out = tmp_path_factory.mktemp("undisturbed") / "shapes"
    assert main(words_of(out, "num_workers=1")) == 0
    return out.parent


# ---- same bytes


@pytest.mark.processes
def test_the_number_of_workers_does_not_change_a_byte(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 9, "bee": 14, "cat": 5})
    write_files(
        source, {"ant/zero.jpg": b"", "bee/text.jpg": b"no picture", "cat/text.jpg": b"none"}
    )
    for workers in (1, 3):
        out = tmp_path / str(workers) / "animals"
        assert (
            build(
                source,
                out,
                f"num_workers={workers}",
                "samples_per_shard=5",
                "max_reject_fraction=0.2",
            )
            == 0
        )
    one, three = files_of(tmp_path / "1"), files_of(tmp_path / "3")
    assert (
        len(one) == 1 + 7 * 3 + 3
    )  # dataset folder; shards, indices and paths of 31 inputs; rejected, wids, manifest
    assert len(one["animals/rejected.jsonl"].splitlines()) == 3
    assert one == three


@pytest.mark.processes
def test_a_killed_build_leaves_no_worker_and_ends_with_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Path
) -> None:
    """The first worker with that many moments kills the build while it draws (about 300 moments of
    both workers) or writes shards (600)."""
    strikes: list[tuple[int, Literal["group", "main"]]] = [(70, "main"), (150, "group")]
    for moment, target in strikes:
        with running(
            tmp_path / "shapes", strike=Strike(tmp_path, moment, target=target)
        ) as process:
            assert process.wait(300) == -signal.SIGKILL
            wait_until(lambda process=process: group_of(process) == [])
    assert main(words_of(tmp_path / "shapes", "num_workers=2")) == 0
    assert files_of(tmp_path) == files_of(undisturbed)


# ---- one owner


@pytest.mark.processes
def test_a_second_build_leaves_every_file_untouched_and_another_config_or_source_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 5, "bee": 5}), tmp_path / "out"
    assert build(source, out) == 0
    before = {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")}
    assert len(before) == 6
    assert build(source, out, "num_workers=2") == 0
    held = ("out: ", "[changed]")
    for change in (
        "image_size: 24, was 16",
        "seed: 1, was 0",
        "encoding: jpeg, was raw",
        "samples_per_shard: 3, was 8192",
    ):
        key, _, value = change.partition(",")[0].partition(": ")
        refused(build(source, out, f"{key}={value}"), *held, f"({change})")
    refused(
        build(source, out, "classes=[ant]", "seed=3"),
        *held,
        "(classes: ['ant'], was None; seed: 3, was 0)",
    )
    write_files(source, {"ant/new.jpg": encoded(picture(seed=99))})
    refused(build(source, out), *held, "other files")
    assert {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")} == before


def test_another_config_is_refused_an_unfinished_dataset_and_the_same_one_goes_on(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 8}), tmp_path / "out"
    interrupt_before_the_manifest(source, out, monkeypatch)
    before = files_of(out)
    refused(build(source, out, "samples_per_shard=4"), "[changed]", "(samples_per_shard: 4, was 2)")
    assert files_of(out) == before
    assert build(source, out, "samples_per_shard=2") == 0
    assert load_manifest(out).num_written == 8


@pytest.mark.processes
def test_a_second_builder_is_refused_while_the_first_is_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shapes"
    words = words_of(out)
    with held_at_work(tmp_path / "held", *words):
        assert main(words) == 75
    assert printed_errors(capsys.readouterr().err) == [(str(out), "busy")]


# ---- nothing lost


def test_every_input_is_written_or_has_one_line_of_reason_and_hash(tmp_path: Path) -> None:
    good = picture(seed=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    accepted = {
        "good.jpg": encoded(good),
        "really_png.JPEG": encoded(good, "PNG"),
        "cmyk.jpg": encoded(good.convert("CMYK")),
        "palette.png": encoded(good.convert("P"), "PNG"),
        "gray16.png": encoded(Image.fromarray(np.full((30, 40), 40_000, np.uint16)), "PNG"),
        "alpha.png": encoded(good.convert("RGBA"), "PNG"),
        "turned.jpg": encoded(good, exif=exif),
        "web.webp": webp(good),
    }
    broken = {
        "damaged.jpg": (encoded(good)[:-40] + b"\xff\xd0" + encoded(good)[-38:], "damaged"),
        "zero.jpg": (b"", "empty"),
        "text.jpg": (b"<html>404 Not Found</html>", "not_an_image"),
        "half.jpg": (encoded(good)[:-200], "truncated"),
        "half.png": (encoded(good, "PNG")[:-200], "truncated"),
    }
    source = write_files(
        tmp_path / "source", {f"ant/{name}": data for name, data in accepted.items()}
    )
    write_files(source, {f"bee/{name}": data for name, (data, _) in broken.items()})
    write_files(source, {"bee/fine.jpg": encoded(good)})
    assert (
        build(
            source,
            tmp_path / "out",
            "encoding=jpeg",
            "samples_per_shard=5",
            "max_reject_fraction=1",
        )
        == 0
    )

    manifest = load_manifest(tmp_path / "out")
    assert (manifest.num_read, manifest.num_written, manifest.num_rejected) == (14, 9, 5)
    written = []
    for path in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(path) as archive:
            written += [
                json.load(archive.extractfile(name))["path"]
                for name in archive.getnames()
                if "json" in name
            ]  # type: ignore[arg-type]
    assert sorted(written) == sorted([*(f"ant/{name}" for name in accepted), "bee/fine.jpg"])
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    ]
    assert {line["path"]: (line["reason"], line["sha256"]) for line in lines} == {
        f"bee/{name}": (reason, hashlib.sha256(data).hexdigest())
        for name, (data, reason) in broken.items()
    }
    assert len(lines) == 5
    assert all(line["detail"] and " at 0x" not in line["detail"] for line in lines)


def test_a_picture_beyond_the_budget_is_rejected_and_the_remedy_works(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", {"ant/small.png": encoded(picture(seed=1), "PNG")})
    write_files(source, {"ant/large.png": encoded(picture(seed=2, width=41), "PNG")})
    words = ["max_pixels=1200", "max_reject_fraction=1"]
    assert build(source, tmp_path / "out", *words) == 0
    (line,) = [
        json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    ]
    assert (line["path"], line["reason"]) == ("ant/large.png", "too_many_pixels")
    assert line["detail"] == "41 x 30 exceeds max_pixels=1200; shrink it, or raise max_pixels"
    assert build(source, tmp_path / "more", "max_pixels=1230") == 0
    assert load_manifest(tmp_path / "more").num_written == 2
    assert build(source, tmp_path / "other", "max_pixels=178956971") == 2  # Pillow would refuse it


def test_when_memory_runs_out_the_picture_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def run_out(data: bytes, spec: ImageSpec) -> EncodedImage:
        if data == large:
            raise MemoryError
        return convert(data, spec)

    large = encoded(picture(seed=9, width=90))
    source = write_files(write_classes(tmp_path / "in", {"ant": 5}), {"ant/large.jpg": large})
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.build.build.convert", run_out)
        refused(build(source, tmp_path / "out"), "ant/large.jpg: ", "[no-space]")
    assert build(source, tmp_path / "out") == 0
    assert load_manifest(tmp_path / "out").num_written == 6


def test_too_many_rejects_fail_every_time_and_still_leave_the_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 7}), tmp_path / "out"
    write_files(source, {f"ant/text{number}.jpg": b"no" for number in range(3)})
    for _ in range(2):
        refused(
            build(source, out, "max_reject_fraction=0.29"),
            "3 of 10 inputs",
            "30.0%",
            "29.0%",
            str(out / "rejected.jsonl"),
            "[too-many-faults]",
            code=1,
        )
    assert load_manifest(out).num_written == 7
    assert build(source, out, "max_reject_fraction=0.3") == 0
    assert (
        f"read 10 = written 7 + rejected 3; {out}/rejected.jsonl lists the reasons"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("folders", ["train val test", "Training valid Testing"])
def test_splits_share_one_class_list_and_a_class_whose_pictures_are_all_rejected_keeps_its_label(
    tmp_path: Path, folders: str
) -> None:
    train, val, test = folders.split()
    source = write_classes(
        tmp_path / "source",
        {f"{train}/ant": 4, f"{train}/cat": 3, f"{val}/cat": 2, f"{test}/cat": 1},
    )
    write_files(source, {f"{train}/bee/text.jpg": b"no"})
    assert build(source, tmp_path / "out", "max_reject_fraction=1") == 0
    manifest = load_manifest(tmp_path / "out")
    assert manifest.classes == ("ant", "bee", "cat")
    counts = {name: split.class_counts for name, split in manifest.splits.items()}
    assert counts == {"train": (4, 0, 3), "val": (0, 0, 2), "test": (0, 0, 1)}


# ---- layout


def test_labels_are_the_sorted_class_order_and_raw_samples_stand_at_one_stride(
    tmp_path: Path,
) -> None:
    colors = {"b": (255, 0, 0), "a": (0, 255, 0), "c10": (0, 0, 255), "c9": (255, 255, 0)}
    files = {
        f"{name}/{number}.png": encoded(Image.new("RGB", (20, 20), color), "PNG")
        for name, color in colors.items()
        for number in range(5)
    }
    out = tmp_path / "out"
    assert build(write_files(tmp_path / "source", files), out, "samples_per_shard=20") == 0
    assert load_manifest(out).classes == ("a", "b", "c10", "c9")
    index = np.load(out / "train-000000.npy")
    # 512 of tar header, 781 of P6 header and pixels padded to 1024, 512 of header, 512 of label
    assert index[:, 0].tolist() == [512 + 2560 * number for number in range(20)]
    assert set(index[:, 1].tolist()) == {781}
    content = (out / "train-000000.tar").read_bytes()
    for offset, length, label in index.tolist():
        assert content[offset : offset + 13] == b"P6\n16 16\n255\n"
        assert (
            content[offset + 13 : offset + length]
            == bytes(colors[("a", "b", "c10", "c9")[label]]) * 256
        )
    assert sorted(index[:, 2].tolist()) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5


def test_listed_order_is_the_sorted_one_and_shuffled_order_mixes_by_seed(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 10, "bee": 10})
    labels = {}
    for name, words in {"listed": ["order=listed"], "zero": [], "one": ["seed=1"]}.items():
        assert build(source, tmp_path / name, *words) == 0
        labels[name] = np.load(tmp_path / name / "train-000000.npy")[:, 2].tolist()
    assert labels["listed"] == [0] * 10 + [1] * 10
    assert sorted(labels["zero"]) == sorted(labels["one"]) == labels["listed"]
    assert labels["listed"] != labels["zero"] != labels["one"] != labels["listed"]


@pytest.mark.parametrize(
    ("num_samples", "most", "num_shards"),
    [
        (300, 8192, 1),
        (512, 8192, 1),
        (2700, 8192, 6),
        (16_200, 8192, 16),
        (1_281_167, 8192, 157),
        (2700, 5000, 1),
        (2700, 100, 27),
    ],
)
def test_small_splits_are_cut_into_enough_shards_for_several_workers(
    num_samples: int, most: int, num_shards: int
) -> None:
    size = shard_size(num_samples, most=most)
    assert len(range(0, num_samples, size)) == num_shards and size <= most


def test_a_held_out_share_is_seeded_proportional_and_disjoint(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 10, "bee": 20, "cat": 40})

    def held_out(name: str, seed: int) -> tuple[set[str], set[str]]:
        words = ("encoding=keep", "source.val_fraction=0.2", f"source.seed={seed}")
        assert build(source, tmp_path / name, *words) == 0
        splits = load_manifest(tmp_path / name).splits
        assert splits["train"].class_counts == (8, 16, 32)
        assert splits["val"].class_counts == (2, 4, 8)
        return tuple(_hashes(tmp_path / name / f"{split}-000000.tar") for split in ("train", "val"))  # type: ignore[return-value]

    train, val = held_out("zero", 0)
    assert not train & val
    assert train | val == {
        hashlib.sha256(path.read_bytes()).hexdigest() for path in source.glob("*/*")
    }
    assert held_out("again", 0) == (train, val)
    assert held_out("one", 1)[1] != val


def test_per_class_draws_each_class_alike_and_takes_val_from_train(
    tmp_path: Path, refused: Refused
) -> None:
    source, few = (
        write_classes(tmp_path / "source", {"ant": 6, "bee": 9, "cat": 5}),
        tmp_path / "few",
    )
    words = ("source.val_fraction=0", "encoding=keep")
    assert build(source, few, *words, "per_class={train: 4, val: 2}") == 0
    manifest = load_manifest(few)
    assert manifest.classes == ("ant", "bee")
    counts = {split: found.class_counts for split, found in manifest.splits.items()}
    assert counts == {"train": (4, 4), "val": (2, 2)}
    assert not _hashes(few / "train-000000.tar") & _hashes(few / "val-000000.tar")
    refused(build(source, tmp_path / "out", *words, "per_class={tests: 1}"), "[empty]")
    write_classes(tmp_path / "tests/test", {"ant": 6})
    refused(
        build(tmp_path / "tests", tmp_path / "out", "per_class={val: 1}"), "per_class", "[empty]"
    )
    lost = [*(f"bee/{number:03d}.jpg" for number in range(3)), "ant/000.jpg"]
    (tmp_path / "list").write_text("".join(json.dumps({"path": path}) + "\n" for path in lost))
    words = (*words, f"exclude=[{tmp_path / 'list'}]", "per_class={train: 4, val: 2}")
    assert build(source, tmp_path / "rest", *words) == 0
    manifest = load_manifest(tmp_path / "rest")
    assert (manifest.classes, manifest.num_written) == (("bee",), 6)
    assert manifest.num_left_out["excluded"] == 4


def test_per_class_keeps_equal_files_in_one_split(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 12, "bee": 12})
    for path in list(source.glob("*/*")):
        shutil.copy(path, path.with_stem(f"{path.stem}-copy"))
    words = ("source.val_fraction=0", "encoding=keep", "per_class={train: 8, val: 4}")
    for seed in range(3):
        assert build(source, out := tmp_path / f"{seed}", *words, f"seed={seed}") == 0
        assert load_manifest(out).num_written == 24
        assert not _hashes(out / "train-000000.tar") & _hashes(out / "val-000000.tar")


@pytest.mark.parametrize("name", ["demos", "demos_second", "demos_third"])
def test_the_images_of_demo_variants_are_shapes_without_other_packages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = read_yaml(REPOSITORY / f"configs/data_prep/{name}.yaml")
    real, shapes = tree["source"]
    assert {"train", "val"} == tree["per_class"].keys()
    assert shapes["num_train_per_class"] >= tree["per_class"]["train"]
    assert shapes["num_val_per_class"] >= tree["per_class"]["val"]
    shapes |= {"num_train_per_class": 3, "num_val_per_class": 2}
    tree |= {"out": str(tmp_path / name), "per_class": {"train": 3, "val": 2}, "num_workers": 1}
    there = tree | {"source": [{"kind": "folder", "path": str(REPOSITORY)}, shapes]}
    assert validate(BuildSettings, there).source.kind == "folder"
    real |= {"path": str(tmp_path / "none")} if "path" in real else {}
    monkeypatch.setattr("data_prep.build.config.find_spec", lambda _: None)
    manifest = build_dataset(validate(BuildSettings, tree))
    assert manifest.config["source"]["kind"] == "synthetic"
    counts = {split: set(found.class_counts) for split, found in manifest.splits.items()}
    assert counts == {"train": {3}, "val": {2}}
    assert len(manifest.classes) == shapes["num_classes"]


def _hashes(shard: Path) -> set[str]:
    with tarfile.open(shard) as archive:
        pictures = [
            archive.extractfile(name) for name in archive.getnames() if name.endswith(".jpg")
        ]
        return {hashlib.sha256(picture.read()).hexdigest() for picture in pictures if picture}


# ---- nothing is where it would not be read


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("", "[missing-path]"),
        ("./", "[unknown-format]"),
        ("ant/0.jpg bee/", "bee"),
        ("ant/0.jpg links/0.jpg->", "links"),
        # a val without cats may be meant
        ("train/ant/0.jpg train/bee/0.jpg train/cat/0.jpg val/ant/0.jpg val/bee/", "val/bee"),
        ("train/ant/", "train"),
        ("train/ant/0.jpg val/", "{source}/val"),
        ("cat/a.jpg val/cat/b.jpg", "cat/"),
        ("train/cat/a.jpg holdout/cat/b.jpg", "holdout/"),
        ("train/cat/a.jpg train/loose.png", "loose.png"),
        ("cat/a.jpg loose.JPG", "loose.JPG"),
        ("cat/a.jpg a.jfif b.avif", "a.jfif, b.avif"),
        ("cat/a.jpg no-ending c.backup", "c.backup, no-ending"),
    ],
)
def test_what_lacks_pictures_or_would_be_left_out_of_a_folder_is_refused(
    tmp_path: Path, refused: Refused, entries: str, message: str
) -> None:
    source = tmp_path / "source"
    for entry in entries.split():
        place = source / entry.removesuffix("->")
        (place if entry.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if entry.endswith("->"):
            place.symlink_to("elsewhere")
            os.mkfifo(place.with_name("1.jpg"))
        elif not entry.endswith("/"):
            place.write_bytes(encoded(picture(seed=1)))
    refused(
        build(source, tmp_path / "out"), "data_prep: source.path: ", message.format(source=source)
    )
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("place", ["bee", "val", "train/bee"])
def test_a_class_or_split_that_leads_nowhere_is_refused(
    tmp_path: Path, refused: Refused, place: str
) -> None:
    source = write_classes(
        tmp_path / "source", {"ant": 1} if place == "bee" else {"train/ant": 1, "train/cat": 1}
    )
    write_files(source, {f"{Path(place).parent}/notes.txt": b"no picture", "empty": b""})
    path = source / place
    kinds: list[tuple[Callable[[], object], str]] = [
        (lambda: path.symlink_to("nowhere"), "a link to nowhere"),
        (lambda: path.symlink_to(path.name), "a link to nowhere"),
        (lambda: path.symlink_to("/dev/null"), "a pipe or a device"),
        (lambda: os.mkfifo(path), "a pipe or a device"),
        (lambda: path.symlink_to("."), "a link to a folder that contains it"),
        (lambda: path.symlink_to(path.parent.parent), "a link to a folder that contains it"),
    ]
    for make, kind in kinds:
        make()
        refused(build(source, tmp_path / "out"), f"{path.name}: {kind}")
        path.unlink()
    assert build(source, tmp_path / "out") == 0


def test_folders_of_a_class_are_walked_in_order_and_a_link_to_where_it_lies_ends_the_walk(
    tmp_path: Path,
) -> None:
    source = write_classes(
        tmp_path / "source", {"ant": 2, "ant/more": 2, "ant/more/still": 1, "bee": 3}
    )
    (source / "ant" / "more" / "loop").symlink_to(source / "ant", target_is_directory=True)
    (source / "ant" / "again").symlink_to(source / "ant" / "more", target_is_directory=True)
    (source / "ant" / "up").symlink_to("..")
    (source / "ant" / "self").symlink_to("self")
    assert build(source, tmp_path / "out", "order=listed", "max_reject_fraction=0.5") == 0
    manifest = load_manifest(tmp_path / "out")
    assert (manifest.splits["train"].class_counts, manifest.num_read, manifest.num_rejected) == (
        (8, 3),
        12,
        1,
    )
    paths = [
        json.loads(path)
        for path in (tmp_path / "out" / "train-000000.paths").read_text().splitlines()
    ]
    below = [
        f"{place}/{name}"
        for place in ("again", "more")
        for name in ("000.jpg", "001.jpg", "still/000.jpg")
    ]
    assert paths == [f"ant/{name}" for name in ("000.jpg", "001.jpg", *below)] + [
        f"bee/00{number}.jpg" for number in range(3)
    ]


def test_what_is_no_plain_file_or_too_large_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 3}), tmp_path / "out"
    (source / "ant" / "nowhere.jpg").symlink_to(tmp_path / "nothing")
    os.mkfifo(source / "ant" / "pipe.jpg")
    (source / "ant" / "notes.txt").write_text("kept beside the pictures")
    monkeypatch.setattr("data_prep.images.rejection.MAX_FILE_BYTES", 100_000)
    with open(source / "ant" / "large.jpg", "wb") as file:
        file.truncate(200_000)
    assert build(source, out, "max_reject_fraction=1") == 0
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert {line["path"]: line["reason"] for line in rejected} == {
        "ant/nowhere.jpg": "not_a_file",
        "ant/pipe.jpg": "not_a_file",
        "ant/large.jpg": "too_large",
    }
    assert load_manifest(out).num_left_out == {".txt files": 1}
    details = {line["path"]: line["detail"] for line in rejected}
    assert (details["ant/nowhere.jpg"], details["ant/pipe.jpg"]) == (
        "a link to nowhere",
        "a pipe or a device",
    )


def test_shards_made_before_the_source_was_touched_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 8}), tmp_path / "out"
    interrupt_before_the_manifest(source, out, monkeypatch)
    for path in sorted(source.rglob("*.jpg")):  # other images with equal file sizes
        os.utime(path, ns=(1, 1))
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(before) == 4
    assert build(source, out, "samples_per_shard=2") == 0
    assert all(path.stat().st_mtime_ns != changed for path, changed in before.items())


def test_a_dataset_is_named_after_its_directory_wherever_it_is_called_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 4}), tmp_path / "ants"
    out.mkdir()
    monkeypatch.chdir(out)
    assert build(source, Path()) == 0
    assert load_manifest(out).name == "ants"


def test_selections_that_leave_nothing_or_match_nothing_are_refused(
    tmp_path: Path, refused: Refused
) -> None:
    source, out = write_classes(tmp_path / "source", {"ant": 2, "bee": 2}), tmp_path / "out"
    for name, paths in (
        ("all", ["ant/000.jpg", "ant/001.jpg", "bee/000.jpg", "bee/001.jpg"]),
        ("none", ["train/ant/000.jpg"]),
        ("one", ["ant/001.jpg"]),
    ):
        (tmp_path / name).write_text("".join(json.dumps({"path": path}) + "\n" for path in paths))
    for overrides, message in (
        ((f"exclude=[{tmp_path / 'all'}]",), "[empty]"),
        ((f"exclude=[{tmp_path / 'none'}]",), "[mismatch]"),
        (("classes=[]",), "[bad-value]"),
        (("classes=[wasp]",), "[unknown-name]"),
    ):
        refused(build(source, out, *overrides), message)
    assert build(source, out, f"exclude=[{tmp_path / 'one'}]") == 0
    manifest = load_manifest(out)
    assert (manifest.num_read, manifest.num_left_out) == (3, {"excluded": 1})
    assert build(source, tmp_path / "ants", "classes=[ant]") == 0
    assert load_manifest(tmp_path / "ants").num_left_out == {"whole classes": 1}


def test_a_rejecting_build_and_a_task_answer_a_script_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 1})
    write_files(source, {"ant/zero.jpg": b""})
    assert build(source, tmp_path / "out", "--json") == 1
    assert json.loads(capsys.readouterr().out)["rejected"] == 1
    assert build(source, tmp_path / "parts", "--json", "--task=0/1") == 0
    assert json.loads(capsys.readouterr().out) == {
        "dataset": str(tmp_path / "parts"),
        "task": "0/1",
        "shards": 1,
    }
    assert build(source, tmp_path / "none", "--task=") == 2  # an unset variable of a job array


def test_a_file_in_the_place_of_the_dataset_is_one_clear_line(
    tmp_path: Path, refused: Refused
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 1})
    (tmp_path / "out").write_text("a file")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        refused(build(source, out), "[exists]")
    for out in (source, source / "shards"):
        refused(build(source, out), "[conflict]")


def test_a_file_of_a_time_that_no_clock_has_shown_is_packed(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 2, "bee": 2})
    os.utime(
        source / "ant/000.jpg", (2**33 * 1.1, 2**33 * 1.1)
    )  # in 2269: more nanoseconds than 63 bits hold
    if (source / "ant/000.jpg").stat().st_mtime_ns < 1 << 63:
        pytest.skip("this file system keeps no such times")
    assert build(source, tmp_path / "out") == 0
    assert load_manifest(tmp_path / "out").num_written == 4
