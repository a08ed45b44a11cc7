"""Ground floor: image archives in, verified WebDataset shards with an index and one manifest
out."""

__version__ = "0.2.0"
