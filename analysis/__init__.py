"""Tables and figures of runs, checkpoints and datasets. No other package imports `analysis`."""
