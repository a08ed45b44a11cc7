"""Layers that several model families share, and functions for buffers."""
