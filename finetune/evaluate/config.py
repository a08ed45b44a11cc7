"""Settings of `finetune evaluate`. No torch here."""

from typing import Literal

from pydantic import Field, model_validator

from finetune.config import ShortRunSettings
from pretrain.config import AugmentSettings, TrackingSettings


class ViewSettings(AugmentSettings):
    """What a view of a picture is. What is left out is as the model was trained (see choice.py)."""

    @model_validator(mode="after")
    def _of_one_picture(self) -> "ViewSettings":
        for name, field in self.mixing.items():
            raise ValueError(
                f"augment.{field}: {getattr(self, field):g} will not do ({name} mixes two pictures, and an answer is about one); "
                "leave it at 0"
            )
        return self


class EvaluateSettings(ShortRunSettings):
    pretrained: str
    """A run directory, one of its checkpoints, or an imported folder."""
    dataset: str
    """A directory that `data_prep build` or `index` has finished; all its classes must be among the checkpoint's."""
    split: str = "val"
    run_dir: str | None = None
    """Where the results go; by default a directory of this evaluation alone, in `evaluations/` of the run that made the weights (of
    a folder that belongs to no run: in FOLDER-evaluations/ beside it)."""
    views: int = Field(0, ge=0, le=100_000)
    """Test-time augmentation: the answer is the mean softmax over so many augmented views of each picture; 0 takes the plain
    picture. Each picture is read and decoded once, whatever the number."""
    include_plain: bool = False
    """The plain picture counts as one more view, the first."""
    augment: ViewSettings = ViewSettings()
    """What the views are; only with `views`. Left out, the crops and flips that the model was trained with; where these are not
    known, or there were none, the paper's public command: a square crop of 0.4 to 1 of the area, flipped or not. Naming one of
    them leaves the others as they would be."""
    seed: int = Field(0, ge=0)
    """Of the views, each of which is a function of (seed, number of the view, picture)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the forward pass; softmax and everything after it are in fp32 or above."""
    local_batch_size: int = Field(512, ge=1)
    """Pictures of one forward pass on one rank."""
    tracking: TrackingSettings = TrackingSettings()
    """By default the store and the experiment of the run that made the weights, as its child."""

    @model_validator(mode="after")
    def _views_are_asked_for(self) -> "EvaluateSettings":
        if self.views == 0:
            if self.include_plain:
                raise ValueError(
                    "include_plain: true, but views is 0, which takes the plain picture alone; set views, such as views=100"
                )
            if self.augment != ViewSettings():
                raise ValueError("augment: is set, but views is 0, which augments nothing; set views, such as views=100")
        return self

    @property
    def view_numbers(self) -> tuple[int | None, ...]:
        """A forward pass each; None is the plain picture."""
        plain = (None,) if self.include_plain or self.views == 0 else ()
        return (*plain, *range(self.views))
