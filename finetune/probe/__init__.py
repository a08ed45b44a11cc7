"""Classifiers on frozen features: a grid of linear heads (`finetune probe`) and nearest neighbors
(`finetune knn`)."""
