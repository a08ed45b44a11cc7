"""Settings of `finetune probe`. No torch here."""

from pydantic import Field, model_validator

from data_prep.settings import Settings
from pretrain.config import TrackingSettings


class ProbeSettings(Settings):
    run_dir: str
    pretrained: str | None = None
    """The checkpoint whose features are probed; null probes the pixels themselves, as the linear baseline."""
    dataset: str
    train_split: str = "train"
    test_split: str = "val"
    image_size: int | None = Field(None, ge=8, le=1024)
    lrs: tuple[float, ...] = Field((1e-4, 3e-4, 1e-3, 3e-3), min_length=1)
    """All are trained in one pass over the features; the best on the held-out share is kept."""
    weight_decay: float = Field(1e-2, ge=0)
    epochs: int = Field(50, ge=1)
    batch_size: int = Field(256, ge=1)
    feature_batch_size: int = Field(512, ge=1)
    holdout_share: float = Field(0.2, gt=0, lt=1)
    """Of the training split, to choose the learning rate with; the test split is never chosen on."""
    seed: int = Field(0, ge=0)
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _test_is_kept_apart(self) -> "ProbeSettings":
        if self.train_split == self.test_split:
            raise ValueError(f"test_split: {self.test_split!r} is the training split too; test on another")
        if any(lr <= 0 for lr in self.lrs):
            raise ValueError(f"lrs: {list(self.lrs)} will not do; every learning rate must be above 0")
        return self
