"""A subset has its parent's samples without a copy, in the requested number and proportions.
Subsets are nested, and can be trained on."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.build.merge import write_annotation
from data_prep.build.parts import own_place
from data_prep.check.verify import verify
from data_prep.choose.selection import ranking
from data_prep.cli import main
from data_prep.manifest import load_annotation, load_index, load_manifest
from pretrain.data.reader import open_split
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, change_manifest, files_of, replace_index, write_classes
from tests.data_prep.stock import paths as paths_of

COUNTS = {"ant": 3, "bee": 40, "cat": 17, "dog": 1, "elk": 60, "fox": 29}


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """162 images (150 train, 12 val) of very unequal classes, in shards of 32."""
    counts = {f"train/{name}": count for name, count in COUNTS.items()} | {
        f"val/{name}": 2 for name in COUNTS
    }
    root = tmp_path_factory.mktemp("animals")
    assert (
        build(write_classes(root / "source", counts), root / "animals", "samples_per_shard=32") == 0
    )
    return root / "animals"


def subset(source: Path, out: Path, *words: str) -> int:
    return main(["subset", str(source), "--out", str(out), *words])


def counts_of(directory: Path) -> dict[str, int]:
    return dict(Counter(path.split("/")[1] for path in paths_of(directory)))


# ---- the choice


def test_every_class_has_its_share_and_the_total_is_exact(animals: Path, tmp_path: Path) -> None:
    for count in (1, 2, 15, 75, 149, 150):
        assert subset(animals, tmp_path / str(count), "--count", str(count)) == 0
        found = counts_of(tmp_path / str(count))
        assert sum(found.values()) == count
        assert all(
            abs(found.get(name, 0) - size * count / 150) < 1 for name, size in COUNTS.items()
        )


@pytest.mark.parametrize("seed", [0, 7])
def test_smaller_sizes_lie_within_larger_ones(animals: Path, tmp_path: Path, seed: int) -> None:
    before: set[str] = set()
    for fraction in ("0.05", "0.1", "0.2", "0.37", "0.9", "1"):
        assert (
            subset(animals, tmp_path / fraction, "--fraction", fraction, "--seed", str(seed)) == 0
        )
        paths = set(paths_of(tmp_path / fraction))
        assert before < paths
        before = paths
    assert len(before) == 150


def test_a_ranking_holds_every_sample_once_and_one_left_out_keeps_the_order_of_the_others_of_a_class() -> (
    None
):
    labels = np.random.default_rng(1).integers(0, 9, 500) ** 2 // 9
    keep = np.ones(500, np.bool_)
    whole = ranking(labels, seed=5, keep=keep)
    assert sorted(whole.tolist()) == list(range(500))
    keep[whole[::3]] = False
    rest = ranking(labels, seed=5, keep=keep)
    for label in range(9):
        assert rest[labels[rest] == label].tolist() == [
            row for row in whole[labels[whole] == label].tolist() if keep[row]
        ]


def test_seeds_choose_differently_and_one_seed_the_same_bytes(
    animals: Path, tmp_path: Path
) -> None:
    for place, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert subset(animals, tmp_path / place / "half", "--fraction", "0.5", "--seed", seed) == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert set(paths_of(tmp_path / "a/half")) != set(paths_of(tmp_path / "c/half"))


def test_the_ranking_is_the_same_in_every_version() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2, -1, 0])
    assert ranking(labels, seed=11, keep=np.ones(10, np.bool_)).tolist() == [
        9,
        5,
        0,
        2,
        4,
        7,
        8,
        1,
        6,
        3,
    ]


def test_per_class_takes_as_many_of_each_and_names_a_class_that_has_fewer(
    animals: Path, tmp_path: Path, refused: Refused
) -> None:
    assert subset(animals, tmp_path / "one", "--per-class", "1") == 0
    assert counts_of(tmp_path / "one") == dict.fromkeys(COUNTS, 1)
    refused(subset(animals, tmp_path / "two", "--per-class", "2"), "[bad-value]")


# ---- its contents


@pytest.mark.parametrize("encoding", ["raw", "jpeg", "keep"])
def test_pictures_and_labels_are_the_parents_rows(tmp_path: Path, encoding: str) -> None:
    source = write_classes(tmp_path / "source", {"ant": 9, "bee": 30, "cat": 20})
    assert build(source, tmp_path / "all", f"encoding={encoding}", "samples_per_shard=16") == 0
    assert subset(tmp_path / "all", tmp_path / "some", "--fraction", "0.4") == 0
    whole = open_split(tmp_path / "all", load_manifest(tmp_path / "all"), "train")
    part = open_split(tmp_path / "some", load_manifest(tmp_path / "some"), "train")
    assert part.num_samples == 24
    places = {path: number for number, path in enumerate(paths_of(tmp_path / "all"))}
    rows = np.array([places[path] for path in paths_of(tmp_path / "some")])
    assert (np.diff(rows) > 0).all()
    order = np.random.default_rng(0).permutation(24)
    assert torch.equal(part.images(order), whole.images(rows[order]))
    assert part.labels.tolist() == whole.labels[rows].tolist()


def test_a_subset_is_whole_copies_no_tar_and_takes_other_splits_as_they_are(
    animals: Path, tmp_path: Path
) -> None:
    before = files_of(animals)
    assert subset(animals, tmp_path / "deep" / "tenth", "--fraction", "0.1") == 0
    assert not list(tmp_path.rglob("*.tar"))
    found = verify(tmp_path / "deep" / "tenth")
    assert (found.faults, found.notes) == ([], [])
    assert found.manifest.splits["train"].num_samples == 15
    assert paths_of(tmp_path / "deep" / "tenth", "val") == paths_of(animals, "val")
    parent = load_manifest(animals)
    assert found.manifest.source["parent"] == parent.pixels_hash
    assert found.manifest.num_left_out == {"not_chosen": 135}
    assert found.manifest.channel_mean == parent.channel_mean
    assert files_of(animals) == before


def test_shards_without_chosen_samples_are_left_out(animals: Path, tmp_path: Path) -> None:
    assert subset(animals, tmp_path / "two", "--count", "2") == 0
    shards = load_manifest(tmp_path / "two").splits["train"].shards
    assert 1 <= len(shards) <= 2
    assert sum(len(load_index(tmp_path / "two", shard)) for shard in shards) == 2


def test_a_subset_of_a_subset_names_the_first_tars(animals: Path, tmp_path: Path) -> None:
    assert subset(animals, tmp_path / "half", "--fraction", "0.5") == 0
    assert subset(tmp_path / "half", tmp_path / "few", "--count", "10") == 0
    shutil.rmtree(tmp_path / "half")
    assert verify(tmp_path / "few").faults == []
    tars = {
        (tmp_path / "few" / shard.file).resolve()
        for shard in load_manifest(tmp_path / "few").splits["train"].shards
    }
    assert tars <= {path.resolve() for path in animals.glob("*.tar")}


def test_some_classes_are_numbered_anew_through_two_subsets_and_verify_knows(
    animals: Path, tmp_path: Path
) -> None:
    (tmp_path / "three").write_text("fox\nbee\n\nelk\n")
    (tmp_path / "two").write_text("fox\nelk\n")
    assert subset(animals, tmp_path / "a", "--classes-file", str(tmp_path / "three")) == 0
    assert (
        subset(
            tmp_path / "a",
            tmp_path / "b",
            "--classes-file",
            str(tmp_path / "two"),
            "--fraction",
            "0.5",
        )
        == 0
    )
    first, second = load_manifest(tmp_path / "a"), load_manifest(tmp_path / "b")
    assert first.classes == ("bee", "elk", "fox")
    assert first.splits["train"].class_counts == (40, 60, 29)
    assert first.splits["val"].class_counts == (2, 2, 2)
    assert second.classes == ("elk", "fox")
    assert second.source["labels"] == [4, 5]
    labels = open_split(tmp_path / "b", second, "train").labels.tolist()
    assert [second.classes[label] for label in labels] == [
        path.split("/")[1] for path in paths_of(tmp_path / "b")
    ]
    for directory in ("a", "b"):
        assert verify(tmp_path / directory).faults == []
    change_manifest(tmp_path / "b", lambda manifest: manifest["source"].update(labels=[5, 4]))
    assert verify(tmp_path / "b").num_faults == second.num_written


def test_excluded_paths_are_left_out_of_every_split(
    animals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [*paths_of(animals)[::5], paths_of(animals, "val")[3]]
    lines = [json.dumps({"path": path}) for path in [*out, "of/another/dataset.jpg"]]
    (tmp_path / "list").write_text("\n".join(lines))
    assert subset(animals, tmp_path / "rest", "--exclude", str(tmp_path / "list")) == 0
    assert paths_of(tmp_path / "rest") == [path for path in paths_of(animals) if path not in out]
    assert len(paths_of(tmp_path / "rest", "val")) == 11
    assert load_manifest(tmp_path / "rest").num_left_out == {"excluded": 31}
    assert verify(tmp_path / "rest").faults == []
    for _ in range(2):  # the second time it exists
        capsys.readouterr()
        assert subset(animals, tmp_path / "rest", "--exclude", str(tmp_path / "list")) == 0
        assert f"of 32 paths to exclude, 31 are in {animals}" in capsys.readouterr().out
        assert (
            subset(animals, tmp_path / "rest", "--exclude", str(tmp_path / "list"), "--json") == 0
        )
        assert json.loads(capsys.readouterr().out)["exclude_paths"] == {"listed": 32, "found": 31}
        shutil.rmtree(tmp_path / "rest")


def test_a_list_of_another_dataset_or_of_a_whole_split_is_refused_and_an_empty_one_is_not(
    animals: Path, tmp_path: Path, refused: Refused
) -> None:
    listed = tmp_path / "list"
    for paths, message in (
        (["of/another.jpg", "of/yet/another.jpg"], "[mismatch]"),
        (paths_of(animals, "val"), "[empty]"),
    ):
        listed.write_text("\n".join(json.dumps({"path": path}) for path in paths))
        refused(subset(animals, tmp_path / "out", "--exclude", str(listed)), message)
        assert not (tmp_path / "out").exists()
    listed.write_text("")
    assert subset(animals, tmp_path / "out", "--exclude", str(listed)) == 0


def test_annotations_follow_their_samples(animals: Path, tmp_path: Path) -> None:
    parent = shutil.copytree(animals, tmp_path / "parent")
    bits = np.random.default_rng(0).random((150, 10)) < 0.5
    for key, columns in {"folds": bits, "real": bits[:, :6]}.items():
        fact = write_annotation(parent, f"train-{key}", columns).model_dump()
        change_manifest(
            parent,
            lambda m, key=key, fact=fact: m["splits"]["train"]["annotations"].update({key: fact}),
        )
    (tmp_path / "two").write_text("fox\nelk\n")
    assert subset(parent, tmp_path / "few", "--count", "20") == 0
    assert subset(parent, tmp_path / "foxes", "--classes-file", str(tmp_path / "two")) == 0
    rows = [paths_of(parent).index(path) for path in paths_of(tmp_path / "few")]
    split = load_manifest(tmp_path / "few").splits["train"]
    assert (load_annotation(tmp_path / "few", split, "folds") == bits[rows]).all()
    assert (load_annotation(tmp_path / "few", split, "real") == bits[rows, :6]).all()
    # as many columns as the parent has classes
    assert list(load_manifest(tmp_path / "foxes").splits["train"].annotations) == ["folds"]


# ---- verify of a subset


def test_only_the_rows_of_the_subset_are_looked_at_and_each_must_point_at_a_picture(
    animals: Path, tmp_path: Path
) -> None:
    assert subset(animals, tmp_path / "half", "--fraction", "0.5") == 0
    shard = load_manifest(tmp_path / "half").splits["train"].shards[1]
    rows = np.load(tmp_path / "half" / shard.index_file)
    rows[3, 0] += 512
    replace_index(tmp_path / "half", rows, shard=1)
    faults = verify(tmp_path / "half").faults
    assert faults == [f"{shard.file}: row 3 of {shard.index_file} points at no image"]


# ---- mistakes and repetition


def test_the_same_call_again_changes_nothing_and_another_is_refused(
    animals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    assert subset(animals, tmp_path / "half", "--fraction", "0.5") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "half").iterdir()}
    assert subset(animals, tmp_path / "half", "--fraction", "0.5", "--json") == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "half").iterdir()} == before
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["splits"] == {
        "train": 75,
        "val": 12,
    }
    refused(subset(animals, tmp_path / "half", "--fraction", "0.4"), "[changed]")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "half").iterdir()} == before


def test_what_is_no_picture_of_the_parent_makes_no_other_subset(
    animals: Path, tmp_path: Path
) -> None:
    parent, half = shutil.copytree(animals, tmp_path / "parent"), tmp_path / "half"
    again = (parent, half, "--fraction", "0.5")
    assert subset(*again) == 0
    before = files_of(half)
    change_manifest(parent, lambda tree: tree.update(max_reject_fraction=0.5, tool_version="99"))
    assert subset(*again) == 0
    assert files_of(half) == before
    for place in (
        "http://a",
        "s3://b",
    ):  # its shards are now read from here, without the missing tars' names
        moved = json.loads((parent / "manifest.json").read_bytes())["splits"]
        for shard in [shard for split in moved.values() for shard in split["shards"]]:
            shard["file"] = f"{place}/{shard['name']}.tar"
        change_manifest(parent, lambda tree, moved=moved: tree.update(splits=moved))
        for tar in parent.glob("*.tar"):
            tar.unlink()
        assert subset(*again) == 0
        shards = [shard for split in load_manifest(half).splits.values() for shard in split.shards]
        assert {shard.file.rpartition("/")[0] for shard in shards} == {place}
    change_manifest(parent, lambda tree: tree.update(channel_mean=[0.1, 0.2, 0.3]))
    assert subset(*again) == 2


@pytest.mark.processes
def test_nothing_is_put_next_to_a_subset_and_two_commands_make_one(
    animals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [
        sys.executable,
        "-m",
        "data_prep",
        "subset",
        str(animals),
        "--fraction",
        "0.5",
        "--out",
    ]
    with own_place(tmp_path / "x"):  # so that both commands wait
        both = [
            subprocess.Popen([*words, str(tmp_path / "x")], stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        said = [str(each.stderr.readline()) for each in both if each.stderr]
        assert (
            subset(animals, tmp_path / "y", "--fraction", "0.5") == 0
        )  # another subset does not wait
    assert not [
        said for each in both for said in each.communicate(timeout=60) if "Error" in (said or "")
    ]
    assert [each.returncode for each in both] == [0, 0] and all(
        "waiting for process" in line for line in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    assert verify(tmp_path / "x").faults == []


def test_tars_that_moved_are_named_anew_by_the_same_call(
    animals: Path, tmp_path: Path, refused: Refused
) -> None:
    shutil.copytree(animals, tmp_path / "here")
    assert subset(tmp_path / "here", tmp_path / "half", "--fraction", "0.5") == 0
    (tmp_path / "here").rename(tmp_path / "there")
    assert verify(tmp_path / "half").num_faults > 0
    (tmp_path / "half" / "notes.md").write_text("mine")
    (tmp_path / "half" / ".tmp-of-a-killed-run").write_text("")
    assert subset(tmp_path / "there", tmp_path / "half", "--fraction", "0.5") == 0
    found = verify(tmp_path / "half")
    assert (found.faults, found.notes) == ([], [])
    assert (tmp_path / "half" / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "[missing-value]"),
        (["--fraction", "0"], "fraction"),
        (["--fraction", "1.5"], "fraction"),
        (["--fraction", "0.001"], "the selection leaves no sample in train"),
        (["--fraction", "0.1", "--count", "4"], "count: it cannot be combined with fraction"),
        (["--count", "151"], "[bad-value]"),
        (["--count", "4", "--split", "trian"], "[unknown-name]"),
        (["--classes-file", "nowhere"], "classes-file: nowhere cannot be read"),
        (["--exclude", "nowhere"], "exclude: nowhere cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    animals: Path, tmp_path: Path, refused: Refused, words: list[str], message: str
) -> None:
    refused(subset(animals, tmp_path / "out", *words), message)
    assert not list(tmp_path.iterdir())


def test_an_unknown_class_and_a_directory_of_something_else_are_refused(
    animals: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "classes").write_text("fix\n")
    words = ("--classes-file", str(tmp_path / "classes"))
    refused(subset(animals, tmp_path / "out", *words), "[unknown-name]")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    refused(subset(animals, tmp_path / "mine", "--count", "3"), "[exists]")
    (tmp_path / "link").symlink_to(animals)
    message = "[conflict]"
    refused(subset(animals, tmp_path / "link", "--count", "3"), message)
