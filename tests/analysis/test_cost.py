"""Table S.3: memory and FLOPs as docs/papers.md reads them; seconds are of training steps."""

from analysis.cost import MODELS, Model, Row, _cost, cells, measure
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
    specs = (MixerSpec.model_validate({"kind": "mixer", **small}), SparseMlpSpec.model_validate({"kind": "sw_mlp", **small}))
    models = [Model(type(spec).__name__, spec, 4, None) for spec in specs]
    first, second = measure(models, device="cpu", num_rounds=1, num_steps=1)
    assert first.times_the_first == 1
    assert second.epoch_s > 0 and second.times_the_first == second.epoch_s / first.epoch_s
    row = cells(Row(MODELS[0], 393_216, 12_582_912, 61.0, 1.0))
    assert row == ("MLP-Mixer", "0.393 MB", "12.6 M", "61.0 s", "1 x", "3.9 MB", "12.5 M", "6.08 s", "1 x")
