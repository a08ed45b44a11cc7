"""The files for other launchers: each starts one of our commands with the launcher's addresses."""

import re
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import pytest
import yaml

from data_prep.settings import load_settings
from pretrain.config import PretrainSettings
from tests.cluster.checkouts import run, stand_in
from tests.ranks import REPOSITORY

CLUSTER = REPOSITORY / "cluster"


def documents() -> dict[str, dict[str, Any]]:
    return {
        each["kind"]: each
        for each in yaml.safe_load_all((CLUSTER / "kubernetes/trainjob.yaml").read_text())
    }


def settings_of(words: list[str]) -> PretrainSettings:
    return load_settings(PretrainSettings, path=REPOSITORY / words[0], overrides=words[1:])


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("TrainJob", kubeflow.TrainerV1alpha1TrainJob),
        ("TrainingRuntime", kubeflow.TrainerV1alpha1TrainingRuntime),
    ],
)
def test_kubernetes_knows_every_field(kind: str, model: Any) -> None:
    """The model drops unknown fields, so they would be missing in its output."""
    document = documents()[kind]
    assert model.from_dict(document).to_dict() == document


def test_the_job_and_its_runtime_fit_each_other() -> None:
    job, runtime = documents()["TrainJob"], documents()["TrainingRuntime"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replica,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replica["template"]["spec"]["template"]["spec"]
    assert (
        replica["name"] == pod["containers"][0]["name"] == "node"
    )  # names that the torch runtime replaces
    assert "torch" in runtime["spec"]["mlPolicy"]
    trainer = job["spec"]["trainer"]
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert int(gpus) == trainer["numProcPerNode"]
    settings = settings_of(trainer["args"][3:])
    assert pod["terminationGracePeriodSeconds"] > settings.checkpoint.grace_s
    user = re.search(r"^USER (\d+)$", (CLUSTER / "Containerfile").read_text(), flags=re.MULTILINE)
    assert user is not None
    assert pod["securityContext"]["runAsUser"] == int(user[1])


def sky() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    return found


def started(script: str, environment: dict[str, str], tmp_path: Path) -> list[str]:
    """Return the arguments that the commands pass to torchrun, recorded by a stand-in."""
    stand_in(tmp_path, "torchrun", 'printf "%s\\n" "$@"')
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    done = run(tmp_path, "bash", "-c", script, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_skypilots_addresses_become_those_of_torchrun(tmp_path: Path) -> None:
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
    }
    words = started(
        sky()["run"], sky()["envs"] | given | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}, tmp_path
    )
    options = dict(zip(words[:10:2], words[1:10:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "8",
        "--master-addr": "10.0.0.5",
        "--master-port": "29500",
    }
    settings = settings_of(words[13:])
    assert settings.checkpoint.remote == sky()["envs"]["REMOTE"]
    assert words[10:13] == ["-m", "pretrain", "train"]


def test_what_kubernetes_starts_is_a_command_of_ours() -> None:
    trainer = documents()["TrainJob"]["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    assert words[:4] == ["torchrun", "-m", "pretrain", "train"]
    assert settings_of(words[4:]).checkpoint.remote
