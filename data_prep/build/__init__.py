"""From a source to a finished dataset: inventory, work plan, shards, array tasks, merge."""
