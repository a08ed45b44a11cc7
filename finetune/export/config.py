"""Settings of `finetune export`, and what it writes. No torch here.

OUT/model.safetensors   the checkpoint's, byte for byte; with timm's names if timm has the model
OUT/config.json         our card and timm's words for it
OUT/README.md           a model card for the hub, see model_card.py
OUT/model.onnx          and model.onnx.data, where they are too large for one file
OUT/model.pt2           a torch.export program
OUT/export.json         weights, versions, and the largest difference of the graphs' logits
OUT/record.json         the record of the export; it is not pushed
OUT/sha256.json         of all of these, written last
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from data_prep.errors import UserError
from data_prep.settings import Settings
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import is_output
from pretrain.record import RecordSettings

Format = Literal["timm", "onnx", "torch"]
README, ONNX, PT2, RECORD = "README.md", "model.onnx", "model.pt2", "export.json"


class ExportSettings(Settings):
    of_verb = "finetune export"
    example_with: ClassVar = {"revision": "push_to=USER/NAME", "private": "push_to=USER/NAME"}
    pretrained: str = Field(examples=["runs/mine"])
    """A run, one of its checkpoints, an imported folder, or an export."""
    out: str = Field(examples=["exports/mine"])
    """The directory to write. It appears whole; one that exists and is something else is left
    alone."""
    formats: tuple[Format, ...] = Field(("timm", "onnx", "torch"), min_length=1)
    """timm: model.safetensors, config.json and a model card, which are always there; onnx:
    model.onnx; torch: model.pt2."""
    with_preprocessing: bool = False
    """The graphs take pictures as they are decoded (uint8, batch x height x width x colours) and
    normalise them; by default they take normalised float32 images (batch x colours x height x
    width)."""
    license: str = Field("unknown", pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """For the model card, as the Hugging Face hub spells it, such as apache-2.0. We do not guess
    it."""
    results_from: str | None = Field(None, examples=["runs"])
    """Where to look for evaluations, probes and tunings of these weights, for the model card; by
    default in the folder that the run lies in."""

    push_to: str | None = Field(None, examples=["user/mine"])
    """A repository on the Hugging Face hub, USER/NAME, that gets the export as one commit each
    time; it is made where it is not there. The token is the hub's own (`hf auth login`, or
    HF_TOKEN)."""
    revision: str | None = Field(None, examples=["v2"])
    """The branch there that the commit goes to; null: main."""
    private: bool = True
    """Whether a repository that is made is private; with true, one that is public already is
    refused."""
    record: RecordSettings = RecordSettings()

    @model_validator(mode="after")
    def _graphs_are_asked_for(self) -> "ExportSettings":
        if self.with_preprocessing and not self.graphs:
            raise UserError(
                "with_preprocessing",
                "true has no effect without a graph",
                "add onnx or torch to formats",
                code="conflict",
            )
        if self.push_to is None and (self.revision is not None or not self.private):
            field = "private" if self.revision is None else "revision"
            raise UserError(
                field,
                "has no effect without push_to",
                f"set push_to=USER/NAME, or remove {field}",
                code="conflict",
            )
        return self

    @property
    def graphs(self) -> tuple[Format, ...]:
        return tuple(each for each in ("onnx", "torch") if each in self.formats)

    def identity(self, *, weights_sha256: str) -> dict[str, Any]:
        """What makes two exports the same; `request` in export.json."""
        return {
            "weights_sha256": weights_sha256,
            "formats": ["timm", *self.graphs],
            "with_preprocessing": self.with_preprocessing,
            "license": self.license,
        }

    def is_begun(self, checkpoint: Checkpoint | None) -> bool:
        """Whether `out` is this export of these weights. An error where something else is."""
        request = self.identity(weights_sha256=checkpoint.sha256) if checkpoint else {}
        return is_output(
            Path(self.out), request, record=RECORD, key="request", kind="an export", field="out"
        )


def is_exported(settings: ExportSettings) -> bool:
    """Of the weights that are there now; where these are gone since, by its record. Nothing large
    is read."""
    has_record = (Path(settings.out) / RECORD).exists()
    checkpoint = Checkpoint.found(settings.pretrained) if has_record else None
    return settings.is_begun(checkpoint) if checkpoint or not has_record else True
