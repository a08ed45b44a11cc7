"""Settings of `finetune table`. No torch here."""

from data_prep.settings import Settings


class TableSettings(Settings):
    runs_dir: str = "runs"
    """The folder that the runs lie in; their store is mlflow.db in it, unless `store` names another."""
    store: str | None = None
    """An MLflow store or server."""
    out: str | None = None
    """Where transfer.md and transfer.png go; by default the folder of the runs."""
