"""Predictions of a classifier for any images, with or without labels: `finetune predict`."""
