"""Layers of more than one family of models, and the buffers of these layers."""
