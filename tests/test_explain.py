"""The help on settings for every command in the programs' parsers. No command is listed by hand."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
from pydantic import Field, TypeAdapter

from cluster.schemas import SCHEMAS
from data_prep.errors import Code, SettingsError
from data_prep.explain import (
    Explained,
    completions,
    json_schema,
    options_of,
    schema_of,
    settings_of,
)
from data_prep.settings import (
    Settings,
    apply_override,
    example_of,
    flatten,
    load_settings,
    models_of,
    parse_yaml,
    read_yaml,
    sections_of,
    tag_of,
    validate,
)
from finetune.probe.config import ProbeSettings
from pretrain.config import PretrainSettings
from tests.conftest import Capture
from tests.errors import fails
from tests.ranks import REPOSITORY
from tests.settings_page import PARSERS, _examples, command_pages

VERBS = {(name, word): verb for name in PARSERS for word, verb in PARSERS[name]().commands.items()}
CONFIGURED = {schema_of(verb): verb for verb in VERBS.values() if schema_of(verb) is not None}
CONFIGS = sorted((REPOSITORY / "configs").glob("*/*.yaml"))
every = pytest.mark.parametrize("name", VERBS, ids=" ".join)


@every
def test_each_option_and_setting_has_a_sentence(name: tuple[str, str]) -> None:
    found = [*options_of(VERBS[name]), *settings_of(VERBS[name])]
    assert found
    assert [each.key for each in found if len(each.meaning.split()) < 2] == []
    assert [
        each.key for each in settings_of(VERBS[name]) if not each.example or not each.type
    ] == []


@every
def test_each_help_has_examples_that_its_program_takes(name: tuple[str, str]) -> None:
    program_name, word = name
    examples, schema = _examples(VERBS[name]), schema_of(VERBS[name])
    assert examples, f"{program_name} {word} has no epilog with an example"
    parser = PARSERS[program_name]()
    for example in examples:
        assert example.startswith(f"{program_name} {word} ")
        options = parser.parse_args(shlex.split(example.removeprefix(program_name)))
        given = [getattr(options, "config", None), *getattr(options, "overrides", [])]
        assert [each for each in given if each and "=" in each and not sets(schema, each)] == []
    told = VERBS[name].format_help().replace("\n    ", " ")
    assert all(example in told for example in examples) and "(default: )" not in told


def sets(schema: Any, override: str) -> str | None:
    """Return the key that the override sets, or None if the schema does not have it."""
    tree: dict[str, Any] = {}
    apply_override(tree, override.partition("=")[0] + "=1", schema=schema)
    (key,) = flatten(tree)
    return (
        key
        if key
        in {
            prefix + name
            for prefix, section in sections_of(schema)
            for name in section.model_fields
        }
        else None
    )


@pytest.mark.parametrize("schema", CONFIGURED, ids=lambda schema: schema.__name__)
def test_each_example_of_a_setting_is_valid(schema: Any) -> None:
    for _, section in sections_of(schema, in_lists=True):
        for field in section.model_fields.values():
            if field.examples:
                checked = TypeAdapter(Annotated[field.annotation, *field.metadata, Field()])
                for value in field.examples:
                    checked.validate_json(json.dumps(value))
    refused = []
    for each in settings_of(CONFIGURED[schema]):  # as printed, in a minimal config
        is_typed = "=" in each.example.split(": ")[0]
        for example in each.example.split(", or ") if is_typed else ():
            words, tree = shlex.split(example), least(schema)
            if each.key == "model.import":
                del tree["model"]
            if each.kind:
                tree[each.key.partition(".")[0]] = least(section_of(schema, each))
            assert sets(schema, words[0]) == each.key
            try:
                for word in words:
                    apply_override(tree, word, schema=schema)
                validate(schema, tree)
            except SettingsError as error:
                refused.append(f"{example}: {error}")
        if not is_typed:
            field = section_of(schema, each).model_fields[each.key.rpartition(".")[2]]
            (value,) = parse_yaml(each.example, Path("x.yaml")).values()
            TypeAdapter(Annotated[field.annotation, *field.metadata, Field()]).validate_json(
                json.dumps(value)
            )
    assert refused == []


def least(section: Any) -> dict[str, Any]:
    """Return a valid config of the required settings, with the values of their examples."""
    if section is PretrainSettings:
        return {**least_of(section), "model": {"preset": "mlp_b6_wi256"}}
    return least_of(section)


def least_of(section: Any) -> dict[str, Any]:
    tree = {"kind": tag_of(section)} if tag_of(section) else {}
    for name, field in section.model_fields.items():
        if field.is_required() and name != "kind":
            inner = models_of(field.annotation, in_lists=False)
            tree[name] = least_of(inner[0]) if inner else example_of(field)
    return tree


def section_of(schema: Any, each: Explained) -> Any:
    prefix = each.key.removesuffix(each.key.rpartition(".")[2])
    kinds = [section for place, section in sections_of(schema, in_lists=True) if place == prefix]
    return next(
        section
        for section in kinds
        if str(tag_of(section) or "") == each.kind
        and each.key.rpartition(".")[2] in section.model_fields
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("pretrain train learning_rate", "'optimizer.lr'"),
        ("pretrain train train.learning_rate", "'optimizer.lr'"),
        ("finetune probe learning_rate", "'lrs'"),
        ("finetune tune data.batch_size", "'train.global_batch_size'"),
        ("finetune evaluate batch_size", "'local_batch_size'"),
        ("finetune knn batch_size", "'feature_batch_size'"),
    ],
)
def test_names_of_other_libraries_get_a_hint(words: str, meant: str) -> None:
    program_name, word, key = words.split()
    schema = schema_of(VERBS[program_name, word])
    tree = least(schema)
    apply_override(tree, f"{key}=1", schema=schema)
    with fails("unknown-key", key) as caught:
        validate(schema, tree)
    assert meant in caught.value.fix


def test_the_pages_have_every_option_and_setting() -> None:
    page = "".join(command_pages().values())
    missing = [
        each.key
        for (_, word), verb in VERBS.items()
        for each in [*options_of(verb), *settings_of(verb)]
        if word != "explain" and f"`{each.key}`" not in page and not each.key.endswith(".kind")
    ]
    assert missing == []
    assert {*SCHEMAS.values()} <= {*CONFIGURED}


def schema_of_config(config: Path) -> type[Settings]:
    words = {"data_prep": "build", "pretrain": "train", "finetune": "tune"}
    folder = "index" if config.stem.startswith("index") else config.parent.name
    return SCHEMAS[words.get(folder, folder)]


def test_the_shipped_configs_are_valid_and_headed() -> None:
    """Each config has at most 40 lines below a header with command, hardware and result."""
    configs = [config for config in CONFIGS if config.parent.name != "plan"]
    assert len(configs) >= 20
    for config in configs:
        load_settings(schema_of_config(config), path=config, overrides=[])
        lines = config.read_text().splitlines()
        assert len(lines) <= 40 and lines[0].startswith("#"), config
        for word in ("# command", "# hardware", "# result"):
            assert any(line.startswith(word) for line in lines), (config, word)


@pytest.mark.slow
def test_editors_take_what_the_programs_take_and_no_other_key() -> None:
    for config in CONFIGS:
        schema = json.loads(json_schema(schema_of_config(config)))
        checked = jsonschema.Draft202012Validator(schema)
        assert [error.message for error in checked.iter_errors(read_yaml(config))] == [], config
        (refused,) = checked.iter_errors(read_yaml(config) | {"mistaken": 1})
        assert "mistaken" in refused.message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train optimizer.lr", ["optimizer.lr\n", "number above 0", "0.0001", "or lr=0.0001"]),
        ("train name", ["optimizer.name\n", "schedule.name\n", "model.name (kind: timm)\n"]),
        ("train schedule", ["schedule.name\n", "schedule.warmup\n", "schedule.final_lr\n"]),
        ("train ranks", ["--ranks\n", "whole number"]),
        ("train epochs=3", ["train.duration\n", "train.duration='90 epochs'", "or epochs=90"]),
        ("train optimiser", "'optimizer'"),
        ("train zzz", "--ranks, augment, "),
        ("build source", ["--source\n", "source.path (kind: folder)\n"]),
    ],
)
def test_a_key_is_explained_by_any_of_its_names(
    words: str, expected: list[str] | str, capsys: Capture
) -> None:
    name = "pretrain" if words.startswith("train") else "data_prep"
    parser = PARSERS[name]()
    options = parser.parse_args(["explain", *words.split()])
    if isinstance(expected, str):
        with fails("unknown-key", words.split()[1]) as caught:
            options.run(options)
        assert expected in caught.value.fix
    else:
        assert options.run(options) == 0
        told = capsys.readouterr().out
        assert [each for each in expected if each not in told] == []


def test_every_program_tells_its_version(capsys: Capture) -> None:
    for name in PARSERS:
        with pytest.raises(SystemExit) as end:
            PARSERS[name]().parse_args(["--version"])
        assert end.value.code == 0 and re.fullmatch(
            rf"{name} of wide-mlps \d+\.\d+\.\d+\S*\n", capsys.readouterr().out
        )


# ---- short words


def test_the_last_word_of_a_key_is_enough_and_a_config_holds_full_keys(tmp_path: Path) -> None:
    words = ["dataset=d", "run_dir=r", "epochs=3", "lr=2e-4", "preset=mlp_b6_wi256", "seed=7"]
    settings = load_settings(PretrainSettings, path=None, overrides=words)
    assert (
        settings.data.dataset == "d"
        and settings.train.duration == "3 epochs"
        and settings.optimizer.lr == 2e-4
    )
    assert settings.train.seed == 7 and settings.model.label == "B-6/Wi-256"
    probe = load_settings(
        ProbeSettings, path=None, overrides=["run_dir=r", "dataset=d", "epochs=3"]
    )
    assert probe.epochs == (3,) and probe.data.dataset == "d"
    later = load_settings(
        PretrainSettings,
        path=None,
        overrides=[*words, "optimizer.lr=1e-3", "train.duration=5 steps"],
    )
    assert (later.optimizer.lr, later.train.duration) == (1e-3, "5 steps")


@pytest.mark.parametrize(
    ("words", "field", "code", "fix"),
    [
        (["name=sgd"], "name", "unknown-key", "optimizer.name=sgd or schedule.name=sgd or model.n"),
        (["lrr=1"], "lrr", "unknown-key", "'optimizer.lr'"),
        (["epoch=3"], "epoch", "unknown-key", "'epochs'"),
        (["nonsense=1"], "nonsense", "unknown-key", "augment, checkpoint"),
        ([], "data.dataset", "missing-value", "data.dataset=VALUE"),
    ],
)
def test_a_word_that_finds_no_key_or_several(
    words: list[str], field: str, code: Code, fix: str
) -> None:
    given = ["run_dir=r", "preset=mlp_b6_wi256", "train.duration=1 epochs", *words]
    with fails(code, field) as caught:
        load_settings(PretrainSettings, path=None, overrides=given)
    assert fix in str(caught.value)


def test_a_key_at_the_top_wins_over_one_that_ends_with_it() -> None:
    schema = schema_of(VERBS["data_prep", "build"])
    tree: dict[str, Any] = {}
    for word in ("image_size=64", "path=photos"):  # a source has an image_size, too
        apply_override(tree, word, schema=schema)
    assert tree == {"image_size": 64, "source": {"path": "photos"}}


# ---- completion


def test_keys_and_their_words_are_completed() -> None:
    train = VERBS["pretrain", "train"]
    assert completions(train, "optimizer.w") == ["optimizer.weight_decay="]
    assert (
        completions(train, "epo") == ["epochs="]
        and completions(VERBS["pretrain", "models"], "") == []
    )
    assert completions(train, "weight_d") == ["weight_decay="]
    assert completions(train, "precision=") == [
        f"precision={name}" for name in ("fp32", "tf32", "bf16", "fp16")
    ]
    assert "schedule.name=" in completions(train, "") and "name=" not in completions(train, "")


@pytest.mark.processes
def test_the_shell_is_answered_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line, answer = "pretrain train x.yaml optimizer.l", tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    subprocess.run(
        [sys.executable, "-m", "pretrain"], env=os.environ | asked, check=True, capture_output=True
    )
    assert answer.read_text().split("\x0b") == ["optimizer.lr=", "optimizer.layer_decay="]
