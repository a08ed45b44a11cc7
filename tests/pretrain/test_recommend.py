"""The configs of `pretrain recommend` are valid for any data and machine. A user's edits stay, and
mistakes are one-line errors."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep.manifest import Split, load_manifest
from data_prep.settings import load_settings, parse_yaml, validate
from finetune.probe.config import ProbeSettings
from finetune.tune.config import TuneSettings
from pretrain.checkpoints.run import steps_of
from pretrain.cli import main
from pretrain.config import PretrainSettings, check_against_ranks
from pretrain.data.datasets import check_against_data, fit_warmup, load_training_data
from pretrain.models.spec import MlpSpec
from pretrain.recommend import recipe
from pretrain.recommend.look import Data, Machine, Pictures
from tests.conftest import Capture, Patch
from tests.data_prep.samples import encoded, picture, webp, write_files
from tests.data_prep.stock import web
from tests.errors import printed_errors
from tests.pretrain.checkpoints.tiny import card_of

pytestmark = pytest.mark.processes  # `data_prep build` starts processes
MLP = MlpSpec(kind="mlp", depth=1, width=12)


def of_size(shapes: Path, count: int, *, judged: str | None = "val") -> Data:
    """Return the data as if its training split had `count` images."""
    manifest = load_manifest(shapes)
    train = manifest.splits["train"]
    shard = train.shards[0].model_copy(update={"num_samples": count})
    splits = {
        "train": Split(shards=(shard,), class_counts=(count,)),
        judged or "val": manifest.splits["val"],
    }
    return Data(shapes, manifest.model_copy(update={"splits": splits}), "train", judged)


@pytest.mark.parametrize("num_gpus", [0, 1, 3, 8])
@pytest.mark.parametrize("count", [2, 9, 60, 600, 5_000, 60_000, 500_000, 14_000_000])
def test_choices_are_a_good_config_whatever_the_data_and_the_machine(
    shapes: Path, count: int, num_gpus: int
) -> None:
    machine = Machine(4, 16.0, ("GPU",) * num_gpus)
    for judged in ("val", None):
        values = recipe.pretraining(of_size(shapes, count, judged=judged), machine, name="x")
        settings = validate(PretrainSettings, parse_yaml(reasoned("train", values), Path("x.yaml")))
        local = check_against_ranks(
            settings.train,
            settings.augment,
            num_ranks=recipe.num_ranks(machine, batch=values["batch"]),
        )
        assert local >= 2 and settings.train.global_batch_size <= count
        assert recipe.num_ranks(machine, batch=values["batch"]) <= max(1, num_gpus)
        data = load_training_data(settings.data)
        larger = replace(data.parts[0], manifest=of_size(shapes, count).manifest)
        data = replace(data, parts=(larger,))
        check_against_data(data, settings)
        assert steps_of(settings, data) >= 10
    values = recipe.tuning(
        of_size(shapes, count, judged="test"), name="x", pretrained="w: #1", card=card_of(MLP)
    )
    tuned = validate(TuneSettings, parse_yaml(reasoned("tune", values), Path("x.yaml")))
    probed = validate(ProbeSettings, parse_yaml(reasoned("probe", values), Path("x.yaml")))
    assert (tuned.data.dataset, probed.data.test_split, probed.pretrained) == (
        str(shapes),
        "test",
        "w: #1",
    )
    pretraining = recipe.pretraining(of_size(shapes, count, judged="test"), machine, name="x")
    settings = validate(
        PretrainSettings, parse_yaml(reasoned("train", pretraining), Path("x.yaml"))
    )
    # no checkpoint is chosen on a test split
    assert tuned.checkpoint.keep_best is settings.checkpoint.keep_best is False


def reasoned(template: str, values: dict[str, object]) -> str:
    """Return the config, after checking that every setting has a reason in an aligned comment."""
    config = recipe.render(template, values)
    settings = [line for line in config.splitlines() if not line.endswith(":")]
    assert len({line.rindex("  # ") for line in settings if "w: #1" not in line}) == 1
    assert all(len(line.rpartition("  # ")[2]) > 5 for line in settings) and "{" not in config
    return config


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder of JPEG, PNG and WebP in several sizes, nested, without splits, with a damaged image
    and a text file."""
    files = {"cat/broken.jpg": encoded(picture(seed=99))[:200], "dog/notes.txt": b"mine"}
    for number in range(60):
        image = picture(seed=number, width=40 + 3 * number, height=70)
        name = f"{('cat', 'dog')[number % 2]}/{'trip/' * (number % 5 == 0)}{number}"
        kind = ("jpg", "png", "webp")[number % 3]
        files[f"{name}.{kind}"] = (
            webp(image) if kind == "webp" else encoded(image, {"jpg": "JPEG", "png": "PNG"}[kind])
        )
    write_files(tmp_path / "my photos", files)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my photos"


def test_pictures_become_a_dataset_and_a_config_that_stays_as_it_is_edited(
    photos: Path, capfd: Capture
) -> None:
    words = ["recommend", "my photos", "--no-timing"]
    assert main(words) == 0
    said = capfd.readouterr().out
    [build] = re.findall(r"^\$ (data_prep build .*)$", said, re.MULTILINE)
    assert "source.path=my photos" in shlex.split(build) and "image_size=64" in build
    assert (
        "read 61 = written 60 + rejected 1" in said
        and ".txt files 1" in said
        and "held out as val: 6 images " in said
    )
    assert said.splitlines()[-1] == "next: pretrain train runs/my-photos.yaml"
    config = Path("runs/my-photos.yaml")
    settings = load_settings(PretrainSettings, path=config, overrides=[])
    data = load_training_data(settings.data)
    assert (data.num_samples, settings.data.dataset, settings.run_dir) == (
        54,
        "data/my-photos",
        "runs/my-photos",
    )
    check_against_data(data, settings)
    # one epoch is shorter than its warm-up
    one = load_settings(PretrainSettings, path=config, overrides=["epochs=1"])
    check_against_data(data, one)

    before = config.read_bytes()
    assert main(words) == 0  # the same command again
    assert (
        "runs/my-photos.yaml: unchanged\nnext: pretrain train runs/my-photos.yaml\n"
        in capfd.readouterr().out
    )
    config.write_text(config.read_text().replace("100 epochs", "7 epochs"))
    edited = config.read_bytes()
    # the dataset replaces the images
    assert main(["recommend", "data/my-photos", "--no-timing"]) == 0
    assert "(train.duration: 7 epochs, was 100 epochs)" in capfd.readouterr().out
    assert config.read_bytes() == edited != before
    assert main(["recommend", "data/my-photos", "--no-timing", "--overwrite"]) == 0
    assert config.read_bytes() == before


def test_a_dataset_behind_a_url_is_taken_as_train_takes_it(
    shapes: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with web(shapes.parent) as (address, _):
        url = f"{address}/{shapes.name}"
        assert main(["recommend", url, "--no-timing"]) == 0
        settings = load_settings(PretrainSettings, path=f"runs/{shapes.name}.yaml", overrides=[])
        assert settings.data.dataset == url and load_training_data(settings.data).num_samples == 240
        assert main(["recommend", f"{url}?token=word", "--name", "x", "--no-timing"]) == 2


def test_weights_are_tuned_or_probed_in_the_place_of_a_pretraining(
    shapes: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    from tests.finetune.tiny import write_folder  # imports torch

    monkeypatch.chdir(tmp_path)
    write_folder(Path("weights"))
    write_files(
        Path("pics"),
        {f"{number % 2}/{number}.png": encoded(picture(seed=number), "PNG") for number in range(8)},
    )
    names = (
        (str(shapes), ["--no-timing"], "tune", f"{shapes.name}-tuned"),
        ("pics", ["--no-timing"], "tune", "pics-tuned"),
        ("pics", ["--no-timing", "--name", "y"], "tune", "y"),
        (str(shapes), ["--probe", "--name", "x"], "probe", "x"),
    )
    for place, flags, verb, name in names:
        assert main(["recommend", place, "--from", "weights", *flags]) == 0
        said = capsys.readouterr().out
        assert (
            said.splitlines()[-1] == f"next: finetune {verb} runs/{name}.yaml"
            and "58.1" not in said
        )
        how = (
            r"# expected  [\d,]+ images/s and [\d.]+ GB of RAM in \d+ steps of a tuning timed on this machine.*:"
            r" about \d+ s for the features"
        )
        assert (re.search(how, Path(f"runs/{name}.yaml").read_text()) is not None) == (
            verb == "probe"
        )
        schema = TuneSettings if verb == "tune" else ProbeSettings
        settings = load_settings(schema, path=f"runs/{name}.yaml", overrides=[])
        assert (settings.pretrained, settings.run_dir) == ("weights", f"runs/{name}")
    assert Path("data/pics/manifest.json").exists() and Path("data/y/manifest.json").exists()
    assert main(["recommend", str(shapes), "--name", "x", "--no-timing"]) == 2
    assert printed_errors(capsys.readouterr().err) == [("--name", "bad-value")]


def test_a_flat_folder_has_its_table_and_a_refusal_of_the_build_ends_the_start(
    tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(
        tmp_path / "flat", {f"{number}.jpg": encoded(picture(seed=number)) for number in range(8)}
    )
    Path("flat/t.csv").write_text(
        "id,class\n" + "".join(f"{number},{'ab'[number % 2]}\n" for number in range(8))
    )
    assert main(["recommend", "flat", "--no-timing"]) == 2
    said = capfd.readouterr().err
    assert printed_errors(said) == [("flat", "unknown-format")] and "--labels flat/t.csv" in said
    assert main(["recommend", "flat", "--labels", "none.csv", "--no-timing"]) == 2
    said = capfd.readouterr().err
    assert printed_errors(said) == [("source.labels", "missing-path")]
    assert not Path("data/flat/manifest.json").exists()
    assert (
        main(["recommend", "flat", "--labels", "flat/t.csv", "--image-size", "16", "--no-timing"])
        == 0
    )
    manifest = load_manifest("data/flat")
    assert (manifest.classes, manifest.image_size) == (("a", "b"), 16)


def test_a_name_is_fetched_and_built(tmp_path: Path, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # no network
    assert main(["recommend", "digits", "--no-timing"]) == 0
    assert load_manifest("data/digits").splits["test"].num_samples == 899
    assert main(["recommend", "cifar10", "--name", "mine", "--no-timing"]) == 1
    said = capfd.readouterr()
    assert "next: pretrain train runs/digits.yaml" in said.out
    assert printed_errors(said.err)[0][1] == "unreachable"


@pytest.mark.parametrize(
    ("warmup", "num_steps", "fitted"),
    [(0, 9, 0), (8, 9, 8), (9, 9, 0), (40, 20, 2), (10**9, 2000, 200)],
)
def test_a_warmup_that_is_no_shorter_than_the_run_becomes_a_tenth_of_it(
    warmup: int, num_steps: int, fitted: int
) -> None:
    assert fit_warmup(warmup, num_steps=num_steps) == fitted


def test_small_pictures_are_stored_small() -> None:
    assert (
        recipe.image_size(Pictures(9, 0, 28, 28))[0] == 32
        and recipe.image_size(Pictures(9, 0, 48, 500))[0] == 64
    )
