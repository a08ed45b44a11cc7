"""Table S.3: memory and FLOPs as docs/papers.md reads them; seconds are of training steps."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from analysis.cost import MODELS, Model, Row, _cost, cells, draw, measure
from analysis.output import write
from pretrain.models.spec import MixerSpec, SparseMlpSpec


def test_memory_and_flops_are_those_that_the_page_of_the_papers_has() -> None:
    found = {model.name: _cost(model) for model in MODELS}
    assert found == {
        "MLP-Mixer": (393_216, 12_582_912),
        "RP-Mixer": (393_216, 12_582_912),
        "SW-MLP, stored sparse": (25_165_824, 12_582_912),
        "SW-MLP, masked": (3_221_225_472, 805_306_368),
    }


def test_models_are_trained_and_ratios_are_to_the_first() -> None:
    small = {"patch_size": 16, "num_channels": 4, "depth": 1}
    specs = (
        MixerSpec.model_validate({"kind": "mixer", **small}),
        SparseMlpSpec.model_validate({"kind": "sw_mlp", **small}),
    )
    models = [Model(type(spec).__name__, spec, 4, None) for spec in specs]
    first, second = measure(models, device="cpu", num_rounds=1, num_steps=1)
    assert first.times_the_first == 1
    assert second.epoch_s > 0 and second.times_the_first == second.epoch_s / first.epoch_s
    ours = draw([first, second], device="cpu").axes[0].lines[0]
    np.testing.assert_array_equal(np.asarray(ours.get_xdata()), [first.epoch_s, second.epoch_s])
    row = cells(Row(MODELS[0], 393_216, 12_582_912, 61.0, 1.0))
    assert row == (
        "MLP-Mixer",
        "0.393 MB",
        "12.6 M",
        "61.0 s",
        "1 x",
        "3.9 MB",
        "12.5 M",
        "6.08 s",
        "1 x",
    )


def test_rows_of_several_kinds_keep_all_their_columns(tmp_path: Path) -> None:
    write(tmp_path / "mixed", facts={}, read=(), rows=[{"a": 1}, {"b": 0.5, "a": 2}, {"c": "x"}])
    table = pq.read_table(tmp_path / "mixed.parquet")
    assert table.to_pydict() == {"a": [1, 2, None], "b": [None, 0.5, None], "c": [None, None, "x"]}
