"""Spectra, structure and masks: against dense matrices built with kron, svdvals and permutations,
exact forms, and closed laws."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from scipy.sparse import csr_matrix

from analysis.cli import main
from analysis.matrices import initial, masks, spectra, structure
from analysis.matrices.weights import matrices_of
from data_prep.publish import write_json
from pretrain.models.build import build_model
from pretrain.models.mixer import Mixer
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec
from pretrain.record import RECORD, RunRecord
from tests.analysis.conftest import write_checkpoint
from tests.conftest import Capture, Patch

GENERATOR = np.random.default_rng(0)
S, C, H, V = 4, 3, 5, 2


# ---- singular values


@pytest.mark.parametrize("shape", [(300, 90), (90, 300), (128, 128), (1, 7)])
@pytest.mark.parametrize("decades", [0, 3])
def test_singular_values_are_those_of_a_decomposition(shape: tuple[int, int], decades: int) -> None:
    """1e-6 relative above a thousandth of the largest; a matrix of weights in float32, too."""
    left, right = (np.linalg.qr(GENERATOR.standard_normal((side, min(shape))))[0] for side in shape)
    weight = (left * np.logspace(0, -decades, min(shape))) @ right.T
    for given in (weight, weight.astype(np.float32), csr_matrix(weight)):
        expected = np.linalg.svd(
            given.toarray() if not isinstance(given, np.ndarray) else given.astype(float),
            compute_uv=False,
        )
        found = spectra.singular_values(given)
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_empty_rows_and_columns_are_singular_values_of_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = np.zeros((50, 70))
    weight[GENERATOR.integers(50, size=30), GENERATOR.integers(70, size=30)] = (
        GENERATOR.standard_normal(30)
    )
    for most in (0, 10**6):  # multiplied as it is, and filled up
        monkeypatch.setattr(spectra, "LARGEST_DENSE", most)
        for given in (weight, csr_matrix(weight)):
            found = spectra.singular_values(given)
            assert found is not None and len(found) == 50
            np.testing.assert_allclose(found, np.linalg.svd(weight, compute_uv=False), atol=1e-7)
    monkeypatch.setattr(spectra, "LONGEST_SIDE", 5)
    assert spectra.singular_values(csr_matrix(weight)) is None
    largest = np.linalg.norm(weight, 2)
    for given in (weight, csr_matrix(weight), np.stack([weight / 2, weight])):
        found = spectra.spectrum(spectra.Matrix("x", 0, given, 1), initial=None)
        assert (
            found["sigma_max"] == pytest.approx(largest, rel=1e-8)
            and found["effective_rank"] is found["distance"] is None
        )


@pytest.mark.parametrize("permuted", [(), "all"])
def test_a_mixing_stands_for_its_effective_matrix(permuted: object) -> None:
    """The Jacobian of a linear mixing on all S C entries: the singular values of W, each `copies`
    times."""
    fields = {
        "patch_size": 4,
        "num_channels": 6,
        "depth": 1,
        "layers_per_mixing": 1,
        "activation": "identity",
    }
    spec = MixerSpec.model_validate({"kind": "mixer", **fields, "permuted_blocks": permuted})
    model = build_model(spec, num_classes=2, image_size=8, seed=0)
    assert isinstance(model, Mixer)
    block = model.blocks[0]
    of_kind = {each.name: each for each in matrices_of(model, spec, image_size=8)}
    x = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))

    def tokens_mixed(entries: torch.Tensor) -> torch.Tensor:
        x_BSC = entries.view(1, 4, 6)
        if not permuted:
            return block.token_mixing(x_BSC.transpose(1, 2)).transpose(1, 2).flatten()
        parts = block.before_tokens(x_BSC.flatten(1)).view(1, 6, 4)
        return block.after_tokens(block.token_mixing(parts).flatten(1)).flatten()

    effective = torch.autograd.functional.jacobian(tokens_mixed, x.flatten()).double()
    matrix = of_kind["token_mixing.linear"]
    assert (
        matrix.copies,
        matrix.block,
        of_kind["channel_mixing.linear"].copies,
        of_kind["stem"].copies,
    ) == (6, 0, 4, 4)
    values = spectra.singular_values(matrix.weight)
    assert values is not None
    np.testing.assert_allclose(
        np.repeat(values, 6), torch.linalg.svdvals(effective).numpy(), rtol=1e-5
    )
    found = spectra.spectrum(matrix, initial=None)
    norm = float(effective.norm())
    assert found["stable_rank"] * matrix.copies == pytest.approx(
        norm**2 / found["sigma_max"] ** 2, rel=1e-5
    )
    shares = torch.linalg.svdvals(effective)
    shares = shares / shares.sum()
    assert found["effective_rank"] is not None
    assert found["effective_rank"] * matrix.copies == pytest.approx(
        math.exp(-float((shares * shares.log()).sum())), rel=1e-5
    )


def test_measures_of_known_spectra() -> None:
    assert spectra.effective_rank(np.full(7, 3.0)) == pytest.approx(7)
    assert spectra.effective_rank(np.array([2.0, 0, 0])) == pytest.approx(1)
    dense = spectra.Matrix("x", 0, GENERATOR.standard_normal((600, 300)) * 5, 1)
    spiked = spectra.Matrix("x", 0, dense.weight + 10 * np.ones((600, 300)), 1)
    small, large = (spectra.spectrum(each, initial=dense) for each in (dense, spiked))
    assert small["distance"] is not None and small["distance"] < 0.01 and small["drift"] == 0
    assert (
        small["sigma_max"]
        == pytest.approx(small["gaussian_edge"], rel=0.03)
        == 5 * (600**0.5 + 300**0.5)
    )
    assert large["distance"] is not None and large["distance"] > 0.5 and large["stable_rank"] < 2
    assert large["drift"] == pytest.approx(10 / 5, rel=0.01)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_the_law_has_marchenko_and_pasturs_moments(ratio: float) -> None:
    """Of x: 1, then 1 + ratio, then 1 + 3 ratio + ratio^2 (Narayana numbers)."""
    places, shares = spectra.marchenko_pastur(ratio)
    middles, weights = (places[1:] + places[:-1]) / 2, np.diff(shares)
    moments = [float((weights * middles**k).sum()) for k in (0, 1, 2, 3)]
    assert moments == pytest.approx([1, 1, 1 + ratio, 1 + 3 * ratio + ratio**2], rel=1e-4)


# ---- of runs


SW = SparseMlpSpec(kind="sw_mlp", patch_size=4, num_channels=8, depth=2, density=0.3)
MLP = MlpSpec(kind="mlp", depth=2, width=16, expansion=2)


def write_trained(run: Path, spec: AnySpec, *, grown: float) -> None:
    """Its weights are `grown` times those of seed 5, which its config names."""
    model = build_model(spec, num_classes=2, image_size=8, seed=5)
    weights = {
        name: x * grown if x.is_floating_point() else x for name, x in model.state_dict().items()
    }
    write_checkpoint(run, spec, weights, image_size=8)
    write_json(run / RECORD, asdict(RunRecord("pretrain", seed=5)))
    (run / "config.yaml").write_text(
        yaml.safe_dump({"train": {"seed": 5, "duration": "1 epochs"}, "run_dir": str(run)})
    )


def test_spectra_and_structure_of_runs(tmp_path: Path, capsys: Capture) -> None:
    for name, spec, grown in (("mlp", MLP, 1.5), ("sw", SW, 3.0)):
        write_trained(tmp_path / name, spec, grown=grown)
    runs = [str(tmp_path / name) for name in ("mlp", "sw")]
    assert main(["spectra", *runs, "--out", str(tmp_path / "spectra"), "--device", "cpu"]) == 0
    rows = pq.read_table(tmp_path / "spectra.parquet").to_pylist()
    assert {(row["run"], row["step"]) for row in rows} == {
        ("mlp", 0),
        ("mlp", 10),
        ("sw", 0),
        ("sw", 10),
    }
    for run, growth in (("mlp", 1.5), ("sw", 3.0)):
        before, after = (
            [row for row in rows if (row["run"], row["step"]) == (run, step)] for step in (0, 10)
        )
        assert [row["name"] for row in before] == [row["name"] for row in after] and len(before) > 3
        for one, two in zip(before, after, strict=True):
            assert one["drift"] == 0 and two["drift"] == pytest.approx(growth - 1, rel=1e-5)
            assert two["sigma_max"] == pytest.approx(growth * one["sigma_max"], rel=1e-5)
            assert two["effective_rank"] == pytest.approx(one["effective_rank"], rel=1e-5)
            assert two["distance"] == pytest.approx(one["distance"], abs=1e-5)
    assert (tmp_path / "spectra.png").exists() and len(
        json.loads((tmp_path / "spectra.json").read_text())["inputs"]
    ) == 2
    assert main(["structure", *runs, "--quick", "--out", str(tmp_path / "structure")]) == 0
    found = pq.read_table(tmp_path / "structure.parquet").to_pylist()
    assert {(row["form"], row["step"]) for row in found} == {
        (form, step) for form in structure.FORMS for step in (0, 10)
    }
    assert {tuple(row["out"]) for row in found if row["run"] == "sw"} == {
        (4, 8)
    }  # tokens by channels
    assert all(0.5 < row["distance"] / row["random"] < 1.5 for row in found)
    assert json.loads((tmp_path / "structure.json").read_text())["proposition 3.3"]["holds"]
    assert "left out" not in capsys.readouterr().out


def test_a_matrix_that_has_the_form_by_its_sides_is_left_out(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Of a prime side, and one that is too large: null in the table, and said."""
    prime = MlpSpec(kind="mlp", depth=1, width=13)
    write_trained(tmp_path / "prime", prime, grown=1.0)
    write_trained(tmp_path / "mlp", MLP, grown=1.0)
    words = ["structure", "--quick", "--out", str(tmp_path / "x")]
    assert main([*words, str(tmp_path / "prime")]) == 0
    assert "entries:\n  prime, contract (monarch)\nwritten" in capsys.readouterr().out
    monkeypatch.setattr(structure, "LARGEST_DENSE", 16 * 32 - 1)
    assert main([*words, str(tmp_path / "mlp")]) == 0
    assert {row["distance"] for row in pq.read_table(tmp_path / "x.parquet").to_pylist()} == {None}
    assert "mlp, expand (monarch)" in capsys.readouterr().out


def test_a_picture_of_the_training_needs_three_steps() -> None:
    matrix = spectra.Matrix("linear", 0, GENERATOR.standard_normal((8, 4)), 1)
    spectrum = spectra.spectrum(matrix, initial=matrix)
    rows = pd.DataFrame({"run": "a", "step": step, **spectrum} for step in (0, 5, 9))
    assert set(spectra.draw(rows[:2])) == {""} and set(spectra.draw(rows)) == {"", "training"}


# ---- structure


def test_matrices_of_a_form_have_no_distance_to_it() -> None:
    out, into = (S, C), (H, V)
    kronecker = np.kron(GENERATOR.standard_normal((S, H)), GENERATOR.standard_normal((C, V)))
    per_row, per_column = GENERATOR.standard_normal((H, C, V)), GENERATOR.standard_normal((C, S, H))
    monarch = np.einsum("csh,hcv->schv", per_column, per_row).reshape(S * C, H * V)
    assert structure.distance(kronecker, "kronecker", out=out, into=into) < 1e-7
    assert structure.distance(kronecker, "monarch", out=out, into=into) < 1e-7
    assert structure.distance(monarch, "monarch", out=out, into=into) < 1e-7
    assert structure.distance(monarch, "kronecker", out=out, into=into) > 0.1


def nearest(weight: np.ndarray, form: str) -> np.ndarray:
    """Each slice by its best approximation of rank 1, put back where it was."""
    left, values, right = np.linalg.svd(
        structure.slices_of(weight, form, out=(S, C), into=(H, V)).numpy(), full_matrices=False
    )
    of_rank_1 = (left[..., :1] * values[:, :1, None]) @ right[:, :1]
    if form == "monarch":
        return of_rank_1.reshape(C, H, S, V).transpose(2, 0, 1, 3).reshape(weight.shape)
    return of_rank_1.reshape(S, H, C, V).transpose(0, 2, 1, 3).reshape(weight.shape)


@pytest.mark.parametrize("form", structure.FORMS)
def test_the_distance_is_that_to_the_nearest(form: str) -> None:
    """And the nearest is of the form itself, and no neighbour of it in the form is nearer."""
    weight, out, into = GENERATOR.standard_normal((S * C, H * V)), (S, C), (H, V)
    near = nearest(weight, form)
    assert structure.distance(near, form, out=out, into=into) < 1e-7
    found = structure.distance(weight, form, out=out, into=into)
    assert found == pytest.approx(np.linalg.norm(weight - near) / np.linalg.norm(weight), rel=1e-9)
    for _ in range(20):
        moved = nearest(near + 0.1 * GENERATOR.standard_normal(weight.shape), form)
        assert np.linalg.norm(weight - moved) > np.linalg.norm(weight - near)


def test_the_nearest_kronecker_product_by_torch() -> None:
    """Van Loan's: the best of A (x) B is the first pair of the decomposition of the blocks as
    rows."""
    weight = torch.randn(
        S * C, H * V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    blocks = torch.stack([block.flatten() for row in weight.split(C) for block in row.split(V, 1)])
    left, values, right = torch.linalg.svd(blocks, full_matrices=False)
    expected = torch.kron(values[0] * left[:, 0].view(S, H), right[0].view(C, V))
    np.testing.assert_allclose(nearest(weight.numpy(), "kronecker"), expected, atol=1e-12)
    found = structure.distance(weight.numpy(), "kronecker", out=(S, C), into=(H, V))
    assert found == pytest.approx(float((weight - expected).norm() / weight.norm()), rel=1e-9)


def test_a_random_matrix_of_equal_spectrum_is_another_one() -> None:
    weight = GENERATOR.standard_normal((12, 30)) ** 3
    other = structure.of_equal_spectrum(
        np.linalg.svd(weight, compute_uv=False), weight.shape, GENERATOR
    ).numpy()
    values = [np.linalg.svd(each, compute_uv=False) for each in (weight, other)]
    np.testing.assert_allclose(*values, rtol=1e-8)
    assert abs((weight * other).sum()) < 0.5 * np.linalg.norm(weight) ** 2
    assert structure.grid_of(4096, tokens=None) == (64, 64) and structure.grid_of(
        48, tokens=16
    ) == (16, 3)
    assert structure.grid_of(50, tokens=16) == (5, 10)


def test_proposition_3_3_point_by_point() -> None:
    v, w = GENERATOR.standard_normal((S, S)), GENERATOR.standard_normal((C, C))
    left, right = structure.both_sides(v, w)
    assert left == pytest.approx((np.linalg.norm(v) ** 2 + np.linalg.norm(w) ** 2) / 2)
    assert right == pytest.approx(np.abs(np.kron(v, w)).sum() / (C * S)) and right < left
    found = structure.bound_on_random_matrices(draws=30)
    assert max(map(max, found.values())) <= 1 + 1e-12 and min(
        found["signs, of equal norms"]
    ) == pytest.approx(1)
    assert all(0 < max(found[kind]) < 0.9 for kind in ("Gaussian", "Student's t, 2 degrees"))


# ---- without a run


def test_at_fixed_omega_measured_values_grow_and_meet_the_law_with_gamma() -> None:
    """Figure 4 right in small: q^2 = p gamma m is nearer than q^2 = p m, both are above 1 +
    sqrt(gamma)."""
    rows = initial.widths(((8, 40), (16, 24), (20, 20)), omega=2**14, gamma=4.0, seeds=3)
    assert rows.width.value_counts().to_dict() == {320: 3, 384: 3, 400: 3}
    assert rows.hidden_width[0] == 1280
    means = rows.groupby("width").mean(numeric_only=True)
    assert ((means.sw_mlp - means.with_gamma).abs() < (means.sw_mlp - means.printed).abs()).all()
    assert (means.dense == 3).all() and (means.with_gamma > 3).all()
    assert (means.with_gamma < means.printed).all()
    exact = 9 + 3 * 9 * 2 * (1 - 2**14 / (4 * 400**2)) / (2**14 / (4 * 400))
    assert means.printed[400] == pytest.approx(math.sqrt(exact))
    assert isinstance(initial.draw_widths(rows, title="Ω = 2^14, γ = 4"), Figure)


def test_the_sparsest_matrices() -> None:
    """S.1 center: of connections far apart each is a singular value of its own."""
    rows = initial.sparser((1.9,), (100,), seeds=2, with_all_values=True)
    assert rows.width[0] == round(100**1.45) and rows.density[0] == pytest.approx(100**-1.9)
    assert (rows["values"].map(len) <= rows.connections).all()
    largest = initial.sparser((0.5, 1.5), (30, 100), seeds=1, with_all_values=False)
    widths = [(0.5, 13), (0.5, 32), (1.5, 70), (1.5, 316)]
    assert list(zip(largest.a, largest.width, strict=True)) == widths
    assert isinstance(initial.draw_sparser(rows, largest), Figure)


# ---- masks


def test_masks_are_those_of_the_matrices(tmp_path: Path) -> None:
    found = masks.masks_of(S, C, seed=3)
    v, w = GENERATOR.standard_normal((S, S)), GENERATOR.standard_normal((C, C))
    tokens, channels = np.kron(v, np.eye(C)), np.kron(np.eye(S), w)
    x = GENERATOR.standard_normal((S, C))
    np.testing.assert_allclose(tokens @ x.ravel(), (v @ x).ravel())  # a vector is token after token
    by_name = list(found.values())
    for mask, matrix in zip(by_name, (tokens, channels, channels @ tokens), strict=False):
        np.testing.assert_array_equal(mask, matrix != 0)
    for plain, permuted in zip(by_name[:2], by_name[4:6], strict=True):
        assert sorted(permuted.sum(0)) == sorted(plain.sum(0)) and not np.array_equal(
            plain, permuted
        )
    assert (
        main(["masks", "--tokens", "3", "--channels", "4", "--out", str(tmp_path / "masks")]) == 0
    )
    rows = pq.read_table(tmp_path / "masks.parquet").to_pylist()
    assert [row["connections"] for row in rows[:3]] == [3**2 * 4, 4**2 * 3, 12**2] and (
        tmp_path / "masks.svg"
    ).exists()
