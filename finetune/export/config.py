"""Settings of `finetune export`, and the files that it writes.

OUT/model.safetensors   exact copy of the weights; renamed weights if timm has the architecture
OUT/config.json         checkpoint metadata, for wide-mlps and timm
OUT/README.md           model card for the hub (model_card.py)
OUT/model.onnx          ONNX graph; weights above 1.5 GB are in model.onnx.data
OUT/model.pt2           torch.export program
OUT/export.json         hashes, versions, and largest difference between logits of graph and model
OUT/record.json         source run and plan; not pushed to the hub
OUT/sha256.json         hashes of the other files that are pushed
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from data_prep.errors import UserError
from data_prep.settings import Settings
from finetune.config import AllowedImport, Pretrained
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.run import is_output
from pretrain.record import RecordSettings

Format = Literal["timm", "onnx", "torch"]
ONNX, PT2, RECORD = "model.onnx", "model.pt2", "export.json"


class ExportSettings(Settings):
    of_verb = "finetune export"
    example_with: ClassVar = {"revision": "push_to=USER/NAME", "private": "push_to=USER/NAME"}
    pretrained: Pretrained
    out: str = Field(examples=["exports/mine"])
    """Output directory. It appears only when all files are complete. A directory with other content
    is not changed."""
    formats: tuple[Format, ...] = Field(("timm", "onnx", "torch"), min_length=1)
    """Formats to write. timm: model.safetensors, config.json and a model card (always written).
    onnx: model.onnx. torch: model.pt2."""
    with_preprocessing: bool = False
    """Input of the exported graphs. true: decoded images (uint8, batch x height x width x
    channels), which the graph normalizes. false: normalized float32 images (batch x channels x
    height x width)."""
    license: str = Field("unknown", pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """License of the weights for the model card, as an identifier of the Hugging Face hub, for
    example apache-2.0."""
    push_to: str | None = Field(None, examples=["user/mine"])
    """Hugging Face repository USER/NAME that gets the export as one commit. A missing repository is
    created. Log in with `hf auth login` or HF_TOKEN."""
    revision: str | None = Field(None, examples=["v2"])
    """Branch to push to. Default: main."""
    private: bool = True
    """true: create a private repository, and fail if it exists and is public. false: create a
    public repository."""
    record: RecordSettings = RecordSettings()
    allow_import: AllowedImport = None

    @model_validator(mode="after")
    def _graphs_are_asked_for(self) -> "ExportSettings":
        if self.with_preprocessing and not self.graphs:
            problem, fix = "true has no effect without a graph", "add onnx or torch to formats"
            raise UserError("with_preprocessing", problem, fix, code="conflict")
        for field, is_set in (
            ("revision", self.revision is not None),
            ("private", not self.private),
        ):
            if self.push_to is None and is_set:
                fix = f"set push_to=USER/NAME, or remove {field}"
                raise UserError(field, "has no effect without push_to", fix, code="conflict")
        return self

    @property
    def graphs(self) -> tuple[Format, ...]:
        return tuple(each for each in ("onnx", "torch") if each in self.formats)

    def identity(self, source: Checkpoint) -> dict[str, Any]:
        """Return the facts that identify an export. export.json stores them as `request`."""
        return {
            "weights_sha256": source.sha256,
            "model_sha256": source.model_sha256,
            "formats": ["timm", *self.graphs],
            "with_preprocessing": self.with_preprocessing,
            "license": self.license,
        }

    def is_begun(self, checkpoint: Checkpoint | None) -> bool:
        """True if `out` holds this export, complete or not. Fail if `out` holds something else."""
        request = self.identity(checkpoint) if checkpoint else {}
        return is_output(Path(self.out), request, record=RECORD, key="request", kind="an export")


def is_exported(settings: ExportSettings) -> bool:
    """True if `out` has an export of the present weights, or of weights that no longer exist."""
    has_record = (Path(settings.out) / RECORD).exists()
    checkpoint = Checkpoint.found(settings.pretrained) if has_record else None
    return settings.is_begun(checkpoint) if checkpoint or not has_record else True
