"""Settings of `finetune tune`. No torch here."""

from typing import Literal

from pydantic import Field, model_validator

from data_prep.settings import Settings
from pretrain.checkpoints.card import ModelCard
from pretrain.config import (
    AugmentSettings,
    CheckpointSettings,
    DataSettings,
    EngineSettings,
    OptimizerSettings,
    PretrainSettings,
    Resume,
    ScheduleSettings,
    TrackingSettings,
    TrainSettings,
    check_batches,
    check_best,
    check_schedule,
)
from pretrain.ranks.settings import RanksSettings


class TuneEngineSettings(RanksSettings):
    """accelerate's data parallelism."""

    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_clip_norm: float = Field(0.0, ge=0)
    """0 is off."""
    activation_checkpointing: bool = False
    """Keep each block's input alone and compute the rest again in the backward pass: less memory, about a third more compute."""
    compile: bool = False
    """torch.compile the model: minutes at the first step, faster steps afterwards."""


class TuneSettings(Settings):
    run_dir: str
    resume: Resume = "auto"
    pretrained: str
    """A run directory of `pretrain train`, or one of its checkpoints."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """scratch: the same architecture from random weights, as the baseline that transfer has to beat."""
    seeds: tuple[int, ...] | None = None
    """Repeat with each of them as train.seed; result.json has the mean and the standard deviation. More can be added later."""
    folds: bool = False
    """Repeat on each fold of the training split alone, STL-10's protocol."""
    data: DataSettings
    augment: AugmentSettings = AugmentSettings()
    optimizer: OptimizerSettings = OptimizerSettings(name="sgd", lr=1e-3, head_lr_scale=10.0, weight_decay=1e-4)
    """The paper's: SGD with momentum, 0.01 for the head and 0.001 for the body."""
    schedule: ScheduleSettings = ScheduleSettings()
    train: TrainSettings
    engine: TuneEngineSettings = TuneEngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> "TuneSettings":
        check_batches(self.train, self.augment)
        check_schedule(self.schedule, self.optimizer)
        check_best(self.checkpoint, self.data)
        seeds = self.seeds
        if seeds is not None and (not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0):
            raise ValueError(f"seeds: {list(seeds)} will not do; give different whole numbers from 0 on, such as [0, 1, 2]")
        if self.folds and self.data.fold is not None:
            raise ValueError(f"folds: true repeats on every fold, but data.fold is {self.data.fold}; leave one of them out")
        if self.train.ema_decay is not None:
            raise ValueError(f"train.ema_decay: {self.train.ema_decay} will not do; tuning has no moving average, leave it out")
        return self

    def as_training(self, card: ModelCard) -> PretrainSettings:
        """The same task in the words of the one training loop."""
        size = self.data.image_size or card.image_size
        if size != card.image_size:
            raise ValueError(f"data.image_size: {size}, but {self.pretrained} was trained at {card.image_size}; leave it out")
        return PretrainSettings(
            run_dir=self.run_dir,
            resume=self.resume,
            data=self.data.model_copy(update={"image_size": size}),
            model=card.model,
            augment=self.augment.fed_as(card.fed_interpolation),
            optimizer=self.optimizer,
            schedule=self.schedule,
            train=self.train,
            engine=EngineSettings(zero_stage=0, **self.engine.model_dump()),
            checkpoint=self.checkpoint,
            tracking=self.tracking,
        )
