"""Pretraining: models, sample order, loader, augmentation, training loop, DeepSpeed engine."""
