"""`data_prep index` makes a dataset of stock shards without changing them, and reports every bad
sample."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from data_prep.images import ppm
from data_prep.manifest import load_manifest
from pretrain.config import DataSettings
from pretrain.data.datasets import load_training_data
from tests.data_prep.samples import encoded, picture
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

# stock webdataset does not close the files that it has read
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


# ---- good shards


def test_shards_of_stock_writers_are_read_as_they_are(tmp_path: Path) -> None:
    samples = [
        sample(number, txt=f"number {number}", **{"seg.png": b"not ours"}) for number in range(11)
    ]
    (tmp_path / "in").mkdir()
    with webdataset.ShardWriter(
        str(tmp_path / "in" / "s-%06d.tar"), maxcount=4, verbose=0
    ) as writer:
        for each in samples:
            writer.write(each)
    before = hashes(tmp_path / "in")
    assert len(before) == 3
    assert index(tmp_path / "out", tmp_path / "in" / "s-{000000..000002}.tar") == 0
    pictures, labels = read(tmp_path / "out")
    assert labels == [number % 3 for number in range(11)]
    np.testing.assert_array_equal(pictures, [seen(each["jpg"]) for each in samples])
    manifest = load_manifest(tmp_path / "out")
    assert (manifest.encoding, manifest.classes, manifest.num_rejected) == (
        "keep",
        ("0", "1", "2"),
        0,
    )
    assert manifest.splits["train"].class_counts == (4, 4, 3)
    assert paths(tmp_path / "out")[3:5] == ["s-000000.tar/00003", "s-000001.tar/00004"]
    assert manifest.splits["train"].shards[0].file == "../in/s-000000.tar"
    pixels = np.stack([seen(each["jpg"]) for each in samples]).reshape(-1, 3) / 255
    np.testing.assert_allclose(manifest.channel_mean, pixels.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(manifest.channel_std, pixels.std(axis=0), rtol=1e-9)
    assert hashes(tmp_path / "in") == before
    again = [each for path in before for each in webdataset.WebDataset(path, shardshuffle=False)]
    assert [each["jpg"] for each in again] == [each["jpg"] for each in samples]


@pytest.mark.parametrize("fixture", ["shapes", "other_shapes"])
def test_an_index_of_a_built_dataset_has_its_content(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str
) -> None:
    """Therefore the same order. The files that `build` wrote next to the tars, and the folder, do
    not matter."""
    built: Path = request.getfixturevalue(fixture)
    manifest = load_manifest(built)
    (tmp_path / "classes").write_text("\n".join(manifest.classes))
    moved = Path(
        shutil.copytree(
            built, tmp_path / "moved", ignore=shutil.ignore_patterns("*.npy", "*.json*", "*.paths")
        )
    )
    patterns = {split: f"{moved}/{split}-*.tar" for split in manifest.splits}
    more = [
        word
        for split in sorted(patterns.keys() - {"train"})
        for word in (f"--{split}", patterns[split])
    ]
    assert (
        index(tmp_path / "out", patterns["train"], *more, f"classes_file={tmp_path}/classes") == 0
    )
    found = load_manifest(tmp_path / "out")
    assert found.content_hash == manifest.content_hash and found.hash != manifest.hash
    assert found.encoding == "raw"
    assert (
        found.pixels_hash == manifest.pixels_hash
    )  # so that the channel statistics use the same pixels
    orders = [
        load_training_data(DataSettings(dataset=str(place)))
        .order(seed=3, global_batch_size=8)
        .locate(np.arange(200))
        for place in (built, tmp_path / "out")
    ]
    np.testing.assert_array_equal(*orders)
    other = found.model_copy(update={"classes": found.classes[::-1]})
    assert other.content_hash != found.content_hash


def test_json_labels_folders_in_keys_and_splits(tmp_path: Path) -> None:
    def with_json(number: int, label: Any) -> dict[str, Any]:
        made = sample(number, kind="PNG", json={"meta": {"label": label}, "cls": 99})
        return {**made, "__key__": f"some.where/{'ab'[number % 2]}/{number}"}

    words = ["wren", "ant", "wren", "bee"]
    write_stock(
        tmp_path / "a" / "0.tar", [with_json(number, word) for number, word in enumerate(words)]
    )
    write_stock(tmp_path / "b" / "0.tar", [with_json(9, "ant")])
    out = tmp_path / "out"
    assert (
        index(
            out,
            tmp_path / "a" / "*.tar",
            "--val",
            str(tmp_path / "b" / "0.tar"),
            "label=json:meta.label",
        )
        == 0
    )
    assert load_manifest(out).classes == ("ant", "bee", "wren")
    assert (read(out)[1], read(out, "val")[1]) == ([2, 0, 2, 1], [0])
    np.testing.assert_array_equal(read(out, "val")[0][0], seen(encoded(picture(seed=9), "PNG")))
    assert paths(out)[1] == "a/0.tar/some.where/b/1" and paths(out, "val") == [
        "b/0.tar/some.where/b/9"
    ]


def test_names_of_classes_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("zebra\nant\n\nbee\nowl\n")
    words = [3, "ant", "zebra", "elk", 4]
    shard = write_stock(
        tmp_path / "in.tar", [sample(n, json={"label": word}) for n, word in enumerate(words)]
    )
    out, file = tmp_path / "out", f"classes_file={tmp_path / 'names.txt'}"
    assert index(out, shard, "label=json:label", file, "max_reject_fraction=1") == 0
    assert load_manifest(out).classes == ("zebra", "ant", "bee", "owl")
    assert read(out)[1] == [3, 1, 0]
    assert rejects(out) == {"in.tar/00003": "unknown_class", "in.tar/00004": "label_out_of_range"}


def test_a_reader_turns_lays_over_white_and_squashes_or_crops_as_the_index_says(
    tmp_path: Path,
) -> None:
    turned, wide = picture(seed=1, width=48, height=32), picture(seed=2, width=64, height=32)
    exif = Image.Exif()
    exif[0x0112] = 6  # the first row is at the right
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    samples = [
        {"__key__": "turned", "png": encoded(turned, "PNG", exif=exif.tobytes()), "cls": 0},
        {"__key__": "clear", "png": encoded(clear, "PNG"), "cls": 0},
        {"__key__": "wide", "png": encoded(wide, "PNG"), "cls": 0},
    ]
    shard = write_stock(tmp_path / "in.tar", samples)
    for crop in ("center", "squash"):
        assert index(tmp_path / crop, shard, f"crop={crop}") == 0
    box = {"center": (16, 0, 48, 32), "squash": (0, 0, 64, 32)}
    for crop in ("center", "squash"):
        upright, white, small = read(tmp_path / crop)[0]
        expected = wide.resize((16, 16), Image.Resampling.BICUBIC, box=box[crop])
        np.testing.assert_array_equal(small, np.asarray(expected))
        assert white.min() == 255
        inner = (8, 0, 40, 32) if crop == "center" else (0, 0, 48, 32)
        straight = np.asarray(turned.resize((16, 16), Image.Resampling.BICUBIC, box=inner))
        assert np.abs(upright.astype(int) - np.rot90(straight, -1).astype(int)).max() <= 2


def test_longer_side_and_area_stand_in_the_manifest_and_are_what_a_reader_does(
    tmp_path: Path,
) -> None:
    wide = picture(seed=2, width=64, height=40)
    shard = write_stock(
        tmp_path / "in.tar", [{"__key__": "wide", "png": encoded(wide, "PNG"), "cls": 0}]
    )
    out = tmp_path / "out"
    assert index(out, shard, "crop=longer_side", "interpolation=area") == 0
    manifest = load_manifest(out)
    assert (manifest.crop, manifest.interpolation) == ("longer_side", "area")
    shrunk = np.asarray(wide).reshape(10, 4, 16, 4, 3).mean(axis=(1, 3))[:, 3:13]
    (small,) = read(out)[0]
    corners = small[[0, 0, -1, -1], [0, -1, 0, -1]].astype(
        float
    )  # each is in one pixel of the 10 x 10
    assert np.abs(corners - shrunk[[0, 0, -1, -1], [0, -1, 0, -1]]).max() <= 1
    np.testing.assert_allclose(manifest.channel_mean, small.mean(axis=(0, 1)) / 255, atol=1e-6)


def test_raw_pictures_that_are_no_array_are_kept_ones(tmp_path: Path) -> None:
    image = picture(seed=0, width=16, height=16)
    members = [
        (f"{n}.{end}", data)
        for n in range(3)
        for end, data in (("ppm", ppm(np.asarray(image))), ("cls", b"1"))
    ]
    shard = write_tar(tmp_path / "in.tar", [*members[:2], ("0.txt", b"in the way"), *members[2:]])
    assert index(tmp_path / "out", shard) == 0
    assert load_manifest(tmp_path / "out").encoding == "keep"
    np.testing.assert_array_equal(read(tmp_path / "out")[0], [np.asarray(image)] * 3)


def test_headers_alone_give_the_same_index_and_near_statistics(tmp_path: Path) -> None:
    shard = write_stock(tmp_path / "in.tar", [sample(number) for number in range(300)])
    for check in ("decode", "header"):
        assert index(tmp_path / check, shard, f"check={check}") == 0
    one, two = load_manifest(tmp_path / "decode"), load_manifest(tmp_path / "header")
    assert (tmp_path / "decode" / "train-000000.npy").read_bytes() == (
        tmp_path / "header" / "train-000000.npy"
    ).read_bytes()
    assert one.channel_mean != two.channel_mean
    np.testing.assert_allclose(one.channel_mean, two.channel_mean, atol=0.01)


# ---- unlabeled


def test_an_unlabeled_split_is_refused_by_training_in_one_line(tmp_path: Path) -> None:
    shard = write_stock(tmp_path / "s.tar", [{"__key__": "a", "jpg": encoded(picture(seed=1))}])
    out = tmp_path / "out"
    assert index(out, shard, "label=none") == 0
    manifest = load_manifest(out)
    assert (manifest.splits["train"].num_unlabeled, manifest.classes, read(out)[1]) == (1, (), [-1])
    with pytest.raises(ValueError, match="1 of 1 samples of split 'train' have no label"):
        load_training_data(DataSettings(dataset=str(out), eval_split=None, image_size=16))
