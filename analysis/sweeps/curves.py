"""Ranges over seeds of losses and test accuracy during training, and overfit (the last test loss
minus the least). Curves are smoothed first, because the smallest of noisy losses is too low."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.output import Result
from analysis.sweeps.sweep import grouped
from data_prep.errors import UserError

LINE = ["facet", "hue", "curve"]
SMOOTHED = 0.1
"""Length of the running mean for overfit, as a fraction of the test curve."""


def losses_of(
    results: pd.DataFrame, hue: Sequence[str] = (), facet: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the losses of each seed, with the columns facet, hue, curve, run, epochs and value."""
    return _over_epochs(results, {"train": "train_losses", "test": "test_losses"}, hue, facet)


def _over_epochs(
    results: pd.DataFrame, columns: Mapping[str, str], hue: Sequence[str], facet: Sequence[str]
) -> pd.DataFrame:
    """Return the values of each curve in `columns` (curve -> column). Seeds are interpolated at the
    epochs of the first seed of their line, in the range that all seeds cover."""
    known = results[results[[*columns.values()]].notna().any(axis=1)]
    if known.empty:
        fix = "train with tracking.enabled=true, which writes the event log"
        raise UserError("curves", "no result has a training curve", fix, code="empty")
    frames = []
    for (panel, line), seeds in grouped(known, "", hue, facet).groupby(LINE[:2], sort=False):
        for curve, column in columns.items():
            own = seeds[seeds[column].notna()]
            if own.empty:
                continue
            epochs = own[f"{column.partition('_')[0]}_epochs"]
            low, high = epochs.str[0].max(), epochs.str[-1].min()
            common = np.array([epoch for epoch in epochs.iloc[0] if low <= epoch <= high])
            if not len(common):
                problem = f"the {curve} curves of {own.run.iloc[0]} and its seeds share no epoch"
                fix = "add the variable in which they differ to --hue or --facet"
                raise UserError("--hue", problem, fix, code="conflict")
            for run, x, y in zip(own.run, epochs, own[column], strict=True):
                about = {"facet": panel, "hue": line, "curve": curve, "run": run}
                value = np.interp(common, x, y)
                frames.append(pd.DataFrame({**about, "epochs": common, "value": value}))
    return pd.concat(frames, ignore_index=True)


def bands_of(values: pd.DataFrame) -> pd.DataFrame:
    """Return mean, SD and range over seeds at each epoch."""
    seeds = values.groupby([*LINE, "epochs"], sort=False).value
    return seeds.agg(mean="mean", sd="std", min="min", max="max", num_seeds="size").reset_index()


def overfit_of(losses: "pd.Series[float]") -> float:
    """Return the last value of the running mean minus its minimum."""
    window = max(1, round(SMOOTHED * len(losses)))
    smooth = losses.rolling(window, center=True, min_periods=1).mean()
    return float(smooth.iloc[-1] - smooth.min()) if len(losses) > 1 else np.nan


def curves(
    results: pd.DataFrame,
    hue: Sequence[str] = (),
    facet: Sequence[str] = (),
    *,
    with_accuracy: bool = False,
) -> Result:
    losses = losses_of(results, hue, facet)
    from analysis.sweeps.pictures import draw_curves

    bands = bands_of(losses)
    if with_accuracy:
        errors = _over_epochs(results, {"accuracy": "test_errors"}, hue, facet)
        accuracies = bands_of(errors.assign(value=1 - errors.value))
        bands = pd.concat([bands, accuracies], ignore_index=True)
    tests = losses[losses.curve == "test"].groupby(["facet", "hue", "run"], sort=False).value
    overfit = tests.agg(overfit_of).groupby(["facet", "hue"], sort=False)
    lines = overfit.agg(overfit_mean="mean", overfit_sd="std", num_seeds="size").reset_index()
    facts = {"lines": lines.assign(overfit=overfit.agg(list).tolist()).to_dict("records")}
    return Result(bands, facts, {"": draw_curves(bands)}, printed=[lines] if len(lines) else [])
