"""Predictions of a classifier on a split, and their scores: `finetune evaluate`."""
