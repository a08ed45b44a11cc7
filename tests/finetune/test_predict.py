"""`finetune predict` on image files equals evaluation on shards of these files. It writes a row for
each, and a complete file or none."""

import csv
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data_prep.cli import main as data_prep
from data_prep.manifest import load_manifest
from data_prep.pictures import in_folder
from finetune.cli import main
from finetune.predict import predict as room
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.data.torch_dataset import Shards
from pretrain.models.build import pooled_features
from tests.conftest import Capture, Patch
from tests.data_prep.samples import encoded, picture, tar_of, write_files
from tests.finetune.tiny import export_of, judge, model_of, normalized, predictions, write_folder
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.usefixtures("without_pictures")
BUILT: dict[str, Any] = {"stored_crop": "center", "stored_interpolation": "bicubic"}


def predict(out: Path, *words: Path | str) -> list[dict[str, str]]:
    assert main(["predict", *map(str, words), "--out", str(out)]) == 0
    with open(out, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_dataset_gets_the_answers_of_its_evaluation(
    folder: Path, shapes: Path, tmp_path: Path
) -> None:
    judge(folder, shapes, tmp_path / "run")
    judged, dataset = predictions(tmp_path / "run"), tmp_path / "link"
    dataset.symlink_to(shapes)
    rows = predict(tmp_path / "out.csv", folder, dataset, "--split", "val")
    assert [row["image"] for row in rows] == [f"{dataset}/{key}" for key in judged["key"]] and len(
        rows
    ) == 72
    for place, ending in enumerate(("", "_2", "_3", "_4", "_5")):
        assert [row[f"class{ending}"] for row in rows] == [
            names[place] for names in judged["answer_names"]
        ]
        chances = [float(row[f"probability{ending}"]) for row in rows]
        np.testing.assert_allclose(
            chances, [values[place] for values in judged["probabilities"]], atol=2e-6
        )
    assert (
        list(rows[0])[:3] == ["image", "class", "probability"]
        and list(rows[0])[-1] == "error"
        and len(rows[0]) == 12
    )
    export = export_of(folder, tmp_path / "export", formats=("timm",))
    assert predict(tmp_path / "again.csv", export, dataset, "--split", "val") == rows
    whole = predict(tmp_path / "all.csv", folder, dataset, "--top", "1")
    assert len(whole) == 240 + 72 and list(whole[0]) == ["image", "class", "probability", "error"]
    assert [row["class"] for row in whole[240:]] == [row["class"] for row in rows]


@pytest.mark.parametrize(
    ("size", "facts"),
    [
        (16, BUILT),
        (8, BUILT | {"stored_size": 8, "fed_interpolation": "area"}),
        (16, {"stored_crop": "squash"}),
    ],
)
def test_pictures_get_the_answers_of_the_shards_built_from_them(
    size: int, facts: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    """Files, a folder and a plain tar without labels give the predictions for the raw shards built
    from them."""
    weights = write_folder(tmp_path / "weights", shapes, **facts)
    pictures = {
        f"{name}.jpg": encoded(picture(seed=seed, width=90, height=70))
        for seed, name in enumerate("abcdefgh" * 3)
    }
    pictures = {
        f"{label}/{name}": data
        for label in load_manifest(shapes).classes[:2]
        for name, data in pictures.items()
    }
    source, built = write_files(tmp_path / "source", pictures), tmp_path / "built"
    how = ["image_size=16" if size == 16 else "image_size=8", f"crop={facts['stored_crop']}"]
    how.append(f"interpolation={facts.get('stored_interpolation', 'bilinear')}")
    words = ["--source=folder", f"--out={built}", f"source.path={source}", "num_workers=1"]
    assert data_prep(["build", *words, *how]) == 0
    rows = {row["image"]: row for row in predict(tmp_path / "built.csv", weights, built)}
    assert len(rows) == len(pictures) == 16
    (tmp_path / "stock.tar").write_bytes(
        tar_of([*pictures.items(), ("a/._x.jpg", b""), ("a/a.json", b"{}")])
    )
    first, *files = sorted(source.rglob("*.jpg"))
    for words in ([source], [first, *files], [tmp_path / "stock.tar"]):
        found = predict(tmp_path / "out.csv", weights, *words)
        assert [Path(row.pop("image")).name for row in found] == [
            each.name for each in (first, *files)
        ]
        expected = [rows[f"{built}/{name}"] for name in sorted(pictures)]
        for own, other in zip(found, expected, strict=True):
            # on some CPUs the last printed digit depends on the batch
            probabilities = {key: float(own.pop(key)) for key in [*own] if "probability" in key}
            assert probabilities == pytest.approx(
                {key: float(other[key]) for key in probabilities}, abs=1.5e-6
            )
            assert own == {key: other[key] for key in own}


def odd_pictures() -> dict[str, bytes]:
    image = picture(seed=1, width=40, height=30)
    alpha = picture(seed=2, width=40, height=30).convert("L")
    modes = {mode: image.convert(mode) for mode in ("RGBA", "LA", "P", "CMYK", "RGB")}
    for mode in ("RGBA", "LA"):
        modes[mode].putalpha(alpha)
    modes["I;16"] = Image.fromarray(np.asarray(alpha).astype(np.uint16) * 257 + 3)
    turned = Image.Exif()
    turned[0x0112] = 6
    more: dict[str, dict[str, Any]] = {
        "P": {"transparency": bytes(range(256))},
        "RGB": {"exif": turned},
    }
    kinds = {mode: "TIFF" if mode == "CMYK" else "PNG" for mode in modes}
    return {
        f"{mode}.{kind.lower()}": encoded(modes[mode], kind, **more.get(mode, {}))
        for mode, kind in kinds.items()
    }


@pytest.mark.parametrize("interpolation", ["bicubic", "area"])
def test_a_pil_picture_a_file_and_a_shard_are_one_tensor(
    interpolation: str, shapes: Path, tmp_path: Path
) -> None:
    files = odd_pictures()
    source = write_files(tmp_path / "source", {f"all/{name}": data for name, data in files.items()})
    how = [
        f"source.path={source}",
        "image_size=16",
        f"interpolation={interpolation}",
        "source.val_fraction=0",
        "order=listed",
    ]
    assert (
        data_prep(
            ["build", "--source", "folder", "--out", str(tmp_path / "built"), "num_workers=1", *how]
        )
        == 0
    )
    stored = [picture for picture, _ in Shards(tmp_path / "built", "train")]
    weights = write_folder(
        tmp_path / "weights", shapes, **BUILT | {"stored_interpolation": interpolation}
    )
    predictor = room.Predictor.open(weights)
    paths = [source / "all" / name for name in sorted(files)]
    reader = room.PictureReader([*in_folder(source)], predictor.squares)
    read = torch.zeros(len(paths), 16, 16, 3, dtype=torch.uint8)
    assert not reader.read(reader.locate(np.arange(len(paths))), read)
    opened = [Image.open(path) for path in paths]
    for pictures in (opened, opened):  # not loaded, then loaded
        given = predictor.batch(pictures).images_BHWC
        for place, path in enumerate(paths):
            wanted = stored[place].permute(1, 2, 0)
            assert torch.equal(given[place], wanted) and torch.equal(read[place], wanted), path.name


def test_rows_stand_in_the_order_given_with_reasons_and_features(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(room, "ROWS_PER_GROUP", 3)
    monkeypatch.setattr(room, "BATCH_SIZE", 2)
    good = encoded(picture(seed=1), "PNG")
    files = {
        "b/2.png": good,
        "b/10.png": b"",
        "a/deep/1.webp": good,
        "no ending": good,
        'odd, "name".jpg': good[:200],
        "notes.txt": b"x",
    }
    write_files(Path("photos"), files)
    Path("photos/lost.png").symlink_to("nowhere")
    Path("one.tar").write_bytes(
        tar_of({"k1.jpg": good, "k1.txt": b"no label", "d/k2.png": b"\x89PNG broken"})
    )
    Path("any.dat").write_bytes(good)
    rows = predict(
        Path("out.csv"),
        folder,
        "one.tar",
        "photos",
        "any.dat",
        shapes,
        "--split",
        "val",
        "--features",
        "features.parquet",
    )
    places = ["a/deep/1.webp", "b/10.png", "b/2.png", "lost.png", "no ending", 'odd, "name".jpg']
    assert [row["image"] for row in rows[:9]] == [
        "one.tar/k1.jpg",
        "one.tar/d/k2.png",
        *(f"photos/{p}" for p in places),
        "any.dat",
    ]
    bad = {row["image"]: row["error"].partition(":")[0] for row in rows if row["error"]}
    reasons = ("not_an_image", "empty", "not_a_file", "truncated")
    assert bad == dict(
        zip(
            ("one.tar/d/k2.png", *(f"photos/{places[place]}" for place in (1, 3, 5))),
            reasons,
            strict=True,
        )
    )
    assert all(
        (row["class"] == row["probability_5"] == "") == (row["image"] in bad) for row in rows
    )
    assert (
        len(
            {
                row["class"] + row["probability"]
                for row in rows
                if row["image"] not in bad and rows.index(row) < 9
            }
        )
        == 1
    )
    assert len(rows) == 9 + 72 and "81 images; 4 of them do not decode" in capsys.readouterr().out

    table = pq.read_table("features.parquet")
    assert (
        table["image"].to_pylist() == [row["image"] for row in rows]
        and len(table.schema.names) == 3
    )
    assert [each is None for each in table["features"].to_pylist()] == [
        row["image"] in bad for row in rows
    ]
    with torch.no_grad():
        expected = pooled_features(model_of(folder), normalized(folder, shapes)[0])
    np.testing.assert_allclose(
        np.array(table["features"].to_pylist()[9:]), expected, rtol=1e-4, atol=1e-5
    )

    assert (
        main(["predict", str(folder), "one.tar", "photos", "any.dat", "--out", "out.parquet"]) == 0
    )
    same = [
        {name: "" if value is None else str(value) for name, value in row.items()}
        for row in pq.read_table("out.parquet").to_pylist()
    ]
    assert same == rows[:9]


def test_an_error_on_the_way_and_ctrl_c_leave_what_was_there(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    out, spoilt = tmp_path / "out.csv", Path(shutil.copytree(shapes, tmp_path / "spoilt"))
    out.write_text("of before")
    shard = load_manifest(shapes).splits["val"].shards[-1]
    (spoilt / shard.index_file).write_bytes(b"damaged")
    assert main(["predict", str(folder), str(shapes), str(spoilt), "--out", str(out)]) == 1
    monkeypatch.setattr(room.Predictor, "answer", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        main(["predict", str(folder), f"{shapes}-images", "--out", str(out)])
    assert out.read_text() == "of before" and not list(tmp_path.glob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # stock webdataset does not close its files
def test_the_blocks_of_the_python_page_run(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    for name, place in (("data/mine", shapes), ("runs/mine", folder)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(place)
    (tmp_path / "photo.jpg").write_bytes(encoded(picture(seed=3)))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs" / "python.md").read_text(), re.DOTALL
    )
    assert all(len([line for line in block.splitlines() if line]) <= 10 for block in blocks)
    blocks = [block for block in blocks if not re.search("import light|from light", block)]
    assert len(blocks) == 8  # tests/pretrain/data/test_other_trainers.py runs the other examples
    printed = []
    for block in blocks:
        exec(block, {})
        printed.append(capsys.readouterr().out)
    assert (
        all(printed)
        and printed[0].startswith("240 (3, 16, 16) ")
        and "(64, 3, 16, 16)" in printed[0]
    )
    assert printed[2].startswith("(16, 16, 3) uint8 ") and printed[7].endswith("(2, 24)\n")
    row = predict(tmp_path / "out.csv", "runs/mine", "photo.jpg")[0]
    assert [line.split()[0] for line in printed[7].splitlines()[:3]] == [
        row["class"],
        row["class_2"],
        row["class_3"],
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"RANK": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NTASKS": "8",
            "SLURM_CPUS_PER_TASK": "1",
        },
    ],
    ids=str,
)
def test_weights_are_read_without_other_ranks_whatever_a_launcher_has_set(
    variables: dict[str, str], folder: Path, shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """In a notebook or a batch script with several tasks, only some launcher variables are set, and
    MASTER_ADDR is not."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Checkpoint.open(folder).directory == folder
    assert room.Predictor.open(folder).card.image_size == 16
    out = tmp_path / "out.csv"
    assert main(["predict", str(folder), str(shapes), "--split", "val", "--out", str(out)]) == 0
    assert out.exists() == (variables.get("RANK") != "1")  # one rank of several writes
