"""The verbs of this room. Light: what takes time is imported once the arguments are known to be good."""

from data_prep.explain import Verbs


def add_verbs(verbs: Verbs) -> None:
    """None yet."""
