"""`local_batch_size: auto`: the largest size that fits into a made-up memory, the choice kept with
the run."""

import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from pretrain.config import EngineSettings, PretrainSettings
from pretrain.engine import micro_batch
from pretrain.engine.micro_batch import (
    LiveBytes,
    NoMicroBatch,
    Trial,
    cgroup_rooms,
    engine_bytes,
    largest_that_fits,
    micro_batch_size,
)
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

CPU = torch.device("cpu")
SIZE: dict[str, Any] = {"num_classes": 10, "image_size": 8, "device": CPU}
ALONE: dict[str, Any] = SIZE | {"world": World(0, 0, 1)}


def settings_of(
    run_dir: Path, batch: int, *, augment: dict[str, float] | None = None, **engine: Any
) -> PretrainSettings:
    return PretrainSettings.model_validate(
        {
            "run_dir": str(run_dir),
            "data": {"dataset": "unused"},
            "model": {"kind": "mlp", "depth": 3, "width": 64},
            "augment": augment or {},
            "train": {
                "duration": "1 epochs",
                "global_batch_size": batch,
                "local_batch_size": "auto",
            },
            "engine": {"precision": "fp32"} | engine,
        }
    )


def model() -> nn.Module:
    return build_model(MlpSpec(kind="mlp", depth=3, width=64), num_classes=10, image_size=8)


def test_what_is_alive_counts_whoever_keeps_it() -> None:
    kept, seen = torch.zeros(1000), list[int]()
    with LiveBytes(ignoring=[kept]) as counted:
        first = torch.ones(1000)  # 4,000 bytes
        seen.append(counted.live)
        second = first + kept  # 4,000 more
        seen.append(counted.live)
        view = second[:10]
        kept.add_(1)
        del first, second
        third = view.double()  # 80 bytes beside what the view keeps alive
    assert [*seen, counted.live, counted.most] == [4000, 8000, 4080, 8000] and third.numel() == 10


@pytest.mark.parametrize(
    ("fixed", "per_sample", "lost_from", "found", "tried"),
    [
        (0, 10, 999, 60, [1, 2, 16, 60]),
        (0, 20, 999, 30, [1, 2, 16, 30]),
        (
            300,
            5,
            999,
            60,
            [1, 2, 16, 60],
        ),  # what does not grow with the batch does not count against it
        (100, 10, 999, 30, [1, 2, 16, 30]),
        (590, 10, 999, 1, [1, 2]),
        (0, 601, 999, 0, [1]),
        (0, 10, 21, 15, [1, 2, 16, 60, 30]),  # memory that somebody else took
        (0, 10, 1, 0, [1]),
    ],
)
def test_the_largest_part_is_found_from_below(
    fixed: int, per_sample: int, lost_from: int, found: int, tried: list[int]
) -> None:
    """Nothing above the budget of 600 bytes is tried, and where memory runs out, half is."""
    sizes = list[int]()
    PROGRESS._touched_s = None

    def peak_bytes(size: int) -> int | None:
        assert PROGRESS._touched_s is not None
        PROGRESS._touched_s = None
        sizes.append(size)
        assert fixed + per_sample * size <= 600 or size <= 2
        return None if size >= lost_from else fixed + per_sample * size

    parts = [size for size in range(1, 61) if 60 % size == 0]
    assert largest_that_fits(parts, peak_bytes, budget=600) == found and sizes == tried
    assert (
        largest_that_fits([2, 254], lambda size: 100 + size, budget=600) == 254
    )  # of a share with few divisors, too


def test_however_memory_runs_out_it_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(model(), settings_of(tmp_path, 8), **SIZE)
    for words in (
        "CUDA out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling",
        "DefaultCPUAllocator: can't allocate memory",
    ):
        monkeypatch.setattr(Trial, "_step", Mock(side_effect=RuntimeError(words)))
        assert trial.peak_bytes(8) is None
    monkeypatch.setattr(Trial, "_step", Mock(side_effect=RuntimeError("mat1 and mat2 shapes")))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trial.peak_bytes(8)


def test_a_gpu_gets_its_memory_back_when_the_error_no_longer_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, gone = list[Any](), list[bool]()

    def step(_trial: Trial, _size: int) -> int:
        held = torch.zeros(10)
        made.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory")

    trial = Trial(model(), settings_of(tmp_path, 8), **SIZE)
    trial.on_gpu = True
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    monkeypatch.setattr(Trial, "_measured", step)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(made[0]() is None))
    assert trial.peak_bytes(8) is None and gone == [True]


def test_auto_fits_into_what_there_is_and_is_kept_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, before = model(), torch.get_rng_state()
    found = {}
    for room in (8_000_000, 16_000_000, 10**10):
        (tmp_path / str(room)).mkdir()
        monkeypatch.setattr(micro_batch, "available_bytes", lambda *_, room=room: room)
        found[room] = micro_batch_size(
            whole, settings=settings_of(tmp_path / str(room), 960), **ALONE
        )
    assert 1 < found[8_000_000] < found[16_000_000] < found[10**10] == 960
    # no more than what autograd must keep: inputs, and tensors of 64 to 256 a block
    assert found[16_000_000] * 4 * (192 + 3 * (64 + 64 + 256 + 256)) < 16_000_000
    chosen, settings = found[16_000_000], settings_of(tmp_path / "16000000", 960, compile=True)
    said = f"local_batch_size auto is {chosen} samples per rank, {960 // chosen} of them a step"
    assert 960 % chosen == 0 and said in capsys.readouterr().out
    assert (
        micro_batch_size(whole, settings=settings, **ALONE) == chosen
        and capsys.readouterr().out == ""
    )
    assert (before == torch.get_rng_state()).all() and all(
        weight.grad is None for weight in whole.parameters()
    )
    other = settings.model_copy(update={"engine": EngineSettings(precision="fp32", zero_stage=2)})
    assert micro_batch_size(whole, settings=other, **ALONE) == 960


def test_what_fits_nowhere_ends_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    for name, value in (
        ("available_bytes", lambda *_: 1_000_000),
        ("Trial._measured", out_of_memory),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"pretrain.engine.micro_batch.{name}", value)
            with pytest.raises(
                NoMicroBatch, match=r"finds no micro-batch that fits: .* beside it; think smaller"
            ):
                micro_batch_size(
                    model(), settings=settings_of(tmp_path, 960), remedy="think smaller", **ALONE
                )


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    sizes = [
        json.dumps([each]) for each in ({}, {"local_batch_size": -4}, {"local_batch_size": "8"})
    ]
    for damage in ("", "{", "[1]", '{"a": 1}', "[{}, 3]", "[null]", "3", *sizes):
        (tmp_path / "micro_batch.json").write_text(damage)
        with pytest.raises(NoMicroBatch, match=r"micro_batch\.json: is damaged; remove it"):
            micro_batch_size(model(), settings=settings_of(tmp_path, 960), **ALONE)


def test_zero_shares_out_what_it_says(tmp_path: Path) -> None:
    weights = nn.Linear(1000, 1000, bias=False)

    def per_weight(stage: int, ranks: int, precision: str = "bf16") -> float:
        settings = settings_of(tmp_path, 8, zero_stage=stage, precision=precision)
        settings = settings.model_copy(
            update={"optimizer": settings.optimizer.model_copy(update={"name": "adamw"})}
        )
        return engine_bytes(weights, settings=settings, num_ranks=ranks, on_gpu=True) / 10**6

    assert per_weight(0, 4, "fp32") == per_weight(0, 1, "fp32") == 4 + 4 + 4 + 8
    assert [per_weight(1, ranks) for ranks in (1, 4)] == [2 + 2 + 4 + 12, 2 + 4 + 5 + 3]
    assert per_weight(2, 4) == 2 + 4 + 1 + 3
    assert per_weight(3, 4) == 0.5 + 2 + 2 + 1 + 3


def test_limits_of_cgroups_are_seen(tmp_path: Path) -> None:
    def group(path: str, **files: str) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / path / name.replace("__", ".")).write_text(text)

    group("slurm/job", memory__max="max\n", memory__current="5\n", memory__stat="inactive_file 1\n")
    group(
        "slurm",
        memory__max="1000\n",
        memory__current="700\n",
        memory__stat="anon 600\ninactive_file 100\n",
    )
    assert list(cgroup_rooms(tmp_path, "0::/slurm/job\n")) == [400]
    names = {"limit_in_bytes": "500", "usage_in_bytes": "80", "stat": "total_inactive_file 30"}
    group("memory/job", **{f"memory__{name}": text for name, text in names.items()})
    assert list(cgroup_rooms(tmp_path, "4:memory:/job\n3:cpuset:/job\n")) == [450]
    assert list(cgroup_rooms(tmp_path, "0::/elsewhere\n")) == []
