"""What do the analyses cost, against the plain way? Each row in one process, one round after the
other; results are compared first.

  .venv/bin/python benchmarks/analyses.py [--quick]

minibatch CKA       two networks of six mixings, batches of 256 pictures: HSIC1 of all pairs from one product of stacked Grams,
                    against the formula of each pair by itself. Equal to 1e-10, no slower.
whole-sample HSIC1  of 10,000 pictures from X'X, X'Y, Y'Y and row sums, against the two Grams, made
one pair at a time: the largest
                    memory of either, in a process of its own. Equal to 1e-8, at least 5 x less.
spectra             all singular values of a 4,096 x 1,024 matrix in float64, from the eigenvalues of its Gram matrix, against
                    svdvals; CPU seconds of one thread. Of values that span 6 decades those above
                    1e-3 of the largest are equal to 1e-6; 3 x the speed.
scaling law         E = a (b + C)^-alpha + E_inf on 2,000 resamples of 24 runs of 5 checkpoints, all in one batch, against SciPy's
                    curve_fit on one after the other (--quick: on the first 200), which starts from
                    the fit of all points. No more squares are left in any resample, in less than 10
                    s.
"""

import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from frame import arguments, commit, machine, rates, ratio, report, sized
from scipy.optimize import curve_fit
from threadpoolctl import threadpool_limits
from torch import Tensor

from analysis.features.hsic import Grams, WholeSample, cka, gram, hsic
from analysis.matrices.spectra import singular_values
from analysis.scaling.fitting import fit
from analysis.scaling.laws import FULL, forms_of
from analysis.scaling.samples import Sample

BATCH, MIXINGS = 256, 6


def main() -> None:
    options = arguments(__doc__ or "")
    num_batches, entries, rounds = sized(
        options, full=(8, 2048, 7), quick=(2, 512, 3), dry=(1, 64, 1)
    )
    minibatch_cka(num_batches=num_batches, entries=entries, rounds=rounds)
    whole_sample_hsic(
        entries=sized(options, full=512, quick=256, dry=64),
        count=2_000 if options.dry_run else 10_000,
    )
    spectra(rounds=sized(options, full=9, quick=3, dry=1))
    of_peer, rounds, resamples = sized(
        options, full=(2000, 3, 2000), quick=(200, 1, 2000), dry=(20, 1, 100)
    )
    scaling_law(of_peer=of_peer, rounds=rounds, resamples=resamples)


# ---- minibatch CKA
# -----------------------------------------------------------------------------------------------------


def minibatch_cka(*, num_batches: int, entries: int, rounds: int) -> None:
    random = torch.Generator().manual_seed(0)
    batches = [
        [[torch.randn(BATCH, entries, generator=random) for _ in range(MIXINGS)] for _ in range(2)]
        for _ in range(num_batches)
    ]
    for one, other in batches:
        for number in range(MIXINGS):
            other[number] += one[number]  # so that there is something to find

    def ours() -> Tensor:
        grams = [Grams.of(gram(x) for network in batch for x in network) for batch in batches]
        mean = torch.stack([hsic(each, each) for each in grams]).mean(0)
        selves = mean.diagonal()
        return cka(mean[:MIXINGS, MIXINGS:], selves[:MIXINGS], selves[MIXINGS:])

    def plain() -> Tensor:
        cross, first, second = (
            torch.zeros(MIXINGS, MIXINGS, dtype=torch.float64),
            *torch.zeros(2, MIXINGS, dtype=torch.float64),
        )
        for one, other in batches:
            of_one, of_other = (
                [(x.double() @ x.double().T).fill_diagonal_(0) for x in network]
                for network in (one, other)
            )
            for row, k in enumerate(of_one):
                first[row] += _plain_hsic(k, k)
                second[row] += _plain_hsic(of_other[row], of_other[row])
                for column, other_k in enumerate(of_other):
                    cross[row, column] += _plain_hsic(k, other_k)
        return cross / (first[:, None] * second).sqrt()

    off = float((ours() - plain()).abs().max())
    assert off < 1e-10, off

    def counted(run: object) -> float:
        run()  # type: ignore[operator]
        return float(num_batches * BATCH)

    found = rates({"ours": lambda: counted(ours), "plain": lambda: counted(plain)}, rounds=rounds)
    title = f"minibatch CKA, 2 x {MIXINGS} mixings of {entries:,} entries, batches of {BATCH}"
    report(
        title, found, unit="pictures/s", against="plain", headline=f"largest difference {off:.1e}"
    )


def _plain_hsic(k: Tensor, m: Tensor) -> Tensor:
    n, ones = len(k), torch.ones(len(k), dtype=torch.float64)
    middle = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (k.flatten() @ m.flatten() + middle - 2 / (n - 2) * (ones @ k) @ (m @ ones)) / (
        n * (n - 3)
    )


# ---- whole-sample HSIC1
# ------------------------------------------------------------------------------------------------


def whole_sample_hsic(*, entries: int, count: int) -> None:
    (ours, our_bytes), (plain, plain_bytes) = (
        _in_a_process(name, entries, count) for name in ("ours", "grams")
    )
    off, ratio = abs(ours - plain) / abs(plain), plain_bytes / our_bytes
    print(
        f"whole-sample HSIC1 of {count:,} pictures, {entries} entries each, with the features"
        " themselves:"
    )
    print(
        f"  ours {our_bytes / 1e6:,.0f} MB, Grams {plain_bytes / 1e6:,.0f} MB: {ratio:.1f} x less"
    )
    print(f"  relative difference {off:.1e}\n{machine()}, commit {commit()}")
    assert off < 1e-8 and ratio >= 5, (off, ratio)


def _in_a_process(name: str, entries: int, count: int) -> tuple[float, int]:
    """(HSIC1, the largest memory in bytes, beyond torch's own)"""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (name, entries, count))


def _measured(name: str, entries: int, count: int) -> tuple[float, int]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, random = _peak_bytes(), torch.Generator().manual_seed(0)
    x_ND = torch.randn(count, entries, generator=random)
    y_ND = torch.randn(count, entries, generator=random) + x_ND
    if name == "ours":
        whole = WholeSample()
        for x, y in zip(x_ND.split(BATCH), y_ND.split(BATCH), strict=True):
            whole.add(x, y)
        value = float(whole.hsic())
    else:
        value = float(
            _plain_hsic(
                *((each.double() @ each.double().T).fill_diagonal_(0) for each in (x_ND, y_ND))
            )
        )
    return value, _peak_bytes() - before


def _peak_bytes() -> int:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024


# ---- spectra
# -----------------------------------------------------------------------------------------------------------


def spectra(*, rounds: int, rows: int = 4096, columns: int = 1024) -> None:
    random = np.random.default_rng(0)
    left, right = (
        np.linalg.qr(random.standard_normal((side, columns)))[0] for side in (rows, columns)
    )
    weight = (left * np.logspace(0, -6, columns)) @ right.T
    expected, ours = np.linalg.svd(weight, compute_uv=False), singular_values(weight)
    assert ours is not None
    off = float(np.abs(ours / expected - 1)[expected > 1e-3 * expected[0]].max())
    assert off < 1e-6, off

    def a_minute(run: object) -> float:
        run()  # type: ignore[operator]
        return 60.0

    as_tensor = torch.from_numpy(weight)
    contestants = {
        "ours": lambda: a_minute(lambda: singular_values(weight)),
        "torch svdvals": lambda: a_minute(lambda: torch.linalg.svdvals(as_tensor)),
        "numpy svdvals": lambda: a_minute(lambda: np.linalg.svdvals(weight)),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        found = rates(contestants, rounds=rounds, clock=time.process_time)
    torch.set_num_threads(threads)
    faster = min(ratio(found, "ours", name) for name in ("torch svdvals", "numpy svdvals"))
    headline = (
        f"{faster:.1f} x the speed of the faster svdvals; largest relative difference {off:.1e}"
    )
    report(
        f"singular values of {rows:,} x {columns:,}",
        found,
        unit="a minute",
        against="torch svdvals",
        headline=headline,
    )


# ---- scaling law
# -------------------------------------------------------------------------------------------------------


def scaling_law(*, of_peer: int, rounds: int, resamples: int) -> None:
    rng, law = np.random.default_rng(0), forms_of("compute")[FULL]
    points = {
        "compute": np.concatenate(
            [10 ** rng.uniform(12, 16) * np.array([1, 2, 4, 8, 16]) for _ in range(24)]
        )
    }
    errors_N = (0.1 + 200 * (1e12 + points["compute"]) ** -0.25) * rng.normal(1, 0.01, 120)
    weights_BN = Sample("", points, errors_N, np.repeat(np.arange(24), 5)).resamples(resamples)[1:]
    whole = fit(law, points, errors_N)
    unit = whole.units["compute"]
    scaled_N, start = points["compute"] / unit, [*whole.linear_BK[0], *whole.shape_BQ[0]]

    def ours() -> np.ndarray:
        return fit(law, points, errors_N, weights_BN).squares_B

    def plain() -> np.ndarray:
        found = []
        for counts in weights_BN[:of_peer].astype(int):
            x, y = np.repeat(scaled_N, counts), np.repeat(errors_N, counts)
            answer, _ = curve_fit(
                _power_law, x, y, p0=start, bounds=([0, 0, 0.01, 0], [np.inf, np.inf, 5, 1e3])
            )
            found.append(((y - _power_law(x, *answer)) ** 2).sum())
        return np.array(found)

    more = float((ours()[:of_peer] / plain() - 1).max())
    assert more < 1e-6, more
    found = rates(
        {"ours": lambda: float(len(ours())), "curve_fit": lambda: float(len(plain()))},
        rounds=rounds,
    )
    seconds = resamples / min(found["ours"])
    headline = (
        f"{resamples:,} fits in {seconds:.1f} s at most; squares above curve_fit's by at most"
        f" {more:.1e}"
    )
    report(
        "scaling law, 120 points of 24 runs",
        found,
        unit="fits/s",
        against="curve_fit",
        headline=headline,
    )
    assert seconds < 10, seconds


def _power_law(x: np.ndarray, a: float, floor: float, alpha: float, b: float) -> np.ndarray:
    return a * (b + x) ** -alpha + floor


if __name__ == "__main__":
    main()
