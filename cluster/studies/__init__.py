"""Sweeps and studies as files: what they hold, what of it is finished, how it is queued or run here."""
