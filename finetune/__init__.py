"""Third floor: what a pretrained checkpoint is for, over the same data contract, loader, step and
tracking.

    probe/       features kept on disk, grids of linear heads, nearest neighbours
    tune/        the one training loop over accelerate
    evaluate/    evaluation: scores, pictures, predictions, test-time augmentation
    export/      what others can use without us
    session.py   what a short run works in: joined ranks, the frozen model, its record in MLflow
    split.py     whether a split can be learned from and judged on, and one pass over it
    runs.py      a finished run, as reports, tables and model cards read it

A verb is a `command.py` (what it asks for and checks before torch is imported) and a `config.py` in
its room.
"""
