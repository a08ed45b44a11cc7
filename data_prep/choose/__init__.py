"""Choose samples of finished datasets: subsets without copies, and lists of duplicates."""
