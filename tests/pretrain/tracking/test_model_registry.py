"""Results of weights are one version of a registered model, however often they are delivered."""

import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pretrain.tracking.delivery import sync
from pretrain.tracking.tracker import RunIdentity, Tracker

pytestmark = pytest.mark.usefixtures("by_hand")


def run(folder: Path, name: str, *, parent: Path | None = None) -> tuple[Path, RunIdentity]:
    parent_key = None
    if parent is not None:
        known = RunIdentity.known(parent)
        assert known is not None
        parent_key = known.run_key
    # the child is in another directory: without its parent's database it would create one there
    identity = RunIdentity.of(
        folder / name, experiment="tests", uri=None, parent_key=parent_key, parent_dir=parent
    )
    return folder / name, identity


def test_results_of_weights_gather_at_one_version(new_store: Path, tmp_path: Path) -> None:
    shutil.copy(new_store, tmp_path / "mlflow.db")
    maker, identity = run(tmp_path, "pretrained")
    Tracker(maker, params={"a": 1}, tags={"task": "pretrain"}).close("FINISHED")
    sync(maker)
    checkpoint = maker / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps({"classes": ["a", "b"]}))
    for number, (weights, tags) in enumerate(
        (
            ("f00d", {"probe/cifar10": "0.5"}),
            ("f00d", {"tune/stl10": "0.7"}),
            ("beef", {"probe/cifar10": "0.6"}),
        )
    ):
        child, child_identity = run(tmp_path / "elsewhere", f"child-{number}", parent=maker)
        assert child_identity.uri == identity.uri
        tracker = Tracker(child, params={}, tags={"task": "probe"})
        tracker.metrics({"probe/test_top1": 0.5}, step=3)
        for _ in range(2):  # a second process repeats it
            tracker.version(
                "pretrained",
                checkpoint=checkpoint,
                weights_sha256=weights,
                parent_key=identity.run_key,
                tags=tags,
            )
        tracker.close("FINISHED")
        sync(child)
    client = MlflowClient(tracking_uri=identity.uri)
    versions = {
        version.tags["weights_sha256"]: version
        for version in client.search_model_versions("name = 'pretrained'")
    }
    assert {weights: version.tags | {} for weights, version in versions.items()} == {
        "f00d": {
            "weights_sha256": "f00d",
            "checkpoint": str(checkpoint),
            "probe/cifar10": "0.5",
            "tune/stl10": "0.7",
        },
        "beef": {"weights_sha256": "beef", "checkpoint": str(checkpoint), "probe/cifar10": "0.6"},
    }
    assert "| probe/cifar10 | 0.5 |" in versions["f00d"].description
    experiments = [each.experiment_id for each in client.search_experiments()]
    stored = {each.info.run_name: each for each in client.search_runs(experiments)}
    assert sorted(stored) == ["child-0", "child-1", "child-2", "pretrained"]
    assert stored["child-0"].data.tags["mlflow.parentRunId"] == stored["pretrained"].info.run_id
    assert "mlflow.parentRunId" not in stored["pretrained"].data.tags
    assert (
        stored["child-0"].data.metrics == {"probe/test_top1": 0.5}
        and stored["child-0"].info.status == "FINISHED"
    )
    mlflow_run = client.get_run(str(versions["f00d"].run_id))
    assert mlflow_run.info.run_name == "pretrained"
    assert [
        artifact.path for artifact in client.list_artifacts(mlflow_run.info.run_id, "checkpoint")
    ] == ["checkpoint/config.json"]
    assert mlflow_run.data.params == {"a": "1"}


def test_a_version_that_the_registry_will_not_have_holds_up_nothing(
    new_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(new_store, tmp_path / "mlflow.db")
    run_dir, identity = run(tmp_path, "run")
    tracker = Tracker(run_dir, params={}, tags={})
    (run_dir / "config.json").write_text("{}")
    tracker.version(
        "kai's run", checkpoint=run_dir, weights_sha256="f00d", parent_key="", tags={"a/b": "1"}
    )
    (run_dir / "after.txt").write_text("after")
    tracker.artifact(run_dir / "after.txt")
    tracker.close("FINISHED")
    sync(run_dir)
    assert '"kai\'s run": the registry does not accept it' in capsys.readouterr().err
    client = MlflowClient(tracking_uri=identity.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])  # type: ignore[union-attr]
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["after.txt"]
    assert (
        found.info.status == "FINISHED"
        and json.loads((run_dir / "tracking" / "delivered.json").read_text())["owed"] == []
    )
