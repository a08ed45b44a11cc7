"""Layers that more than one family of models is made of, and the buffers that they keep beside
their weights."""
