"""Every command of benchmarks/gpu.py is parsed, and its settings are checked, without running it on
a GPU."""

import importlib.util
import json
import pkgutil
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from data_prep.settings import load_settings
from finetune.verbs import split_config
from tests.ranks import REPOSITORY
from tests.settings_page import PARSERS


@cache
def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kit_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_repository(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error if a program does not accept the words."""
    if words[0] != "-m":
        monkeypatch.setattr(sys, "argv", words)
        parse: Any = module_of(REPOSITORY / words[0].removeprefix(f"{REPOSITORY}/")).arguments
        parse(*([""] if parse.__module__ == "frame" else []))
        return
    name, rest = words[1], words[2:]
    options = PARSERS[name]().parse_args(rest)
    if schema := getattr(options, "schema", None):
        given = [each for each in (options.config, *options.overrides) if each is not None]
        config, overrides = split_config(given)
        load_settings(pkgutil.resolve_name(schema), path=config, overrides=overrides)


@pytest.mark.slow  # imports torch, deepspeed and timm
@pytest.mark.parametrize("quick", [True, False])
def test_gpu_py_names_no_verb_key_or_option_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    gpu = module_of(REPOSITORY / "benchmarks/gpu.py")
    parts = gpu.parts(quick=quick, num_gpus=8)
    assert len({part.name for part in parts}) == len(parts) > 20
    for part in parts:
        check(list(part.words), monkeypatch)


def test_the_table_holds_what_was_found_beside_its_goal(tmp_path: Path) -> None:
    gpu = module_of(REPOSITORY / "benchmarks/gpu.py")
    names = {part.name for part in gpu.parts(quick=False, num_gpus=8)}
    known = sys.modules["gpu_table"]
    assert {name for row in known.ROWS for name in row.parts} <= names  # every row's parts exist
    page, found = (
        tmp_path / "measured.md",
        {"machine": "X", "commit": "abc", "num_gpus": 8, "date": "2000-01-01"},
    )
    found |= {"failed": ["probe-fp32"]}
    page.write_text(f"before\n{known.BEGIN}\nold\n{known.END}\nafter\n")
    figures = {
        "profile-b12-z1-compiled": {
            "images_per_s": 800_000.0,
            "share_of_product_rate": 0.75,
            "device_idle_fraction": None,
        },
        "run-b12": {"usage/images_per_s": 600_000.0},
        "run-b6": {"usage/peak_gpu_reserved_gb": 22.5},
        "evaluate-fp32": {"eval/top1": 0.5},
        "evaluate-bf16": {"eval/class_top1": 0.1, "eval/top1": 0.502},
        "probe-bf16": {"test_top1": 0.7},
        "models-mixer": {"mixer: of products": 0.9},
    }
    gpu.write_table({**found, "figures": figures}, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    for row in (
        "| 56% | missed |",  # 0.75 x 600 / 800
        "| < 25 s | 20.8 s | met |",
        "| < 24 GB | 22.5 GiB | missed |",  # 24.2 GB
        "| <= 0.1 point | 0.20 points | missed |",
        "| <= 0.1 point | failed: probe-fp32 | |",
        "ZeRO 2 on all GPUs: images/s relative to ZeRO 1 | | not run | |",
        "| only with a GPU | |",
        f"| >= 1.15 x | {known.NO_FIGURE}",
    ):
        assert row in re.sub(" +", " ", text), row
    assert "8 x X, torch unknown, commit abc" in text and "Failed: probe-fp32." in text
    assert text.count("\n|") == len(known.ROWS) + 2  # with the table's head
    places = [tmp_path / name for name in ("one.json", "other.json")]
    for place, part in zip(places, ({"a": {"x": 1}}, {"probe-fp32": {"x": 2}}), strict=True):
        place.write_text(json.dumps({**found, "figures": part}))
    both = gpu.together(places)
    assert both["figures"].keys() == {"a", "probe-fp32"} and both["failed"] == []


@pytest.mark.processes
def test_a_part_that_fails_has_a_verdict_and_no_figures(tmp_path: Path) -> None:
    gpu = module_of(REPOSITORY / "benchmarks/gpu.py")
    write = "import json, os; open(os.environ['BENCHMARK_FIGURES'], 'w').write('{\"x\": 1}')"
    for code, figures, verdict in (
        (write, {"x": 1}, "ok"),
        ("raise SystemExit(3)", None, "exit 3"),
        (f"{write}; raise SystemExit(1)", None, "exit 1"),
        ("import time; time.sleep(600)", None, "TIMEOUT"),
    ):
        found, said = gpu.run(gpu.Part("data", "a", 60, ("-c", code)), logs=tmp_path, limit_s=2)
        assert found == figures and verdict in said


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, "2"), (1, "1"), (8, "2")])
def test_the_demo_starts_two_ranks_except_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, ranks: str
) -> None:
    demo = module_of(REPOSITORY / "demo.py")
    monkeypatch.setattr(demo, "usable_gpus", lambda: ["GPU"] * num_gpus)
    trainings = [words for _, words, _ in demo.stages() if words[:2] == ["pretrain", "train"]]
    assert trainings and all(words[-2:] == ["--ranks", ranks] for words in trainings)
