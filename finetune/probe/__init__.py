"""Frozen features and what is learned from them: a grid of linear heads (`finetune probe`), nearest
neighbours (`finetune knn`)."""
