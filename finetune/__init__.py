"""Commands for pretrained checkpoints, with the loader, training step and tracking of `pretrain`.

    probe/       linear classifiers and nearest neighbors, on features stored on disk
    tune/        fine-tuning with the training loop of `pretrain` and accelerate
    evaluate/    scores, figures and predictions on a split, with test-time augmentation
    predict/     predictions for any images
    export/      conversion of a checkpoint to timm, ONNX and torch.export
    weights/     conversion of weights from other projects
    session.py   setup of probe, knn and evaluate: process group, frozen model, MLflow record
    split.py     checks of splits, and one pass over a split
    runs.py      reader of run directories, for reports, tables and model cards

Every command has a `command.py` (options). All except predict and import have a `config.py`
(settings).
"""
