"""Strict settings: YAML without the surprises of 1.1, overrides, and errors that name the field as
the user wrote it."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from data_prep.build.config import BuildSettings
from data_prep.cli import main
from data_prep.errors import Code, SettingsError, UserError
from data_prep.settings import Settings, dump, in_yaml, load_settings, read_yaml, validate
from tests.errors import fails


class Inner(Settings):
    lr: float = Field(0.1, gt=0)
    betas: tuple[float, float] | None = None


class Outer(Settings):
    name: str = "run"
    steps: int = 10
    mixup: Literal["off", "soft"] = "soft"
    inner: Inner = Inner()


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "config.yaml").write_text(text)
    return read_yaml(tmp_path / "config.yaml")


def errors_of(tree: dict[str, Any], schema: type[Settings] = Outer) -> list[tuple[str, str]]:
    with pytest.raises(SettingsError) as caught:
        validate(schema, tree)
    assert len(str(caught.value).splitlines()) == 1 + len(caught.value.others)
    return [(each.field, each.code) for each in (caught.value, *caught.value.others)]


# ---- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("2E5", 200_000.0),
        ("1.5e+2", 150.0),
        (".5", 0.5),
        ("-1e-3", -0.001),
        ("1.", 1.0),
        ("12", 12),
        ("-7", -7),
        ("1e", "1e"),
        ("1e-3x", "1e-3x"),
        ("1.2.3", "1.2.3"),
        ("off", "off"),
        ("010", 10),
        ("-09", -9),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000_", 1000),
        ("1:30", "1:30"),
        ("0b11", "0b11"),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("n", "n"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("2024-01-02", "2024-01-02"),
        ("'12'", "12"),
        ("[1, 2e-1]", [1, 0.2]),
        ("~/runs", str(Path.home() / "runs")),
        ("a~/b", "a~/b"),
        ("~", None),
    ],
)
def test_scalars_are_read_as_people_mean_them(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, f"key: {text}\n")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "a: b",
        "1e3",
        "010",
        "1:30",
        "on",
        "true",
        "a #b",
        "x y",
        "",
        "12",
        "[a]",
        "- a",
        "a, b",
        "é",
        0.1,
        3e-5,
    ],
)
def test_a_value_is_written_as_it_is_read(tmp_path: Path, value: str | float) -> None:
    assert read(tmp_path, f"key: {in_yaml(value)}  # why: so\n") == {"key": value}
    assert read(tmp_path, f"key: {in_yaml([value, value])}\n") == {"key": [value, value]}
    assert not isinstance(value, str) or read(tmp_path, dump(Outer(name=value)))["name"] == value


def test_infinity_is_read_and_refused_by_field(tmp_path: Path) -> None:
    tree = read(tmp_path, "inner: {lr: .inf}\n")
    assert tree["inner"]["lr"] == math.inf
    assert errors_of(tree) == [("inner.lr", "bad-value")]


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2\n",
        "outer: {b: 1, c: 2, b: 3}\n",
        "1: 2\n",
        "a: [1\n",
        "a: b: c\n",
        "- 1\n- 2\n",
        "!!python/object/apply:os.system [true]\n",
    ],
)
def test_a_file_must_be_a_mapping_with_single_text_keys(tmp_path: Path, text: str) -> None:
    with fails("bad-syntax", f"{tmp_path / 'config.yaml'}") as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing yet\n") == {}


def test_a_mistyped_file_name_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "demo_pretrain.yaml").write_text("")
    with fails("missing-path", f"{tmp_path / 'demo_pertrain.yaml'}") as caught:
        read_yaml(tmp_path / "demo_pertrain.yaml")
    assert "demo_pretrain.yaml" in caught.value.fix
    with fails("missing-path"):
        read_yaml(tmp_path / "nowhere" / "x.yaml")


def test_a_file_that_is_not_text_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xd8\xff\xe0")
    with fails("unreadable", f"{tmp_path / 'picture.yaml'}"):
        read_yaml(tmp_path / "picture.yaml")


# ---- overrides


def test_overrides_are_read_as_yaml_and_the_last_one_counts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 5\ninner: {lr: 1e-2}\n")
    overrides = [
        "inner.lr=1e-3",
        "inner.betas=[0.9, 0.99]",
        "mixup=off",
        "name=a=b",
        "steps=6",
        "steps=7",
    ]
    settings = load_settings(Outer, path=tmp_path / "config.yaml", overrides=overrides)
    assert settings == Outer(
        name="a=b", steps=7, mixup="off", inner=Inner(lr=0.001, betas=(0.9, 0.99))
    )


@pytest.mark.parametrize(
    ("override", "field", "code"),
    [
        ("steps", "steps", "bad-syntax"),
        ("=3", "=3", "bad-syntax"),
        ("inner..lr=3", "inner..lr=3", "bad-syntax"),
        ("steps.deep=3", "steps.deep", "bad-value"),
        ("name=[1", "name", "bad-syntax"),
    ],
)
def test_a_wrong_override(tmp_path: Path, override: str, field: str, code: Code) -> None:
    (tmp_path / "config.yaml").write_text("steps: 5\n")
    with fails(code, field):
        load_settings(Outer, path=tmp_path / "config.yaml", overrides=[override])


def test_dumped_settings_read_back_as_the_same_ones(tmp_path: Path) -> None:
    settings = Outer(name="off", steps=3, mixup="off", inner=Inner(lr=1e-7, betas=(0.9, 1.0)))
    (tmp_path / "config.yaml").write_text(dump(settings))
    assert load_settings(Outer, path=tmp_path / "config.yaml", overrides=[]) == settings


# ---- errors


@pytest.mark.parametrize(
    ("tree", "field", "code", "value_and_fix"),
    [
        ({"step": 3}, "step", "unknown-key", "'steps'"),
        ({"inner": {"lrr": 3}}, "inner.lrr", "unknown-key", "'lr'"),
        ({"zzz": 3}, "zzz", "unknown-key", "inner, mixup, name, steps"),
        ({"steps": "3"}, "steps", "bad-value", "'3' whole number"),
        ({"steps": 3.5}, "steps", "bad-value", "3.5 whole number"),
        ({"steps": True}, "steps", "bad-value", "True whole number"),
        ({"name": None}, "name", "bad-value", "null text"),
        ({"inner": {"lr": -1.0}}, "inner.lr", "bad-value", "-1.0 above 0"),
        ({"inner": {"betas": [0.1]}}, "inner.betas.1", "missing-value", ""),
        ({"inner": 3}, "inner", "bad-value", "3 section"),
        ({"mixup": "of"}, "mixup", "bad-value", "'of' 'off'"),
    ],
)
def test_an_error_has_field_value_and_fix(
    tree: dict[str, Any], field: str, code: str, value_and_fix: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        validate(Outer, tree)
    error = caught.value
    assert (error.field, error.code) == (field, code)
    value, _, fix = value_and_fix.partition(" ")
    assert value in str(error) and fix in error.fix


def test_all_mistakes_of_a_config_are_reported_together() -> None:
    assert errors_of({"step": 1, "inner": {"lr": 0.0}, "name": None}) == [
        ("name", "bad-value"),
        ("inner.lr", "bad-value"),
        ("step", "unknown-key"),
    ]


@pytest.mark.parametrize(
    ("source", "field", "code"),
    [
        ({"kind": "synthetic", "num_classes": 49}, "source.num_classes", "bad-value"),
        ({"kind": "folder", "path": "x", "nam_classes": 3}, "source.nam_classes", "unknown-key"),
        ({"path": "x"}, "source.kind", "missing-value"),
    ],
)
def test_the_field_inside_a_choice_of_sections_is_as_the_user_wrote_it(
    source: dict[str, Any], field: str, code: str
) -> None:
    assert errors_of({"out": "data/x", "source": source}, BuildSettings) == [(field, code)]


class Checked(Settings):
    low: float = 0.0
    high: float = 1.0

    @field_validator("low")
    @classmethod
    def _is_even(cls, low: float) -> float:
        if low % 2:
            raise UserError("low", "is odd", "make it even", code="bad-value")
        return low

    @model_validator(mode="after")
    def _is_ordered(self) -> "Checked":
        if self.low > self.high:
            other = UserError("", "the bounds are in the wrong order", "swap them", code="mismatch")
            raise UserError("high", "is below low", "raise it", code="conflict", others=[other])
        return self


class Holder(Settings):
    range: Checked = Checked()


def test_errors_of_validators_keep_their_code_and_get_the_path_of_their_section() -> None:
    assert errors_of({"range": {"low": 3}}, Holder) == [("range.low", "bad-value")]
    assert errors_of({"range": {"low": 2}}, Holder) == [
        ("range.high", "conflict"),
        ("range", "mismatch"),
    ]
    assert errors_of({"low": 2}, Checked) == [("high", "conflict"), ("config", "mismatch")]


def test_settings_cannot_be_changed_once_they_are_valid() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().steps = 3  # type: ignore[misc]


# ---- the command line


def test_show_prints_settings_that_build_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "data" / "shapes")
    words = ["--source=synthetic", f"--out={out}", "image_size=32", "num_workers=3"]
    assert main(["show", "build", *words]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(shown)
    settings = load_settings(BuildSettings, path=tmp_path / "shown.yaml", overrides=[])
    assert (settings.image_size, settings.num_workers, settings.out) == (32, 3, out)
    assert settings.source.images_dir == f"{out}-images"  # type: ignore[union-attr]
    assert not (tmp_path / "data").exists()


def test_overrides_may_stand_without_a_config_and_after_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("source: {kind: synthetic}\nout: x\nseed: 5\n")
    for words in (
        ["source.kind=synthetic", "seed=5", "out=x"],
        [str(tmp_path / "config.yaml")],
        ["--out", "x", str(tmp_path / "config.yaml"), "seed=5"],
    ):
        assert main(["show", "build", *words]) == 0
        assert "seed: 5\n" in capsys.readouterr().out
