"""Where an evaluation goes, how it ends, and what is refused before anything heavy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.__main__ import main
from finetune.judging.config import EvaluateSettings
from finetune.judging.place import Evaluation
from pretrain.tracker import Tracker
from tests.finetune.judging import judge, settings_of, write_folder


@pytest.fixture(scope="module")
def folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "folder", shapes)


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where every evaluation would draw for a second; the commands and ranks of the tests do draw."""
    monkeypatch.setattr("finetune.judging.evaluate._draw", lambda *unused: None)


def test_other_settings_have_another_directory(folder: Path, shapes: Path, other_shapes: Path) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"views": 2},
        {"views": 3},
        {"views": 2, "seed": 1},
        {"views": 2, "include_plain": True},
        {"views": 2, "augment": {"crop_scale": [0.5, 1.0]}},
        {"split": "train"},
        {"precision": "bf16"},
    ]
    places = {Evaluation.of(settings_of(folder, shapes, None, **changes)).run_dir for changes in variants}
    assert len(places) == len(variants)
    same = Evaluation.of(settings_of(folder, shapes, None, local_batch_size=3, seed=5)).run_dir
    assert same == Evaluation.of(settings_of(folder, shapes, None)).run_dir


def test_an_evaluation_that_is_told_to_end_was_killed_and_can_be_done_anew(
    folder: Path, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    def interrupted(*unused: object, **named: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    with monkeypatch.context() as patches:
        patches.setattr(Tracker, "close", lambda self, status: ends.append(status))
        patches.setattr("finetune.judging.evaluate.save_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            judge(folder, shapes, tmp_path / "run")
    assert ends == ["KILLED"] and not (tmp_path / "run" / "result.json").exists()
    assert judge(folder, shapes, tmp_path / "run")["num_samples"] == 72
    assert not list((tmp_path / "run").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["split=test"], "has no split 'test'; "),
        (["views=2", "augment.mixup_alpha=0.8"], "augment.mixup_alpha: 0.8 will not do (MixUp mixes two pictures"),
        (["include_plain=true"], "include_plain: true, but views is 0"),
        (["augment.flip_probability=0"], "augment: is set, but views is 0"),
        (["run_dir=/proc/evaluation"], "/proc cannot be written to; name another run_dir"),
        (["dataset=OTHER"], "has other classes than the checkpoint (8 classes against 5); probe or tune on it first"),
        (["pretrained=/nowhere"], "/nowhere: holds no checkpoint; give a run directory"),
        (["pretrained=CUT"], "no checkpoint there is whole (model.safetensors has changed)"),
        (["viewss=3"], "did you mean"),
    ],
)
def test_a_mistake_is_one_line_before_anything_heavy(
    folder: Path, shapes: Path, other_shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: list[str], message: str,
) -> None:  # fmt: skip
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    words = [word.replace("OTHER", str(other_shapes)).replace("CUT", str(cut)) for word in words]
    assert main(["evaluate", str(folder), str(shapes), *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("finetune: ") and said.count("\n") == 1
    assert not (folder.parent / "folder-evaluations").exists()


def test_the_settings_that_are_shown_can_be_read_again(
    folder: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(folder), str(shapes), "views=7", "augment.crop_scale=[0.5, 1]", "--show"]) == 0
    shown = EvaluateSettings.model_validate_json(json.dumps(yaml.safe_load(capsys.readouterr().out)))
    assert shown.views == 7 and shown.augment.crop_scale == (0.5, 1.0) and shown.augment.crop_ratio == (1.0, 1.0)
