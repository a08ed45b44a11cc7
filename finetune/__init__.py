"""Third floor: what a pretrained checkpoint is for, over the same data contract, loader, step and tracking.

    probe/       features kept on disk, grids of linear heads, nearest neighbours
    tune/        the one training loop over accelerate
    evaluate/    evaluation: scores, pictures, predictions, test-time augmentation
    export/      what others can use without us
    tables/      what was reached, beside the published numbers

A verb is a `command.py` (what it asks for and checks before torch is imported) and a `config.py` in its room.
"""
