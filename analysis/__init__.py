"""Tables and figures of runs, checkpoints and datasets."""
