"""Settings of `finetune evaluate`. No torch here."""

from pydantic import Field

from data_prep.settings import Settings


class EvaluateSettings(Settings):
    pretrained: str
    dataset: str
    split: str = "val"
    local_batch_size: int = Field(512, ge=1)
