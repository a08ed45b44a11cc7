"""`local_batch_size: auto`: the search against a made-up memory, the meter against what tensors weigh, the choice kept."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from pretrain.config import EngineSettings, PretrainSettings
from pretrain.engine.memory import MemoryMeter, Trial, cgroup_rooms, engine_bytes, extrapolated
from pretrain.engine.micro_batch import (
    BROKEN,
    Damaged,
    DoesNotFit,
    candidates_of,
    fit_micro_batch,
    largest_that_fits,
    micro_batch_size,
    recall,
    situation_of,
    with_local_batch_size,
)
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.ranks.world import World

ALONE, CPU = World(0, 0, 1), torch.device("cpu")
SPEC = MlpSpec(kind="mlp", depth=3, width=64)


def settings_of(run_dir: Path, batch: int, **augment: float) -> PretrainSettings:
    return PretrainSettings.model_validate(
        {
            "run_dir": str(run_dir),
            "data": {"dataset": "unused"},
            "model": {"kind": "mlp", "depth": 3, "width": 64},
            "augment": augment,
            "train": {"duration": "1 epochs", "global_batch_size": batch, "local_batch_size": "auto"},
            "engine": {"precision": "fp32"},
        }
    )


def model() -> nn.Module:
    return build_model(SPEC, num_classes=10, image_size=8)


def test_the_largest_part_of_the_share_that_fits_and_holds_is_found() -> None:
    assert candidates_of(12, must_be_even=False) == [1, 2, 3, 4, 6, 12]
    assert candidates_of(12, must_be_even=True) == [2, 4, 6, 12]
    draws = random.Random(0)
    for _ in range(50):
        fixed, slope, budget = draws.randrange(1000), draws.randrange(1, 50), draws.randrange(4000)
        truly_fits = [size for size in candidates_of(96, must_be_even=False) if fixed + slope * size <= budget]
        found = largest_that_fits(
            candidates_of(96, must_be_even=False),
            budget=budget,
            need=lambda size, a=fixed, b=slope: a + b * size,  # type: ignore[misc]
            holds=None,
        )
        assert found == max(truly_fits, default=0)
    tried: list[int] = []
    holds = lambda size: tried.append(size) or size <= 6  # type: ignore[func-returns-value] # noqa: E731
    assert largest_that_fits([1, 2, 3, 4, 6, 12, 24], budget=20, need=lambda size: size, holds=holds) == 6
    assert tried == [12, 6]  # what could not fit is not tried


def test_the_meter_knows_what_tensors_weigh_and_who_keeps_them() -> None:
    kept = torch.zeros(1000)
    with MemoryMeter(ignoring=[kept]) as meter:
        first = torch.ones(1000)  # 4,000 bytes
        second = first + kept  # 4,000 more
        view = second[:10]
        kept.add_(1)
        del first, second
        third = view.double()  # 80 bytes beside what the view keeps alive
    assert meter.moments == [4000, 8000, 4080] and meter.live == 4080 and third.numel() == 10
    peak = extrapolated((2, [100, 60, 10]), (4, [100, 80, 60]))
    assert [peak(size) for size in (2, 4, 8, 100)] == [100, 100, 160, 2460]
    assert extrapolated((2, [10]), (4, [10, 30]))(8) == 60


def test_two_small_trials_foretell_a_large_one_and_leave_no_trace() -> None:
    tried = model()
    torch.manual_seed(0)
    trial = Trial(tried, 10, 8, EngineSettings(precision="fp32"), is_mixed=True, device=CPU).copied()
    peak = trial.peak_bytes()
    for size in (32, 96):
        assert peak(size) == pytest.approx(max(trial._moments(size)), rel=0.02)  # of a large batch, measured
    # more than the weights' gradients of one layer, and than what autograd must keep: inputs, and 6 tensors of 64 to 256 a block
    assert peak(960) > 960 * 4 * (192 + 3 * (64 + 64 + 256 + 256))
    assert all(weight.grad is None for weight in tried.parameters())


def test_auto_fits_into_what_there_is_and_is_kept_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, 960)
    size = {"num_classes": 10, "image_size": 8, "device": CPU, "world": ALONE}
    found = {
        available: fit_micro_batch(model(), settings=settings, share=960, available=available, **size)  # type: ignore[arg-type]
        for available in (8_000_000, 16_000_000, 10**10)
    }
    assert 1 < found[8_000_000] < found[16_000_000] < found[10**10] == 960
    with pytest.raises(DoesNotFit, match="auto finds no micro-batch that fits: of 0"):
        fit_micro_batch(model(), settings=settings, share=960, available=1_000_000, **size)  # type: ignore[arg-type]

    whole = model()
    before = torch.get_rng_state()
    monkeypatch.setattr("pretrain.engine.micro_batch.available_bytes", lambda *_, **__: 16_000_000)
    chosen = micro_batch_size(whole, settings=settings, **size)  # type: ignore[arg-type]
    assert chosen == found[16_000_000] and 960 % chosen == 0
    assert (
        f"local_batch_size auto is {chosen} samples per rank, {960 // chosen} of them a step" in capsys.readouterr().out
    )
    monkeypatch.setattr("pretrain.engine.micro_batch.available_bytes", lambda *_, **__: 10**10)
    assert micro_batch_size(whole, settings=settings, **size) == chosen  # type: ignore[arg-type]
    assert capsys.readouterr().out == "" and (before == torch.get_rng_state()).all()
    assert with_local_batch_size(settings, chosen).train.local_batch_size == chosen
    other = settings.model_copy(update={"engine": EngineSettings(precision="fp32", zero_stage=2)})
    assert micro_batch_size(whole, settings=other, **size) == 960  # type: ignore[arg-type]


def test_memory_that_runs_out_at_once_is_no_fit_and_a_damaged_note_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, 960)
    size = {"num_classes": 10, "image_size": 8, "device": CPU, "world": ALONE}
    for damage in ("", "{", "[1]", '{"a": 1}', "[{}, 3]", '[{"num_ranks": 1}, null]', "3"):
        (tmp_path / "micro_batch.json").write_text(damage)
        with pytest.raises(Damaged, match=r"micro_batch\.json: is damaged; remove it"):
            micro_batch_size(model(), settings=settings, **size)  # type: ignore[arg-type]
    situation = situation_of(settings, device=CPU, world=ALONE)
    for said in ({}, {"local_batch_size": -4}, {"local_batch_size": "8"}):
        (tmp_path / "micro_batch.json").write_text(json.dumps([situation | said]))
        assert recall(tmp_path / "micro_batch.json", situation) == BROKEN

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    for step in ("copied", "step"):
        with monkeypatch.context() as patched:
            patched.setattr(Trial, step, out_of_memory)
            with pytest.raises(DoesNotFit, match="do not fit beside it; think smaller"):
                fit_micro_batch(
                    model(),
                    settings=settings,
                    share=960,
                    available=10**10,
                    remedy="think smaller",
                    **size,  # type: ignore[arg-type]
                )


def test_zero_shares_out_what_it_says() -> None:
    def per_weight(stage: int, ranks: int, precision: str = "bf16") -> float:
        engine = EngineSettings.model_validate({"zero_stage": stage, "precision": precision})
        return engine_bytes(10**6, engine=engine, optimizer="adamw", num_ranks=ranks, ema=False, on_gpu=True) / 10**6

    assert per_weight(0, 4, "fp32") == per_weight(0, 1, "fp32") == 4 + 4 + 4 + 8
    assert [per_weight(1, ranks) for ranks in (1, 4)] == [2 + 2 + 4 + 12, 2 + 2 + 4 + 3]
    assert per_weight(2, 4) == 2 + 2 + 1 + 3
    assert per_weight(3, 4) == 0.5 + 2 + 2 + 1 + 3


def test_limits_of_cgroups_are_seen(tmp_path: Path) -> None:
    def group(path: str, **files: str) -> None:
        (tmp_path / path).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / path / name.replace("__", ".")).write_text(text)

    group("slurm/job", memory__max="max\n", memory__current="5\n", memory__stat="inactive_file 1\n")
    (tmp_path / "slurm" / "memory.max").write_text("1000\n")
    (tmp_path / "slurm" / "memory.current").write_text("700\n")
    (tmp_path / "slurm" / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    assert list(cgroup_rooms(tmp_path, "0::/slurm/job\n")) == [400]
    version_1 = {
        "memory__limit_in_bytes": "500",
        "memory__usage_in_bytes": "80",
        "memory__stat": "total_inactive_file 30",
    }
    group("memory/job", **version_1)
    assert list(cgroup_rooms(tmp_path, "4:memory:/job\n3:cpuset:/job\n")) == [450]
    assert list(cgroup_rooms(tmp_path, "0::/elsewhere\n")) == []
