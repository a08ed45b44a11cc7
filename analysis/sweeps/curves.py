"""Losses during training, over seeds: their range, and by how much the last test loss exceeds the
smallest one (overfit)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.output import Result
from analysis.sweeps.sweep import groups_of
from data_prep.errors import UserError


def curves_of(
    results: pd.DataFrame, hue: Sequence[str] = (), facet: Sequence[str] = ()
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the loss of each seed (panel, line, curve, run, epochs, loss), and one row for each
    band (panel, line, curve, epochs, and statistics over seeds).

    All seeds of a line are interpolated at the epochs of its first one, as far as all of them go.
    """
    known = results[results.train_losses.notna() | results.test_losses.notna()]
    if known.empty:
        raise UserError(
            "curves",
            "no result has a training curve",
            "train with tracking.enabled=true, which writes the event log",
            code="empty",
        )
    known, _ = groups_of(known, "", hue, facet)
    parts = []
    for (panel, line), seeds in known.groupby(["panel", "line"], sort=False):
        for curve in ("train", "test"):
            own = seeds[seeds[f"{curve}_losses"].notna()]
            if own.empty:
                continue
            epochs = own[f"{curve}_epochs"]
            first, low, high = epochs.iloc[0], epochs.str[0].max(), epochs.str[-1].min()
            common = np.array([epoch for epoch in first if low <= epoch <= high])
            if not len(common):
                raise UserError(
                    "--hue",
                    f"the {curve} curves of {own.run.iloc[0]} and its seeds share no epoch",
                    "make lines or panels of the variable in which they differ",
                    code="conflict",
                )
            parts += [
                pd.DataFrame({"epochs": common, "loss": np.interp(common, x, y)}).assign(
                    panel=panel, line=line, curve=curve, run=run
                )
                for run, x, y in zip(own.run, epochs, own[f"{curve}_losses"], strict=True)
            ]
    losses = pd.concat(parts, ignore_index=True)
    bands = losses.groupby(["panel", "line", "curve", "epochs"], sort=False).loss.agg(
        mean="mean", sd="std", min="min", max="max", num_seeds="size"
    )
    return losses, bands.reset_index()


def curves(results: pd.DataFrame, hue: Sequence[str] = (), facet: Sequence[str] = ()) -> Result:
    losses, bands = curves_of(results, hue, facet)
    from analysis.sweeps.pictures import draw_curves

    lines, printed = [], []
    tests = losses[losses.curve == "test"].groupby(["panel", "line"], sort=False)
    for (panel, line), own in tests:
        of_runs = own.groupby("run", sort=False).loss
        overfit = of_runs.last() - of_runs.min()
        lines.append(
            {
                "facet": panel,
                "hue": line,
                "overfit_mean": overfit.mean(),
                "overfit_sd": overfit.std(),
                "overfit": overfit.tolist(),
            }
        )
        name = ", ".join(filter(None, [panel, line])) or "all"
        deviation = f" ± {overfit.std():.4f}" if len(overfit) > 1 else ""
        printed.append(f"{name}: overfit {overfit.mean():.4f}{deviation}, seeds: {len(overfit)}")
    rows = bands.rename(columns={"panel": "facet", "line": "hue"})
    return Result(rows, {"lines": lines}, {"": draw_curves(bands)}, printed=printed)
