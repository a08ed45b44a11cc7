"""Strict settings: YAML without the surprises of 1.1, overrides, and for every mistake one line
that names the field as the user wrote it, the value and the remedy. Nothing heavy is imported on
the way.
"""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from data_prep.build.config import BuildSettings
from data_prep.cli import main
from data_prep.errors import SettingsError
from data_prep.settings import Settings, dump, in_yaml, load_settings, read_yaml, validate


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


def complaint(tree: dict[str, Any], schema: type[Settings] = Outer) -> str:
    with pytest.raises(SettingsError) as caught:
        validate(schema, tree)
    return str(caught.value)


# ---- YAML
# -------------------------------------------------------------------------------------------------------


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
    assert complaint(tree).startswith("inner.lr: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "the key 'a' stands twice"),
        ("outer: {b: 1, c: 2, b: 3}\n", "the key 'b' stands twice"),
        ("1: 2\n", "the key 1 is not text"),
        ("a: [1\n", "not valid YAML"),
        ("a: b: c\n", "not valid YAML"),
        ("- 1\n- 2\n", "a config is a mapping of sections, but this is a list"),
        ("!!python/object/apply:os.system [true]\n", "not valid YAML"),
    ],
)
def test_what_is_no_mapping_of_single_text_keys_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'}: ")
    assert "\n" not in str(caught.value)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing yet\n") == {}


def test_a_mistyped_file_name_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "demo_pretrain.yaml").write_text("")
    with pytest.raises(
        SettingsError, match=r"no such config file; did you mean .*demo_pretrain\.yaml\?"
    ):
        read_yaml(tmp_path / "demo_pertrain.yaml")
    with pytest.raises(SettingsError, match=r"no such config file; name a YAML file$"):
        read_yaml(tmp_path / "nowhere" / "x.yaml")


def test_a_file_that_is_not_text_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(SettingsError, match="cannot be read as a text file"):
        read_yaml(tmp_path / "picture.yaml")


# ---- overrides
# --------------------------------------------------------------------------------------------------


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
    ("override", "message"),
    [
        ("steps", "write it as key.path=value"),
        ("=3", "write it as key.path=value"),
        ("inner..lr=3", "write it as key.path=value"),
        ("steps.deep=3", "steps is the value 5, not a section"),
        ("name=[1", "is not valid YAML; quote it"),
    ],
)
def test_an_override_that_is_none_is_refused(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text("steps: 5\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(Outer, path=tmp_path / "config.yaml", overrides=[override])
    assert str(caught.value).startswith(f"override {override!r}: ")
    assert message in str(caught.value)


def test_dumped_settings_read_back_as_the_same_ones(tmp_path: Path) -> None:
    settings = Outer(name="off", steps=3, mixup="off", inner=Inner(lr=1e-7, betas=(0.9, 1.0)))
    (tmp_path / "config.yaml").write_text(dump(settings))
    assert load_settings(Outer, path=tmp_path / "config.yaml", overrides=[]) == settings


# ---- messages
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"step": 3}, "step: unknown key; did you mean 'steps'?"),
        ({"inner": {"lrr": 3}}, "inner.lrr: unknown key; did you mean 'lr'?"),
        ({"zzz": 3}, "zzz: unknown key; known: inner, mixup, name, steps"),
        ({"steps": "3"}, "steps: '3' will not do; a whole number is needed"),
        ({"steps": 3.5}, "steps: 3.5 will not do; a whole number is needed"),
        ({"steps": True}, "steps: True will not do; a whole number is needed"),
        ({"name": 3}, "name: 3 will not do; text is needed (quote it if it looks like a number)"),
        ({"inner": {"lr": -1.0}}, "inner.lr: -1.0 will not do; it must be greater than 0"),
        ({"inner": 3}, "inner: 3 will not do; a section (key: value lines) is needed"),
        ({"mixup": "of"}, "mixup: 'of' is not one of its values; did you mean 'off'?"),
    ],
)
def test_a_mistake_is_one_line_with_field_value_and_remedy(
    tree: dict[str, Any], message: str
) -> None:
    assert complaint(tree) == message


def test_every_mistake_is_named_at_once() -> None:
    assert complaint({"step": 1, "inner": {"lr": 0.0}, "name": None}).splitlines() == [
        "name: null will not do; text is needed (quote it if it looks like a number)",
        "inner.lr: 0.0 will not do; it must be greater than 0",
        "step: unknown key; did you mean 'steps'?",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "synthetic", "num_clases": 3}, "source.num_clases: unknown key; did you mean 'num_classes'?"),
        ({"kind": "synthetic", "num_classes": 49}, "source.num_classes: 49 will not do; it must be less than or equal to 48"),
        ({"kind": "folder"}, "source.path: missing; set it in the config or as source.path=VALUE"),
        (
            {"kind": "folder", "path": "x", "nam_classes": 3},
            "source.nam_classes: unknown key; known: columns, kind, labels, path, seed, val_share",
        ),
        ({"kind": "foldr"}, "source.kind: 'foldr' is not one of its values; did you mean 'folder'?"),
        ({"path": "x"}, "source.kind: missing; set it"),
    ],
)  # fmt: skip
def test_a_mistake_inside_a_choice_of_sections_names_the_path_that_the_user_wrote(
    source: dict[str, Any], message: str
) -> None:
    assert complaint({"out": "data/x", "source": source}, BuildSettings) == message


def test_settings_cannot_be_changed_once_they_are_valid() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().steps = 3  # type: ignore[misc]


# ---- the command line
# -------------------------------------------------------------------------------------------


def test_show_prints_settings_that_build_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "data" / "shapes")
    assert (
        main(
            [
                "build",
                "--source",
                "synthetic",
                "--out",
                out,
                "--show",
                "image_size=32",
                "num_workers=3",
            ]
        )
        == 0
    )
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
        ["source.kind=synthetic", "seed=5", "--show", "out=x"],
        [str(tmp_path / "config.yaml"), "--show"],
        ["--out", "x", "--show", str(tmp_path / "config.yaml"), "seed=5"],
    ):
        assert main(["build", *words]) == 0
        assert "seed: 5\n" in capsys.readouterr().out
