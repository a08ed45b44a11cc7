"""Use of a pretrained checkpoint, with the datasets, loader, step and tracking of `pretrain`.

    probe/       features on disk, grids of linear heads, nearest neighbors
    tune/        the training loop over accelerate
    evaluate/    scores, figures, predictions, test-time augmentation
    predict/     predictions for any images
    export/      formats of other programs
    weights/     weights of other projects
    session.py   a short run: joined ranks, the frozen model, its record in MLflow
    split.py     checks of splits, and one pass over a split
    runs.py      a run, as reports, tables and model cards read it

A command is a `command.py` (options and checks before torch is imported), a `config.py`, and a
module that computes.
"""
