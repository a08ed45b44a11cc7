"""Samples chosen from, or left out of, datasets that stand: subsets without copies, duplicates."""
