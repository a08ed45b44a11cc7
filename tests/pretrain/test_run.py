"""Whose a run directory is."""

from pathlib import Path

import pytest
import yaml

from data_prep.settings import SettingsError, dump, validate
from pretrain.config import PretrainSettings
from pretrain.run import CONFIG_FILE, check_settings


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
