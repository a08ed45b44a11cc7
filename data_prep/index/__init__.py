"""Make an index of shards of others: list shards, fetch them, read their samples."""
