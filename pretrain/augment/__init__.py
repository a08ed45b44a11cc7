"""Batch augmentation on the training device: what is drawn (numpy, host) and what is done to the pixels (torch, device).

settings and policies are free of torch, so that a config is checked before it is imported; `augmentation` puts the rest together.
"""
