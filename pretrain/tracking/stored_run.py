"""A run as the store holds it: plain words and numbers, whatever the store is. `tracking.Store.runs` makes them of MLflow's."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StoredRun:
    run_key: str
    name: str
    status: str
    """FINISHED, FAILED, KILLED or RUNNING."""
    parent_key: str | None = None
    """Of the run that the weights come from."""
    params: Mapping[str, str] = field(default_factory=dict)
    """The flattened config: {"train.duration": "50 epochs"}."""
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each."""
