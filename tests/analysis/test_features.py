"""CKA agrees with its definition. The features are the outputs of each mixing before its skip
path."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from analysis.cli import main
from analysis.features.drawing import _draw_density
from analysis.features.hsic import WholeCka, WholeSample, cka, gram, hsic
from analysis.features.mixings import Images, Subject
from data_prep.manifest import load_manifest
from finetune.looks import looks
from finetune.session import open_backbone
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.image_model import ImageModel
from pretrain.models.mixer import MixerBlock
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, StructuredMlpSpec
from tests.conftest import Capture, Patch
from tests.errors import fails, printed_errors
from tests.finetune.tiny import CPU, normalized, spoil, write_folder

MIXER = MixerSpec(kind="mixer", patch_size=4, num_channels=6, depth=2, expansion=2)
SPARSE = SparseMlpSpec(
    kind="sw_mlp",
    patch_size=4,
    num_channels=4,
    depth=2,
    density=0.5,
    expansion=2,
    outer_activation=True,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_one(x: Tensor, y: Tensor) -> float:
    return float(hsic(gram(x)[None], gram(y)[None]))


def whole(x: Tensor, y: Tensor, *, pieces: int) -> float:
    found = WholeSample()
    for rows, others in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        found.add(rows, others)
    return float(found.hsic())


def four_at_a_time(x: Tensor, y: Tensor) -> float:
    """Return the U-statistic by its definition: the mean over all ordered choices of four
    images."""
    k, m = ((each @ each.T).numpy() for each in (x, y))
    chosen = itertools.permutations(range(len(x)), 4)
    return float(np.mean([k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in chosen]))


def test_both_forms_are_the_u_statistic_over_four_pictures() -> None:
    x, y = random(7, 5) + 3, random(7, 3, seed=1) @ random(3, 3, seed=2) - 1
    expected = four_at_a_time(x, y)
    assert of_one(x, y) == pytest.approx(expected, rel=1e-12)
    for pieces in (1, 3):
        assert whole(x, y, pieces=pieces) == pytest.approx(expected, rel=1e-12)


def test_the_first_coordinates_of_a_gaussian_have_the_root_of_their_share() -> None:
    batches = [(x, x[:, :3]) for x in (random(64, 12, seed=seed) for seed in range(200))]
    sums = torch.tensor([[of_one(x, y), of_one(x, x), of_one(y, y)] for x, y in batches]).mean(0)
    averaged = float(cka(sums[:1, None], sums[1:2], sums[2:]))
    found = WholeCka()
    for x, y in batches:
        found.add(x, y)
    assert averaged == pytest.approx((3 / 12) ** 0.5, abs=0.01) and found.value() == pytest.approx(
        averaged, abs=0.01
    )


def test_rotation_scale_and_origin_change_nothing() -> None:
    x, y = random(40, 6), random(40, 4, seed=1)
    x[:, :2] += y[:, :2]
    turned = 7 * x @ torch.linalg.qr(random(6, 6, seed=2))[0] + 5
    one, other = (torch.stack([gram(each) for each in (a, y)]) for a in (x, turned))
    first, second = (
        cka(found, found.diagonal(), found.diagonal())
        for found in (hsic(one, one), hsic(other, other))
    )
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
    assert 0.1 < first[0, 1] < 0.9


@pytest.mark.parametrize(
    "spec",
    [
        MIXER,
        MixerSpec(
            kind="mixer",
            patch_size=4,
            num_channels=6,
            depth=2,
            layers_per_mixing=1,
            permuted_blocks=(1,),
        ),
        SPARSE,
        MlpSpec(kind="mlp", depth=3, width=10),
        MlpSpec(kind="mlp", depth=4, width=10, bottleneck="none", skip_every=2),
    ],
    ids=lambda spec: spec.label,
)
def test_features_are_what_is_added_to_the_skip_path(
    spec: AnySpec, tmp_path: Path, shapes: Path
) -> None:
    subject = opened(write_folder(tmp_path, spec=spec), shapes)
    model = subject.backbone.model
    assert model is not None
    images = random(5, 3, 16, 16)
    _, features = subject.run(images, lambda output: output)
    assert len(features) == (2 if isinstance(spec, MixerSpec) else 1) * spec.depth
    x = model.embed(images)
    for expected, feature in zip(mixed_by_hand(model, x), features, strict=True):
        torch.testing.assert_close(
            feature.flatten(1) @ feature.flatten(1).T, expected.flatten(1) @ expected.flatten(1).T
        )


def opened(folder: Path, dataset: Path) -> Subject:
    backbone = open_backbone(Checkpoint.open(folder), load_manifest(dataset), device=CPU)
    assert backbone.model is not None
    backbone.model.double()
    return Subject.of(str(folder), backbone, device=CPU)


def mixed_by_hand(model: ImageModel, x: Tensor) -> list[Tensor]:
    """Return the output of each mixing minus its skip path, and the output of each layer in paths of
    several layers."""
    found = []
    with torch.no_grad():
        for block in model.blocks:
            if isinstance(block, MixerBlock):
                after = block(x)
                nothing = block.channel_mixing.register_forward_hook(
                    lambda _module, _arguments, out: torch.zeros_like(out)
                )
                between = block(x)
                nothing.remove()
                found += [between - x, after - between]
                x = after
            elif isinstance(block, torch.nn.Sequential):
                inner = x
                for layer in block:
                    inner = layer(inner)
                    found.append(inner)
                x = x + inner
            else:
                found.append(block(x) - x)
                x = block(x)
    return found


def plain_cka(first: list[list[Tensor]], second: list[list[Tensor]]) -> np.ndarray:
    """Return the CKA of features by batch and layer, each trace computed separately."""

    def one(x: Tensor, y: Tensor) -> float:
        n, grams = len(x), []
        for each in (x, y):
            features = each.flatten(1).double().numpy()
            grams.append(features @ features.T * (1 - np.eye(n)))
        k, m = grams
        middle = k.sum() * m.sum() / ((n - 1) * (n - 2))
        return float((np.trace(k @ m) + middle - 2 / (n - 2) * (k @ m).sum()) / (n * (n - 3)))

    def mean(a: list[list[Tensor]], b: list[list[Tensor]], i: int, j: int) -> float:
        return float(np.mean([one(x[i], y[j]) for x, y in zip(a, b, strict=True)]))

    shape = len(first[0]), len(second[0])
    selves = [[mean(each, each, i, i) for i in range(len(each[0]))] for each in (first, second)]
    cross = [mean(first, second, *place) for place in np.ndindex(shape)]
    return np.reshape(cross, shape) / np.sqrt(np.outer(*selves))


@pytest.mark.slow
def test_the_command_averages_over_batches_before_the_ratio(
    tmp_path: Path, shapes: Path, capsys: Capture
) -> None:
    sparser = SPARSE.model_copy(update={"density": 0.25})
    specs = {"m0": MIXER, "m1": MIXER, "s0": SPARSE, "s1": SPARSE, "t0": sparser}
    places = {name: str(tmp_path / name) for name in specs}
    for name, spec in specs.items():
        write_folder(tmp_path / name, shapes, spec=spec)
        if name.endswith("1"):
            reseed(tmp_path / name)
    pairs = [("m0", "s0"), ("m1", "s1"), ("m0", "t0")]
    first = [places["m0"], places["s0"], str(shapes), "--device", "cpu"]
    more = [w for pair in pairs[1:] for w in ("--pair", *(places[name] for name in pair))]
    out = ["--batch", "18", "--full-sample", "--out", str(tmp_path / "out" / "cka")]
    assert main(["cka", *first, *more, *out]) == 0
    facts = json.loads((tmp_path / "out" / "cka.json").read_text())
    assert (facts["num_images"], facts["num_batches"]) == (72, 4)
    # 4 layers in both Mixers, 2 in three SW-MLPs
    assert facts["gram_bytes"] == (2 * 4 + 3 * 2) * 18**2 * 8
    ends = ("-heat.png", "-heat.svg", "-density.png", "-density.svg", ".json", ".parquet")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"cka{end}" for end in ends}
    rows = pd.read_parquet(tmp_path / "out" / "cka.parquet")
    order = torch.from_numpy(np.random.default_rng(0).permutation(72))
    features = {}
    for name, place in places.items():
        images, _ = normalized(tmp_path / name, shapes)
        subject = opened(Path(place), shapes)
        batches = (images[ids].double() for ids in order.split(18))
        features[name] = [subject.run(batch, torch.clone)[1] for batch in batches]
    means = []
    for one, other in pairs:
        own = rows[(rows.run_a == places[one]) & (rows.run_b == places[other])]
        expected = plain_cka(features[one], features[other])
        np.testing.assert_allclose(own.cka.to_numpy().reshape(4, 2), expected, rtol=1e-3)
        assert own.on_diagonal.tolist() == [*[True, False] * 2, *[False, True] * 2]
        means.append(expected[[0, 1, 2, 3], [0, 0, 1, 1]].mean())
        both = [
            [[torch.cat(layer) for layer in zip(*features[name], strict=True)]]
            for name in (one, other)
        ]
        whole = plain_cka(*both)[[0, 1, 2, 3], [0, 0, 1, 1]]
        np.testing.assert_allclose(own.cka_whole.dropna(), whole, rtol=1e-3)
    sparse, dense = facts["groups"]
    assert (sparse["density"], dense["density"]) == (0.25, 0.5)
    assert dense["diagonal"] == pytest.approx(np.mean(means[:2]), rel=1e-3)
    assert dense["sd"] == pytest.approx(np.std(means[:2], ddof=1), rel=1e-2)
    ceiling = plain_cka(features["m1"], features["m0"]).diagonal().mean()
    assert dense["ceiling_a"] == pytest.approx(ceiling, rel=1e-3)
    assert sparse["ceiling_a"] is None and sparse["sd"] is None
    assert dense["low"] <= dense["diagonal"] <= dense["high"]
    assert abs(dense["floor"]) < 0.15 < dense["diagonal"]
    assert "ceiling" in capsys.readouterr().out
    assert main(["cka", *first, "--batch", "36", "--out", str(tmp_path / "few")]) == 0
    few = json.loads((tmp_path / "few.json").read_text())
    assert few["groups"][0]["low"] is None  # two batches have no interval


def test_long_names_are_below_the_figure_by_density() -> None:
    numbers = {"density": 0.5, "diagonal": 0.5, "sd": 0.1, "floor": 0.0, "ceiling_a": 0.9}
    models = [f"model {number} of " * 8 for number in range(15)]
    with looks():
        figure = _draw_density(pd.DataFrame({"model_a": models, **numbers}))
        figure.draw_without_rendering()
    names, (axes,) = figure.legends[0].get_window_extent(), figure.axes
    assert names.x0 >= 0 and names.x1 <= figure.bbox.x1 and names.y0 >= 0
    assert names.y1 <= axes.get_tightbbox().y0 and axes.bbox.height > 100


def reseed(folder: Path) -> None:
    """Replace the weights by the weights of another seed."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(9)
    save_file(
        {
            name: (
                each + torch.randn(each.shape, generator=noise) * 0.2
                if each.is_floating_point()
                else each
            )
            for name, each in weights.items()
        },
        folder / "model.safetensors",
    )
    for hashes in folder.glob("sha256.json"):
        hashes.unlink()


def test_a_batch_of_too_few_pictures_is_left_out(shapes: Path, monkeypatch: Patch) -> None:
    def batches(count: int) -> list[int]:
        shown = Images(str(shapes), load_manifest(shapes), "val", batch=8, count=count)
        return [
            len(batch.samples) for batch in shown.batches("", size=16, device=torch.device("cpu"))
        ]

    assert (batches(4), batches(72)) == ([4], [8] * 9)
    spoil(monkeypatch, int(np.random.default_rng(0).permutation(72)[0]))
    assert batches(72) == [7] + [8] * 8
    with fails("damaged", f"{shapes}, val"):
        batches(4)


def test_runs_that_cannot_be_compared(tmp_path: Path, shapes: Path, capsys: Capture) -> None:
    mixer = str(write_folder(tmp_path / "mixer", shapes, spec=MIXER))
    spec = StructuredMlpSpec(kind="structured", form="monarch")
    other = str(write_folder(tmp_path / "monarch", shapes, spec=spec))
    for words, field, code in (
        ([other, str(shapes)], other, "unsupported"),
        ([mixer, str(shapes), "--out", "x.png"], "--out", "bad-value"),
    ):
        assert main(["cka", mixer, *words]) == 2
        assert printed_errors(capsys.readouterr().err) == [(field, code)]
    for words in ([str(tmp_path / "none"), str(shapes)], [mixer, str(shapes), "--split", "t"]):
        assert main(["cka", mixer, *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
