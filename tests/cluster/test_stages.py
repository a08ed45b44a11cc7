"""A plan whose stages read each other's checkpoints, with the real commands. Killed stages resume;
finished stages are recognized by their weights."""

import shutil
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.plan import Here
from cluster.plan_file import Plan, load_checked
from data_prep.errors import SettingsError
from pretrain.checkpoints.run import list_checkpoints
from pretrain.models.spec import MlpSpec
from tests.finetune.tiny import write_folder
from tests.forked import begin, environments, new_output, wait
from tests.moments import Strike

PLAN = """
finetune:
  config: configs/finetune/demo.yaml
  overrides: [run_dir=runs/tuned, pretrained=runs/base, 'seeds=[0, 1]', data.dataset={dataset}, train.duration=2 steps, {few}]
knn: {{config: configs/knn/demo.yaml, for_each: finetune, overrides: [data.dataset={dataset}, neighbors=3, {silent}],
       run_dir: 'runs/knn-{{finetuned}}'}}
evaluate: {{config: configs/evaluate/demo.yaml, for_each: finetune, overrides: [num_views=2, {silent}],
            run_dir: 'runs/views-{{finetuned}}'}}
export: {{config: configs/export/demo.yaml, for_each: finetune, overrides: ['formats=[timm]'], run_dir: 'exports/{{finetuned}}'}}
"""
SILENT = "tracking.enabled=false"
FEW = (
    "train.global_batch_size=8, train.eval_every=2 steps, checkpoint.every=2 steps,"
    f" schedule.warmup=0 steps, {SILENT}"
)
pytestmark = pytest.mark.processes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the started commands. The first evaluation is killed while it writes."""
    found: list[list[str]] = []

    def run(_here: Here, words: list[str]) -> int:
        assert words[-2:] == ["--ranks", "1"] or words[1] == "export"
        is_first = words[1] == "evaluate" and not any(each[1] == "evaluate" for each in found)
        strike = [Strike(Path("runs/views-seed-0"), 2, stage="writing the results")] * is_first
        found.append(words)
        alone = [word for word in words[1:] if word not in ("--ranks", "1")]
        output = new_output()
        process = begin(
            "tests.training:main",
            words[0],
            alone,
            *strike,
            environment=environments(1)[0],
            output=output,
        )
        (code,) = wait([process], timeout_s=300)
        assert code == (-9 if is_first else 0), output.read_text()[-2000:]
        return code

    monkeypatch.setattr(Here, "run", run)
    return found


def states(plan: Plan) -> dict[str, list[str]]:
    return {stage.name: [work.state() for work in stage.works] for stage in plan.stages}


def test_a_killed_plan_does_what_is_missing_and_new_weights_are_not_finished(
    checkout: Path, other_shapes: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(Path("runs/base"), spec=MlpSpec(kind="mlp", depth=1, width=24, expansion=2))
    Path("stages.yaml").write_text(PLAN.format(dataset=other_shapes, few=FEW, silent=SILENT))
    assert main(["run", "stages.yaml", "--ranks", "1"]) == 1
    assert [words[1] for words in asked] == ["tune", "knn", "knn", "evaluate", "evaluate"]
    assert "skipped: export" in capsys.readouterr().err
    plan = load_checked("stages.yaml")
    assert (
        states(plan)["evaluate"] == ["begun", "finished"]
        and states(plan)["export"] == ["not begun"] * 2
    )
    assert main(["run", "stages.yaml", "--ranks", "1"]) == 0
    assert [words[1] for words in asked[5:]] == ["evaluate", "export", "export"] and asked[
        5
    ] == asked[3]
    assert main(["run", "stages.yaml", "--ranks", "1"]) == 0 and len(asked) == 8
    assert all(set(each) == {"finished"} for each in states(plan).values())
    card = Path("exports/seed-0/README.md").read_text()
    assert "2 views" in card and "k-NN" in card  # exports wait for the results in their model card

    (weights,) = list_checkpoints(Path("runs/tuned/seed-0"))
    later = write_folder(
        weights.with_name("step-00000009"), other_shapes, step=9
    )  # as if its run had been extended
    for name in ("knn", "evaluate", "export"):
        assert states(plan)[name] == ["other settings", "finished"]
    with pytest.raises(
        SettingsError,
        match="runs/tuned/seed-0 is at step 9 now, but runs/views-seed-0 began from step 2",
    ):
        load_checked("stages.yaml")
    for place in (later, weights):
        shutil.rmtree(place)  # to save disk space: the results stay
    assert all(
        set(each) == {"finished"} for name, each in states(plan).items() if name != "finetune"
    )
