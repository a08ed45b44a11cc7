"""Build a dataset: plan, shards, array tasks, merge."""
