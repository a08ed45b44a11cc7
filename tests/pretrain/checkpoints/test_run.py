"""Whose a run directory is."""

import shutil
from pathlib import Path

import pytest
import yaml

from data_prep.settings import SettingsError, dump, validate
from pretrain.checkpoints.run import CONFIG_FILE, check_settings
from pretrain.config import PretrainSettings
from tests.data_prep.samples import change_manifest


def settings_with(**model: object) -> PretrainSettings:
    tree = {"run_dir": "r", "data": {"dataset": "d"}, "train": {"duration": "1 epochs"}}
    return validate(PretrainSettings, tree | {"model": {"kind": "mlp", **model}})


def test_a_run_goes_on_under_a_version_that_has_more_settings(tmp_path: Path) -> None:
    stored = yaml.safe_load(dump(settings_with()))
    for new in ("norm", "activation", "activation_first", "dropout"):
        del stored["model"][new]
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(stored))
    check_settings(tmp_path, settings_with())
    with pytest.raises(SettingsError, match=r"other settings \(model.norm: batch, was layer\)"):
        check_settings(tmp_path, settings_with(norm="batch"))


def test_a_setting_that_is_gone_is_named(tmp_path: Path) -> None:
    stored = yaml.safe_load(dump(settings_with()))
    stored["model"]["bygone"] = 1
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(stored))
    with pytest.raises(SettingsError, match=r"other settings \(model.bygone: None, was 1\)"):
        check_settings(tmp_path, settings_with())


def test_a_run_goes_on_where_the_same_pictures_lie_now(shapes: Path, other_shapes: Path, tmp_path: Path) -> None:
    """The order, and with it the run, was that of a place: the same bytes elsewhere were refused."""

    def on(dataset: Path, *also: Path) -> PretrainSettings:
        data = {"dataset": str(dataset), "also": [{"dataset": str(each)} for each in also]}
        tree = {"run_dir": str(tmp_path), "data": data, "train": {"duration": "1 epochs"}, "model": {"kind": "mlp"}}
        return validate(PretrainSettings, tree)

    copy, squashed = (Path(shutil.copytree(shapes, tmp_path / name)) for name in ("copy", "squashed"))
    change_manifest(copy, lambda manifest: manifest.update(name="other", tool_version="later", decoder="other"))
    change_manifest(squashed, lambda manifest: manifest.update(crop="squash"))
    for begun, others in (
        ((shapes,), [(other_shapes,), (squashed,), (tmp_path / "gone",)]),
        ((shapes, shapes), [(shapes,)]),
    ):
        (tmp_path / CONFIG_FILE).write_text(dump(on(*begun)))
        check_settings(tmp_path, on(*(copy for _ in begun)))
        for other in others:
            with pytest.raises(SettingsError, match=r"belongs to a run with other settings \(data\."):
                check_settings(tmp_path, on(*other))
