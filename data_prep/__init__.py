"""Make datasets: image archives in; verified WebDataset shards, an index and one manifest out."""

__version__ = "0.2.0"
