"""Spectra, structure and masks, compared with dense matrices (kron, svdvals, permutations), exact
forms and closed laws."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.sparse import csr_matrix

from analysis.cli import main
from analysis.matrices import initial, masks, propositions, spectra, structure
from analysis.matrices.weights import matrices_of
from data_prep.publish import write_json
from pretrain.models.build import build_model
from pretrain.models.mixer import Mixer
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec
from pretrain.record import RECORD, RunRecord
from tests.analysis.conftest import make_card, write_checkpoint
from tests.conftest import Capture, Patch

GENERATOR = np.random.default_rng(0)
S, C, H, V = 4, 3, 5, 2
SIDES: dict[str, tuple[int, int]] = {"out": (S, C), "into": (H, V)}


@pytest.mark.parametrize("shape", [(300, 90), (90, 300), (128, 128), (1, 7)])
@pytest.mark.parametrize("decades", [0, 3])
def test_singular_values_are_those_of_a_decomposition(shape: tuple[int, int], decades: int) -> None:
    """Relative error 1e-6 above a thousandth of the largest singular value, for float32 weights
    too."""
    left, right = (np.linalg.qr(GENERATOR.standard_normal((side, min(shape))))[0] for side in shape)
    weight = (left * np.logspace(0, -decades, min(shape))) @ right.T
    for given in (weight, weight.astype(np.float32), csr_matrix(weight)):
        dense = given if isinstance(given, np.ndarray) else given.toarray()
        expected = np.linalg.svd(dense.astype(float), compute_uv=False)
        np.testing.assert_allclose(spectra.singular_values(given), expected, rtol=1e-6)


def test_empty_rows_and_columns_are_singular_values_of_zero(monkeypatch: Patch) -> None:
    weight, places = np.zeros((50, 70)), (GENERATOR.integers(50, size=30), range(0, 60, 2))
    weight[places] = GENERATOR.standard_normal(30)
    stack = np.stack([weight / 2, weight])
    for most in (0, 10**6):  # as an operator, and as a dense matrix
        monkeypatch.setattr(spectra, "LARGEST_DENSE", most)
        for given in (weight, csr_matrix(weight), stack):
            dense = given if isinstance(given, np.ndarray) else given.toarray()
            expected = np.sort(np.linalg.svd(dense, compute_uv=False), axis=None)[::-1]
            np.testing.assert_allclose(spectra.singular_values(given), expected, atol=1e-7)
    monkeypatch.setattr(spectra, "LONGEST_SIDE", 5)
    for given in (weight, csr_matrix(weight), stack):
        assert spectra.singular_values(given) is None
        found = spectra.spectrum(spectra.Matrix("x", 0, given, 1), initial=None)
        assert found["sigma_max"] == pytest.approx(np.linalg.norm(weight, 2), rel=1e-8)
        assert found["effective_rank"] is found["distance"] is None


@pytest.mark.parametrize("permuted", [(), "all"])
def test_a_mixing_has_the_spectrum_of_its_effective_matrix(permuted: object) -> None:
    """The Jacobian of a linear mixing on all S C entries has the singular values of W, each
    `copies` times."""
    fields = {"layers_per_mixing": 1, "activation": "identity", "permuted_blocks": permuted}
    sizes = {"patch_size": 4, "num_channels": 6, "depth": 1}
    spec = MixerSpec.model_validate({"kind": "mixer", **sizes, **fields})
    model = build_model(spec, num_classes=2, image_size=8, seed=0)
    assert isinstance(model, Mixer)
    block = model.blocks[0]
    named = {each.name: each for each in matrices_of(model, make_card(spec, image_size=8))}

    def tokens_mixed(entries: torch.Tensor) -> torch.Tensor:
        if not permuted:
            x_BCS = entries.view(1, 4, 6).transpose(1, 2)
            return block.token_mixing(x_BCS).transpose(1, 2).flatten()
        parts = block.before_tokens(entries.view(1, 24)).view(1, 6, 4)
        return block.after_tokens(block.token_mixing(parts).flatten(1)).flatten()

    x = torch.randn(24, generator=torch.Generator().manual_seed(0))
    effective = torch.autograd.functional.jacobian(tokens_mixed, x).double()
    matrix, expected = named["token_mixing.linear"], torch.linalg.svdvals(effective)
    copies = [named[name].copies for name in ("channel_mixing.linear", "stem")]
    assert (matrix.copies, matrix.block, copies) == (6, 0, [4, 4])
    values = np.repeat(spectra.singular_values(matrix.weight), 6)
    np.testing.assert_allclose(values, expected.numpy(), rtol=1e-5)
    found = spectra.spectrum(matrix, initial=None)
    stable_rank = float(effective.norm()) ** 2 / found["sigma_max"] ** 2
    assert found["stable_rank"] * matrix.copies == pytest.approx(stable_rank, rel=1e-5)
    parts = expected / expected.sum()
    effective_rank = math.exp(-float((parts * parts.log()).sum()))
    assert found["effective_rank"] * matrix.copies == pytest.approx(effective_rank, rel=1e-5)


def test_measures_of_known_spectra() -> None:
    assert spectra.effective_rank(np.full(7, 3.0)) == pytest.approx(7)
    assert spectra.effective_rank(np.array([2.0, 0, 0])) == pytest.approx(1)
    of_rank_2 = GENERATOR.standard_normal((300, 2)) @ GENERATOR.standard_normal((2, 400))
    parts = np.linalg.svd(of_rank_2, compute_uv=False)[:2]
    parts /= parts.sum()
    found = spectra.effective_rank(spectra.singular_values(of_rank_2))
    assert found == pytest.approx(np.exp(-parts @ np.log(parts)), rel=1e-9)  # no rounding errors
    dense = spectra.Matrix("x", 0, GENERATOR.standard_normal((600, 300)) * 5, 1)
    spiked = spectra.Matrix("x", 0, dense.weight + 10 * np.ones((600, 300)), 1)
    small, large = (spectra.spectrum(each, initial=dense) for each in (dense, spiked))
    assert small["distance"] < 0.01 and small["drift"] == 0
    edge = 5 * (600**0.5 + 300**0.5)
    assert small["sigma_max"] == pytest.approx(small["gaussian_edge"], rel=0.03) == edge
    assert large["distance"] > 0.5 and large["stable_rank"] < 2
    assert large["drift"] == pytest.approx(10 / 5, rel=0.01)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_the_law_has_marchenko_and_pasturs_moments(ratio: float) -> None:
    """The moments are 1, 1 + ratio and 1 + 3 ratio + ratio^2 (Narayana numbers)."""
    x, fractions = spectra.marchenko_pastur(ratio)
    middles, weights = (x[1:] + x[:-1]) / 2, np.diff(fractions)
    moments = [float((weights * middles**k).sum()) for k in (0, 1, 2, 3)]
    assert moments == pytest.approx([1, 1, 1 + ratio, 1 + 3 * ratio + ratio**2], rel=1e-4)


SW = SparseMlpSpec(kind="sw_mlp", patch_size=4, num_channels=8, depth=2, density=0.3)
MLP = MlpSpec(kind="mlp", depth=2, width=16, expansion=2)


def write_trained(run: Path, spec: AnySpec, *, grown: float) -> None:
    """Write a run whose weights are `grown` times the initial weights of seed 5 in its config."""
    weights = build_model(spec, num_classes=2, image_size=8, seed=5).state_dict()
    weights = {name: x * grown if x.is_floating_point() else x for name, x in weights.items()}
    write_checkpoint(run, spec, weights, image_size=8)
    write_json(run / RECORD, asdict(RunRecord("pretrain", seed=5)))
    settings = {"train": {"seed": 5, "duration": "1 epochs"}, "run_dir": str(run)}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.slow
def test_spectra_and_structure_of_runs(tmp_path: Path, capsys: Capture) -> None:
    growths = {"mlp": (MLP, 1.5), "sw": (SW, 3.0)}
    for name, (spec, grown) in growths.items():
        write_trained(tmp_path / name, spec, grown=grown)
    runs = [str(tmp_path / name) for name in growths]
    assert main(["spectra", *runs, "--out", str(tmp_path / "spectra"), "--device", "cpu"]) == 0
    rows = pd.read_parquet(tmp_path / "spectra.parquet")
    for run, (_, growth) in growths.items():
        before, after = (rows[(rows.run == run) & (rows.step == step)] for step in (0, 10))
        assert before.name.tolist() == after.name.tolist() and len(before) > 3
        assert (before.drift == 0).all()
        np.testing.assert_allclose(after.drift, growth - 1, rtol=1e-5)
        np.testing.assert_allclose(after.sigma_max, growth * before.sigma_max, rtol=1e-5)
        for same in ("effective_rank", "distance"):
            np.testing.assert_allclose(after[same], before[same], atol=1e-4)
    assert (tmp_path / "spectra.png").exists()
    assert len(json.loads((tmp_path / "spectra.json").read_text())["inputs"]) == 2
    assert main(["structure", *runs, "--quick", "--out", str(tmp_path / "structure")]) == 0
    found = pd.read_parquet(tmp_path / "structure.parquet")
    assert {*found.form} == {*structure.FORMS} and {*found.step} == {0, 10}
    grids = found.out[found.run == "sw"].map(tuple)
    assert {*grids} == {(4, 8)}  # tokens by channels
    assert (found.distance / found.random).between(0.5, 1.5).all()
    facts = json.loads((tmp_path / "structure.json").read_text())
    assert [each["holds"] for each in facts["statements"]] == ["yes"] * 4
    least = [each["left"] - each["right"] for each in facts["minima"]]
    assert len(least) == 6 and min(least) > 0
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_matrix_that_has_the_form_by_its_sides_is_left_out(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """A matrix with a prime side and a matrix that is too large are null in the table, and
    reported."""
    write_trained(tmp_path / "prime", MlpSpec(kind="mlp", depth=1, width=13), grown=1.0)
    write_trained(tmp_path / "mlp", MLP, grown=1.0)
    for run, most, name in (("prime", 4096**2, "contract"), ("mlp", 16 * 32 - 1, "expand")):
        monkeypatch.setattr(structure, "LARGEST_DENSE", most)
        words = ["structure", "--quick", "--out", str(tmp_path / "x"), str(tmp_path / run)]
        assert main(words) == 0
        assert [run, name, "monarch"] in [
            line.split() for line in capsys.readouterr().out.splitlines()
        ]
    assert pd.read_parquet(tmp_path / "x.parquet").distance.isna().all()


def test_a_figure_of_the_training_needs_three_steps() -> None:
    matrix = spectra.Matrix("linear", 0, GENERATOR.standard_normal((8, 4)), 1)
    spectrum = spectra.spectrum(matrix, initial=matrix)
    rows = pd.DataFrame({"run": "a", "step": step, **spectrum} for step in (0, 5, 9))
    assert set(spectra.draw(rows[:2])) == {""} and set(spectra.draw(rows)) == {"", "training"}


def test_matrices_of_a_form_have_no_distance_to_it() -> None:
    kronecker = np.kron(GENERATOR.standard_normal((S, H)), GENERATOR.standard_normal((C, V)))
    per_row, per_column = GENERATOR.standard_normal((H, C, V)), GENERATOR.standard_normal((C, S, H))
    monarch = np.einsum("csh,hcv->schv", per_column, per_row).reshape(S * C, H * V)
    assert structure.distance(kronecker, "kronecker", **SIDES) < 1e-7
    assert structure.distance(kronecker, "monarch", **SIDES) < 1e-7
    assert structure.distance(monarch, "monarch", **SIDES) < 1e-7
    assert structure.distance(monarch, "kronecker", **SIDES) > 0.1


def nearest(weight: np.ndarray, form: str) -> np.ndarray:
    """Return the weight with each slice replaced by its best approximation of rank 1."""
    slices = structure.slices_of(weight, form, **SIDES).numpy()
    left, values, right = np.linalg.svd(slices, full_matrices=False)
    of_rank_1 = (left[..., :1] * values[:, :1, None]) @ right[:, :1]
    if form == "monarch":
        return of_rank_1.reshape(C, H, S, V).transpose(2, 0, 1, 3).reshape(weight.shape)
    return of_rank_1.reshape(S, H, C, V).transpose(0, 2, 1, 3).reshape(weight.shape)


@pytest.mark.parametrize("form", structure.FORMS)
def test_the_distance_is_that_to_the_nearest(form: str) -> None:
    """The nearest matrix has the form itself, and no neighbor in the form is nearer."""
    weight = GENERATOR.standard_normal((S * C, H * V))
    near = nearest(weight, form)
    assert structure.distance(near, form, **SIDES) < 1e-7
    least = np.linalg.norm(weight - near)
    found = structure.distance(weight, form, **SIDES)
    assert found == pytest.approx(least / np.linalg.norm(weight), rel=1e-9)
    for _ in range(20):
        moved = nearest(near + 0.1 * GENERATOR.standard_normal(weight.shape), form)
        assert np.linalg.norm(weight - moved) > least


def test_the_nearest_kronecker_product_by_torch() -> None:
    """Van Loan: the best A (x) B is the first singular pair of the matrix whose rows are the
    blocks."""
    weight = torch.from_numpy(GENERATOR.standard_normal((S * C, H * V)))
    blocks = torch.stack([block.flatten() for row in weight.split(C) for block in row.split(V, 1)])
    left, values, right = torch.linalg.svd(blocks, full_matrices=False)
    expected = torch.kron(values[0] * left[:, 0].view(S, H), right[0].view(C, V))
    np.testing.assert_allclose(nearest(weight.numpy(), "kronecker"), expected, atol=1e-12)


def test_a_random_matrix_of_equal_spectrum_is_another_one() -> None:
    weight = GENERATOR.standard_normal((12, 30)) ** 3
    expected = np.linalg.svd(weight, compute_uv=False)
    other = structure.of_equal_spectrum(expected, weight.shape, GENERATOR).numpy()
    np.testing.assert_allclose(np.linalg.svd(other, compute_uv=False), expected, rtol=1e-8)
    assert abs((weight * other).sum()) < 0.5 * np.linalg.norm(weight) ** 2
    cases = {(4096, None): (64, 64), (48, 16): (16, 3), (50, 16): (5, 10)}
    for (side, tokens), grid in cases.items():
        assert structure.grid_of(side, tokens=tokens) == grid


def test_the_regularizers_of_proposition_3_3() -> None:
    v, w = GENERATOR.standard_normal((S, S)), GENERATOR.standard_normal((C, C))
    left, right = propositions.both_sides(v, w)
    assert left == pytest.approx((np.linalg.norm(v) ** 2 + np.linalg.norm(w) ** 2) / 2)
    assert right == pytest.approx(np.abs(np.kron(v, w)).sum() / (C * S)) and right < left
    found = propositions.bounds(draws=30).groupby("kind").ratio
    assert found.max().max() <= 1 + 1e-12 and found.min()["signs"] == pytest.approx(1)
    assert found.max()[["Gaussian", "cubes"]].between(0, 0.9).all()


@pytest.mark.parametrize("strength", [0.02, 0.3, 100.0])
def test_the_minima_of_proposition_3_3_in_closed_form(strength: float) -> None:
    """L(B) = |B - Y|_F^2 / (2 m). Minimized over B: each entry of Y moves towards 0. Over V and W:
    the first singular value of Y's rearrangement (Van Loan) moves towards 0."""
    sides, width = (2, 3), 6
    targets = np.random.default_rng(0).standard_normal((width, width))
    data, distance = (np.eye(width), targets), width * strength
    kept = np.sign(targets) * np.maximum(abs(targets) - distance, 0)
    expected = ((kept - targets) ** 2).sum() / (2 * width) + strength * abs(kept).sum()
    right = propositions.minimum_over_weights(*data, strength)
    assert right == pytest.approx(expected, rel=1e-8)
    pairs = targets.reshape(*sides, *sides).transpose(0, 2, 1, 3).reshape(4, 9)
    largest = np.linalg.norm(pairs, 2)
    expected = (np.linalg.norm(targets) ** 2 - max(largest - distance, 0) ** 2) / (2 * width)
    left = propositions.minimum_over_factors(*data, strength, sides=sides)
    assert left == pytest.approx(expected, rel=1e-8)


def test_a_mixing_without_and_with_an_activation_is_a_wide_mlp() -> None:
    """Proposition 3.2 and Corollary 3.4. J is a permutation with J vec(X) = vec(X^T)."""
    x, j = GENERATOR.standard_normal((S, C)), propositions.commutation(S, C)
    np.testing.assert_array_equal(j @ x.ravel("F"), x.T.ravel("F"))
    assert (j.sum(0) == 1).all() and (j.sum(1) == 1).all()
    found = propositions.equivalences(draws=10)
    assert len(found) == 10 and found.to_numpy().max() < 1e-12


def test_at_fixed_omega_measured_values_meet_the_law_with_gamma() -> None:
    """Figure 4, right, small: q^2 = p gamma m is closer than q^2 = p m, and both are
    above 1 + sqrt(gamma)."""
    rows = initial.widths(((8, 40), (16, 24), (20, 20)), omega=2**14, gamma=4.0, seeds=3)
    assert rows.width.value_counts().to_dict() == {320: 3, 384: 3, 400: 3}
    assert rows.hidden_width[0] == 1280
    means = rows.groupby("width").mean(numeric_only=True)
    assert ((means.sw_mlp - means.with_gamma).abs() < (means.sw_mlp - means.printed).abs()).all()
    assert (means.dense == 3).all() and (means.with_gamma > 3).all()
    assert (means.with_gamma < means.printed).all()
    exact = 9 + 3 * 9 * 2 * (1 - 2**14 / (4 * 400**2)) / (2**14 / (4 * 400))
    assert means.printed[400] == pytest.approx(math.sqrt(exact))
    assert initial.draw_widths(rows, title="Ω = 2^14, γ = 4").axes


def test_the_sparsest_matrices() -> None:
    """Isolated connections are singular values themselves. The mean diagonal entry of Z Z^T is 1
    (D.1): the squared singular values add up to m."""
    rows = initial.sparser((1.9,), (100,), seeds=2, with_all_values=True)
    assert rows.width[0] == round(100**1.45) and rows.density[0] == pytest.approx(100**-1.9)
    assert (rows["values"].map(len) <= rows.connections).all()
    squares = rows["values"].map(lambda values: (np.array(values) ** 2).sum())
    assert squares.tolist() == pytest.approx([100**1.45] * 2, rel=1e-3)
    assert rows.sigma_max.tolist() == rows["values"].str[0].tolist()


def test_the_largest_value_rises_with_a_from_2() -> None:
    """Figure S.1, right, and D.1: a = 0 is a dense matrix, whose largest singular value tends to
    2."""
    exponents, omegas = (0.0, 0.75, 1.5), (100, 1_000, 10_000)
    largest = initial.sparser(exponents, omegas, seeds=4, with_all_values=False)
    assert largest.width[largest.omega == 100].unique().tolist() == [10, 56, 316]
    means = largest.groupby(["omega", "a"]).sigma_max.mean().unstack()
    assert (means.diff(axis=1).iloc[:, 1:] > 0).all(axis=None)
    errors = (means[0.0] - 2).abs()
    assert errors.is_monotonic_decreasing and errors[10_000] < 0.06
    center = initial.sparser((1.5,), (30,), seeds=1, with_all_values=True)
    right = initial.draw_sparser(center, largest).axes[1]
    drawn = [bars.lines[0].get_xdata().tolist() for bars in right.containers]
    assert drawn == [list(exponents)] * len(omegas)


def test_masks_are_those_of_the_matrices(tmp_path: Path) -> None:
    by_name = list(masks.masks_of(S, C, seed=3).values())
    v, w = GENERATOR.standard_normal((S, S)), GENERATOR.standard_normal((C, C))
    tokens, channels = np.kron(v, np.eye(C)), np.kron(np.eye(S), w)
    x = GENERATOR.standard_normal((S, C))
    np.testing.assert_allclose(tokens @ x.ravel(), (v @ x).ravel())  # a vector is token after token
    for mask, matrix in zip(by_name, (tokens, channels, channels @ tokens), strict=False):
        np.testing.assert_array_equal(mask, matrix != 0)
    for plain, permuted in zip(by_name[:2], by_name[4:6], strict=True):
        assert sorted(permuted.sum(0)) == sorted(plain.sum(0))
        assert not np.array_equal(plain, permuted)
    words = ["masks", "--tokens", "3", "--channels", "4", "--out", str(tmp_path / "masks")]
    assert main(words) == 0
    rows = pd.read_parquet(tmp_path / "masks.parquet")
    assert rows.connections.tolist()[:3] == [3**2 * 4, 4**2 * 3, 12**2]
    figure = masks.masks(S, C, seed=0).figures[""]
    figure.draw_without_rendering()
    assert figure.get_tightbbox().y1 <= figure.get_figheight()
