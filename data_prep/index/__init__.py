"""Index existing WebDataset shards: list shards, fetch them, read their samples."""
