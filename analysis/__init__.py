"""Top floor: reads what the floors below have left (runs, checkpoints, datasets) and makes tables
and pictures of it."""
