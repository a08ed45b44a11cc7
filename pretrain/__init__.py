"""Second floor: models, sample order, loader, augmentation, the training loop and its DeepSpeed
engine."""
