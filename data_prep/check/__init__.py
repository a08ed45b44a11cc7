"""Verify, count and show a finished dataset."""
