"""Make datasets: convert image archives to verified WebDataset shards with an index and a
manifest."""

__version__ = "0.2.0"
