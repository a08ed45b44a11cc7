"""`local_batch_size: auto`: halve the batch until it fits, and keep the size with the run."""

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pretrain.config import EngineSettings, PretrainSettings
from pretrain.engine import micro_batch
from pretrain.engine.micro_batch import engine_bytes, fits, micro_batch_size, run_trial_step
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.ranks.world import World
from tests.errors import fails

SIZE: dict[str, Any] = {"image_size": 8, "device": torch.device("cpu")}
ALONE: dict[str, Any] = SIZE | {"world": World(0, 0, 1)}


def settings_of(run_dir: Path, batch: int, **sections: dict[str, Any]) -> PretrainSettings:
    train = {"duration": "1 epochs", "global_batch_size": batch, "local_batch_size": "auto"}
    settings = {
        "run_dir": str(run_dir),
        "data": {"dataset": "unused"},
        "model": {"kind": "mlp", "depth": 3, "width": 64},
        "train": train,
        "engine": {"precision": "fp32"},
    }
    return PretrainSettings.model_validate(settings | sections)


def model() -> nn.Module:
    return build_model(MlpSpec(kind="mlp", depth=3, width=64), num_classes=10, image_size=8)


class Memory:
    """Replace a trial step: memory for at most this many samples."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        self.tried: list[int] = []

    def __call__(self, _model: nn.Module, size: int, **_: Any) -> None:
        self.tried.append(size)
        if size > self.num_samples:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("batch", "room", "augment", "tried"),
    [
        (60, 60, {}, [60]),
        (60, 16, {}, [60, 30, 15]),
        (60, 1, {}, [60, 30, 15, 6, 3, 1]),
        (60, 3, {"mixup_alpha": 0.8}, [60, 30, 12, 6, 2]),
    ],
)
def test_the_batch_is_halved_until_it_fits_and_kept_with_the_run(
    batch: int,
    room: int,
    augment: dict[str, float],
    tried: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, memory = settings_of(tmp_path, batch, augment=augment), Memory(room)
    monkeypatch.setattr(micro_batch, "run_trial_step", memory)
    for _ in range(2):  # the second time without trials
        assert micro_batch_size(model(), settings=settings, **ALONE) == tried[-1]
        assert memory.tried == tried
    assert capsys.readouterr().out.count(f" chooses {tried[-1]} samples, ") == 1
    other = settings.model_copy(update={"engine": EngineSettings(precision="fp32", zero_stage=2)})
    micro_batch_size(model(), settings=other, **ALONE)
    assert memory.tried == tried * 2


def test_a_batch_that_never_fits_ends_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "run_trial_step", Memory(0))
    with fails("no-space", "train.local_batch_size") as caught:
        micro_batch_size(model(), settings=settings_of(tmp_path, 8), remedy="use less", **ALONE)
    assert caught.value.fix == "use less" and caught.value.of_all_ranks
    assert not (tmp_path / "micro_batch.json").exists()


def test_a_trial_step_changes_nothing_and_its_own_errors_are_errors(tmp_path: Path) -> None:
    tried, settings, before = model(), settings_of(tmp_path, 8), torch.get_rng_state()
    assert micro_batch_size(tried, settings=settings, **ALONE) == 8
    assert (before == torch.get_rng_state()).all()
    assert all(weight.grad is None for weight in tried.parameters())
    with pytest.raises(RuntimeError, match="shape"):
        wrong = SIZE | {"settings": settings, "reserved_bytes": 0, "image_size": 9}
        fits(partial(run_trial_step, tried, 8, **wrong), SIZE["device"])


def refused_by_the_system(run_dir: Path) -> int:
    """Return the size found below a memory limit, in a separate process."""
    settings = settings_of(run_dir, 2**16, engine={"precision": "fp32", "zero_stage": 0})
    # load libraries and start threads
    run_trial_step(model(), 8, settings=settings, reserved_bytes=0, **SIZE)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))
    return micro_batch_size(model(), settings=settings, **ALONE)


@pytest.mark.processes
def test_a_real_refusal_of_memory_halves_the_batch(tmp_path: Path) -> None:
    """2^16 images take at least 0.8 kB each."""
    words = "from pathlib import Path; from tests.pretrain.engine import test_micro_batch as t"
    code = f"{words}; print(t.refused_by_the_system(Path({str(tmp_path)!r})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 <= int(found.stdout.split()[-1]) < 2**16


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": "8"}', "3", "null"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "micro_batch.json"
    path.write_text(damage)
    with fails("damaged", str(path)):
        micro_batch_size(model(), settings=settings_of(tmp_path, 960), **ALONE)


def test_zero_shares_out_what_it_says(tmp_path: Path) -> None:
    weights = nn.Linear(1000, 1000, bias=False)

    def per_weight(stage: int, ranks: int, precision: str = "bf16") -> float:
        settings = settings_of(
            tmp_path,
            8,
            engine={"zero_stage": stage, "precision": precision},
            optimizer={"name": "adamw"},
        )
        return engine_bytes(weights, settings=settings, num_ranks=ranks) / 10**6

    assert per_weight(0, 4, "fp32") == per_weight(0, 1, "fp32") == 4 + 4 + 4 + 8
    assert [per_weight(1, ranks) for ranks in (1, 4)] == [2 + 2 + 4 + 12, 2 + 4 + 5 + 3]
    assert per_weight(2, 4) == 2 + 4 + 1 + 3
    assert per_weight(3, 4) == 0.5 + 2 + 2 + 1 + 3
