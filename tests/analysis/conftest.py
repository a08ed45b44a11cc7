"""Run directories written by hand: the files that a run leaves, without training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.files import Snapshot, TrainerState, publish
from pretrain.engine.step import EngineState
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec
from tests.records import write_record_of

WriteRun = Callable[..., Path]

MLP = MlpSpec(kind="mlp", depth=2, width=6)
MIXER = MixerSpec(kind="mixer", patch_size=4, num_channels=8, depth=3)


def make_card(spec: AnySpec, *, image_size: int = 16) -> ModelCard:
    return ModelCard(
        model=spec,
        image_size=image_size,
        classes=("ant", "bee"),
        channel_mean=(0.5,) * 3,
        channel_std=(0.2,) * 3,
        dataset="animals",
        content_hash="0" * 64,
        step=10,
        run_key="key",
    )


def write_checkpoint(
    run: Path, spec: AnySpec, weights: dict[str, Tensor], *, image_size: int = 16
) -> Path:
    card = make_card(spec, image_size=image_size)
    state = EngineState(weights=weights, optimizer={}, num_updates=10)
    snapshot = Snapshot(state, TrainerState(step=10, samples_consumed=40), card)
    publish(run, snapshot)
    return snapshot.place(run)


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return a function that writes `tmp_path/runs/NAME`: config, event log (metrics as (step,
    values)), and optionally a checkpoint and a result."""

    def write(
        name: str,
        settings: dict[str, Any],
        *,
        result: dict[str, Any] | None = None,
        metrics: list[tuple[int, dict[str, float]]] | None = None,
        spec: MlpSpec | MixerSpec | None = None,
        tags: dict[str, str] | None = None,
    ) -> Path:
        run = tmp_path / "runs" / name
        (run / "tracking").mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        write_record_of(run, settings, root=tmp_path)
        events: list[dict[str, Any]] = [
            {"event": "start", "params": {}, "tags": tags or {}, "time_ms": 1}
        ]
        events += [
            {"event": "metrics", "step": step, "values": values, "time_ms": 2}
            for step, values in metrics or []
        ]
        (run / "tracking" / "journal.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in events)
        )
        if result is not None:
            (run / "result.json").write_text(json.dumps(result))
        if spec is not None:
            write_checkpoint(run, spec, {"head.bias": torch.zeros(2)})
        return run

    return write
