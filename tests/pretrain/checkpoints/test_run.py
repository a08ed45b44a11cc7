"""The owner of a run directory."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.errors import UserError
from data_prep.settings import Settings, dump, validate
from finetune.evaluate.config import EvaluateSettings
from finetune.probe.config import KnnSettings, ProbeSettings
from finetune.tune.config import TuneSettings
from pretrain.checkpoints.run import (
    CONFIG_FILE,
    MAY_CHANGE,
    PLACES,
    begun_with,
    check_settings,
    checkpoint_at,
    claim,
    finished_result,
    is_output,
    load_run_settings,
)
from pretrain.config import PretrainSettings
from pretrain.ranks.settings import RanksSettings
from pretrain.tracking.tracker import RunIdentity
from tests.data_prep.samples import change_manifest
from tests.errors import fails


def settings_with(**model: object) -> PretrainSettings:
    tree = {"run_dir": "r", "data": {"dataset": "d"}, "train": {"duration": "1 epochs"}}
    return validate(PretrainSettings, tree | {"model": {"kind": "mlp", **model}})


@contextmanager
def another_run(words: str) -> Iterator[None]:
    """Expect that the directory belongs to another run. `words`: the difference."""
    with fails("exists", "run_dir") as caught:
        yield
    assert words in caught.value.problem


@pytest.fixture(autouse=True)
def first_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint directory: without one, a run directory accepts other settings."""
    path = tmp_path / "checkpoints" / "step-00000001"
    path.mkdir(parents=True)
    return path


def test_a_run_goes_on_under_a_version_that_has_more_settings(tmp_path: Path) -> None:
    stored = yaml.safe_load(dump(settings_with()))
    for new in ("norm", "activation", "activation_first", "dropout"):
        del stored["model"][new]
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(stored))
    check_settings(tmp_path, settings_with())
    with another_run("model.norm: batch, was layer"):
        check_settings(tmp_path, settings_with(norm="batch"))


def test_a_removed_setting_is_ignored_if_it_had_its_default(tmp_path: Path) -> None:
    for section, name, value, is_ignored in (
        ("model", "bygone", 1, False),
        ("engine", "cuda_graphs", True, False),
        ("engine", "cuda_graphs", False, True),
    ):
        stored = yaml.safe_load(dump(settings_with()))
        stored[section][name] = value
        (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(stored))
        error = another_run(f"{section}.{name}: None, was {value}")
        with nullcontext() if is_ignored else error:
            check_settings(tmp_path, settings_with())
    assert load_run_settings(PretrainSettings, path=str(tmp_path), overrides=[])


def test_a_run_goes_on_where_the_same_pictures_lie_now(
    shapes: Path, other_shapes: Path, tmp_path: Path
) -> None:
    """The same images in another directory give the same order and continue the run."""

    def on(dataset: Path, *also: Path) -> PretrainSettings:
        data = {
            "dataset": str(dataset),
            "extra_datasets": [{"dataset": str(each)} for each in also],
        }
        tree = {
            "run_dir": str(tmp_path),
            "data": data,
            "train": {"duration": "1 epochs"},
            "model": {"kind": "mlp"},
        }
        return validate(PretrainSettings, tree)

    copy, squashed = (
        Path(shutil.copytree(shapes, tmp_path / name)) for name in ("copy", "squashed")
    )
    change_manifest(
        copy, lambda manifest: manifest.update(name="other", tool_version="later", decoder="other")
    )
    change_manifest(squashed, lambda manifest: manifest.update(crop="squash"))
    for begun, others in (
        ((shapes,), [(other_shapes,), (squashed,), (tmp_path / "gone",)]),
        ((shapes, shapes), [(shapes,)]),
    ):
        (tmp_path / CONFIG_FILE).write_text(dump(on(*begun)))
        check_settings(tmp_path, on(*(copy for _ in begun)))
        for other in others:
            with another_run("data."):
                check_settings(tmp_path, on(*other))


def test_a_run_that_ended_before_its_first_checkpoint_leaves_its_place_to_other_settings(
    tmp_path: Path, first_checkpoint: Path
) -> None:
    with claim(tmp_path, settings_with(), ranks=RanksSettings()):
        mine = RunIdentity.of(tmp_path, experiment="e", uri=None)
    with another_run("model.depth"):
        check_settings(tmp_path, settings_with(depth=3))
    first_checkpoint.rename(tmp_path / "elsewhere")
    for depth, is_same in ((6, True), (3, False)):
        assert check_settings(tmp_path, settings_with(depth=depth)) is is_same
        with claim(tmp_path, settings_with(depth=depth), ranks=RanksSettings()):
            assert (RunIdentity.known(tmp_path) == mine) is is_same
        assert f"depth: {depth}" in (tmp_path / CONFIG_FILE).read_text()
    repetition = tmp_path / "seed-0" / "checkpoints" / "step-00000001"
    repetition.mkdir(parents=True)
    with another_run("model.depth"):
        check_settings(tmp_path, settings_with())


@pytest.mark.parametrize("place", ["r", "./r/", "{here}/r", "renamed"])
def test_a_run_is_found_by_any_spelling_of_its_place_and_resumes_with_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_checkpoint: Path, place: str
) -> None:
    """The place of a run is not a setting. `train RUN` needs none of its original overrides."""
    begun, place = settings_with(depth=3), place.format(here=tmp_path)
    run = Path(
        shutil.copytree(first_checkpoint.parents[1], tmp_path / ".." / f"{tmp_path.name}-run")
    )
    monkeypatch.chdir(run.rename(tmp_path / Path(place).name).parent)
    (Path(place) / CONFIG_FILE).write_text(dump(begun))
    assert check_settings(Path(place), begun.model_copy(update={"run_dir": place}))
    resumed = load_run_settings(PretrainSettings, path=place, overrides=["epochs=20"])
    assert (Path(resumed.run_dir), resumed.model, resumed.train.duration) == (
        Path(place),
        begun.model,
        "20 epochs",
    )
    assert check_settings(Path(place), resumed)
    with another_run("model.depth: 4, was 3"):
        check_settings(
            Path(place),
            load_run_settings(PretrainSettings, path=place, overrides=["model.depth=4"]),
        )
    with fails("unreadable", str(Path(place))):
        load_run_settings(TuneSettings, path=place, overrides=[])


DAMAGES = {"cut": b'{"a": [', "bytes": b"\xff\xfe", "empty": b"", "a list": b"[]"}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["config.yaml", "result.json", "record.json", "tracking/identity.json"]
)
def test_a_damaged_record_of_a_run_is_named_with_the_remedy(
    tmp_path: Path, first_checkpoint: Path, name: str, damage: str
) -> None:
    """The user sees one line instead of a traceback. A config without a checkpoint is replaced."""
    (tmp_path / CONFIG_FILE).write_text(dump(settings_with()))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(DAMAGES[damage])
    readers = {
        "config.yaml": lambda: check_settings(tmp_path, settings_with()),
        "result.json": lambda: finished_result(tmp_path),
    }
    readers |= {
        "record.json": lambda: begun_with(tmp_path),
        "tracking/identity.json": lambda: RunIdentity.known(tmp_path),
    }
    with pytest.raises(UserError, match=f"{path}: ") as found:
        readers[name]()
    assert "\n" not in str(found.value)
    if name == "config.yaml":
        first_checkpoint.rename(tmp_path / "elsewhere")
        assert not check_settings(tmp_path, settings_with())
        assert finished_result(tmp_path, settings_with()) is None


def test_the_run_of_another_verb_and_a_dataset_are_named_as_such(
    tmp_path: Path, shapes: Path
) -> None:
    (tmp_path / CONFIG_FILE).write_text("pretrained: runs/m\nneighbors: [3]\n")
    with another_run("is a run of finetune knn"):
        check_settings(tmp_path, settings_with())
    with another_run("is a dataset"):
        check_settings(shapes, settings_with())


def test_what_may_change_is_a_setting_of_some_command() -> None:
    def names(schema: type[Settings], key: str) -> bool:
        name, _, rest = key.partition(".")
        field = schema.model_fields.get(name)
        inner = field.annotation if field is not None else None
        return bool(field) and (
            not rest
            or (isinstance(inner, type) and issubclass(inner, Settings) and names(inner, rest))
        )

    schemas = (PretrainSettings, TuneSettings, ProbeSettings, KnnSettings, EvaluateSettings)
    assert [
        key for key in (*MAY_CHANGE, *PLACES) if not any(names(schema, key) for schema in schemas)
    ] == []


def test_an_output_is_known_by_its_record_and_is_alone_in_its_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def is_there(**wanted: object) -> bool:
        return is_output(out, wanted, record="made.json", key="of", kind="an export")

    assert not is_there(a=1)
    out.mkdir()
    assert not is_there(a=1)
    (out / "thesis.tex").touch()
    with fails("exists", "out"):
        is_there(a=1)
    (out / "made.json").write_text('{"of": {"a": 1, "b": {"c": 2}}}')
    assert is_there(a=1, b={"c": 2})
    with fails("exists", "out") as caught:
        is_there(a=1, b={"c": 3})
    assert "(b.c: 3, was 2)" in caught.value.problem
    (out / "made.json").write_text("{")
    with fails("damaged", str(out / "made.json")):
        is_there(a=1)


def test_an_evaluation_is_known_by_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_checkpoint: Path
) -> None:
    asked: Any = None  # settings do not matter
    record, facts = tmp_path / "evaluation.json", {"num_views": 2}
    assert not check_settings(tmp_path, asked, facts)
    record.write_text("{")
    with fails("damaged", str(record)):
        check_settings(tmp_path, asked, facts)
    record.write_text(json.dumps(facts))
    with fails("exists", "run_dir") as caught:
        check_settings(tmp_path, asked, {"num_views": 3})
    assert "num_views: 3, was 2" in caught.value.problem
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        with fails("no-access", "run_dir"):
            check_settings(tmp_path, asked, facts)
        (tmp_path / "result.json").write_text("{}")
        assert check_settings(tmp_path, asked, facts)  # finished, so it is only read
    record.unlink()
    (tmp_path / CONFIG_FILE).touch()
    with another_run("is not an evaluation"):
        check_settings(tmp_path, asked, facts)


def test_a_run_that_does_not_train_has_no_checkpoint_of_a_length(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("pretrained: runs/m\nneighbors: [3]\n")
    assert checkpoint_at(f"{tmp_path}@5epochs") is None


def test_a_checkpoint_that_is_in_the_remote_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{checkpoint: {remote: 's3://bucket/run'}, train: {}}\n")
    with fails("missing-path", f"{tmp_path}@5steps") as caught:
        checkpoint_at(f"{tmp_path}@5steps")
    assert "s3://bucket/run/checkpoints/step-00000005" in caught.value.fix
