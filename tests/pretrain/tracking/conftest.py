"""A fixture that several test files share."""

import pytest


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no deliverer, which takes seconds: the tests call `sync`."""
    monkeypatch.setattr("pretrain.tracking.tracker.sys.executable", "/bin/true")
