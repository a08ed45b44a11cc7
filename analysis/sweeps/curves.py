"""Losses during training, over seeds: their range, and by how much the last test loss exceeds the
smallest one (overfit), both of the smoothed curve: the least of noisy losses is biased downward."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.output import Result
from analysis.sweeps.sweep import grouped
from data_prep.errors import UserError

LINE = ["facet", "hue", "curve"]
SMOOTHED = 0.1
"""Fraction of a test curve whose mean replaces each of its losses, for overfit."""


def losses_of(
    results: pd.DataFrame, hue: Sequence[str] = (), facet: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the loss of each seed: facet, hue, curve, run, epochs, loss. All seeds of a line are
    interpolated at the epochs of its first one, as far as all of them go."""
    known = results[results.train_losses.notna() | results.test_losses.notna()]
    if known.empty:
        fix = "train with tracking.enabled=true, which writes the event log"
        raise UserError("curves", "no result has a training curve", fix, code="empty")
    frames = []
    for (panel, line), seeds in grouped(known, "", hue, facet).groupby(LINE[:2], sort=False):
        for curve in ("train", "test"):
            own = seeds[seeds[f"{curve}_losses"].notna()]
            if own.empty:
                continue
            epochs = own[f"{curve}_epochs"]
            low, high = epochs.str[0].max(), epochs.str[-1].min()
            common = np.array([epoch for epoch in epochs.iloc[0] if low <= epoch <= high])
            if not len(common):
                problem = f"the {curve} curves of {own.run.iloc[0]} and its seeds share no epoch"
                fix = "make lines or panels of the variable in which they differ"
                raise UserError("--hue", problem, fix, code="conflict")
            for run, x, y in zip(own.run, epochs, own[f"{curve}_losses"], strict=True):
                about = {"facet": panel, "hue": line, "curve": curve, "run": run}
                loss = np.interp(common, x, y)
                frames.append(pd.DataFrame({**about, "epochs": common, "loss": loss}))
    return pd.concat(frames, ignore_index=True)


def bands_of(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the statistics over seeds at each epoch."""
    seeds = losses.groupby([*LINE, "epochs"], sort=False).loss
    return seeds.agg(mean="mean", sd="std", min="min", max="max", num_seeds="size").reset_index()


def overfit_of(losses: "pd.Series[float]") -> float:
    """Return the last value minus the least one of the running mean."""
    window = max(1, round(SMOOTHED * len(losses)))
    smooth = losses.rolling(window, center=True, min_periods=1).mean()
    return float(smooth.iloc[-1] - smooth.min())


def curves(results: pd.DataFrame, hue: Sequence[str] = (), facet: Sequence[str] = ()) -> Result:
    losses = losses_of(results, hue, facet)
    from analysis.sweeps.pictures import draw_curves

    bands = bands_of(losses)
    tests = losses[losses.curve == "test"].groupby(["facet", "hue", "run"], sort=False).loss
    overfit = tests.agg(overfit_of).groupby(["facet", "hue"], sort=False)
    lines = overfit.agg(overfit_mean="mean", overfit_sd="std", num_seeds="size").reset_index()
    facts = {"lines": lines.assign(overfit=overfit.agg(list).tolist()).to_dict("records")}
    return Result(bands, facts, {"": draw_curves(bands)}, printed=[lines] if len(lines) else [])
