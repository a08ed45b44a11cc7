"""Settings of `data_prep build`: the source, the stored image and the shards."""

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from data_prep.build.parts import LocalDirectory
from data_prep.errors import UserError
from data_prep.images import ImageSpec
from data_prep.settings import NumWorkers, read_lines
from data_prep.sources import SourceSettings, SyntheticSettings

DEFAULT_SHARD = 8192


def _first_present(given: Any) -> Any:
    """Choose from a list of sources: the first source with an existing path, or else the last."""
    if isinstance(given, list) and given:
        given = next(filter(_is_present, given), given[-1])
    if not isinstance(given, dict):
        return given
    # strict mode does not accept a list for a tuple after a Python validator
    return {key: tuple(each) if isinstance(each, list) else each for key, each in given.items()}


def _is_present(source: Any) -> bool:
    if not isinstance(source, dict) or not Path(str(source.get("path", "."))).exists():
        return False
    return source.get("kind") != "digits" or find_spec("sklearn") is not None


class BuildSettings(ImageSpec):
    of_verb = "data_prep build"
    source: Annotated[
        SourceSettings,
        BeforeValidator(
            _first_present, json_schema_input_type=SourceSettings | list[SourceSettings]
        ),
    ]
    """The archive or folder to read; `kind` is its layout. If this is a list, the first source
    whose `path` exists is read, otherwise the last source. Override a list with 'source={kind:
    folder, path: photos}'."""
    out: LocalDirectory = Field(examples=["data/mine"])
    """The dataset directory (a path, not a URL). `data_prep push` copies it to a bucket."""
    name: str | None = Field(None, examples=["my-pictures"])
    """Dataset name in manifests and reports (default: the last part of `out`)."""
    classes: tuple[str, ...] | None = Field(None, min_length=1, examples=[["cat", "dog"]])
    """Names of the classes to keep (default: all classes)."""
    classes_file: str | None = Field(None, examples=["classes.txt"])
    """Text file with one class to keep per line, instead of `classes`."""
    exclude: tuple[str, ...] = Field((), examples=[["duplicates.jsonl"]])
    """Files that list images to skip, written by `data_prep dedup`."""
    per_class: dict[str, Annotated[int, Field(ge=1)]] | None = Field(
        None, examples=[{"train": 100, "val": 50}]
    )
    """Number of random images of each class, for each split. Classes with fewer images and splits
    without a number are skipped. If the source has no `val`, `val` images come from `train`.
    Byte-equal files of a folder then stay in one split. null: all images."""
    samples_per_shard: int = Field(DEFAULT_SHARD, ge=1, le=1_000_000)
    """Number of images in a shard; the last shard of a split may have fewer. The default makes up
    to 16 smaller shards, of at least 512 images, from a split of fewer than 131,072 images. Up to
    16 workers can then write the split."""
    order: Literal["shuffled", "listed"] = "shuffled"
    """Order of the images. shuffled: a seeded random order, so every shard mixes the classes.
    listed: the sorted order of the source."""
    seed: int = Field(0, ge=0)
    """Seed of the shuffled order and of `per_class`."""
    max_reject_fraction: float = Field(0.01, ge=0, le=1)
    """Largest accepted fraction of rejected inputs. Above it, the exit code is 1, although the
    dataset is complete. rejected.jsonl lists the rejected inputs."""
    num_workers: NumWorkers = 0
    """Number of worker processes; 0 means one per core. The output does not depend on it."""

    @model_validator(mode="after")
    def _default_images_dir(self) -> "BuildSettings":
        """Set the default of `images_dir`: a folder next to the dataset."""
        if not isinstance(self.source, SyntheticSettings) or self.source.images_dir is not None:
            return self
        out = self.directory
        source = self.source.model_copy(
            update={"images_dir": str(out.with_name(out.name + "-images"))}
        )
        return self.model_copy(update={"source": source})

    @model_validator(mode="after")
    def _out_is_not_the_source(self) -> "BuildSettings":
        path = (
            self.source.images_dir
            if isinstance(self.source, SyntheticSettings)
            else getattr(self.source, "path", None)
        )
        if path is not None and self.directory.resolve().is_relative_to(Path(path).resolve()):
            raise UserError(
                "out",
                f"{self.out!r} is the source itself or a folder inside it",
                "choose another directory",
                code="conflict",
            )
        return self

    @model_validator(mode="after")
    def _one_class_list(self) -> "BuildSettings":
        if self.classes is not None and self.classes_file is not None:
            raise UserError(
                "classes_file",
                "it cannot be combined with the setting classes",
                "remove one of them",
                code="conflict",
            )
        return self

    @property
    def directory(self) -> Path:
        return Path(self.out)

    @cached_property
    def kept_classes(self) -> frozenset[str] | None:
        """Names of the classes to keep; None: all."""
        if self.classes_file is None:
            return None if self.classes is None else frozenset(self.classes)
        return frozenset(read_lines("classes_file", self.classes_file, spelled=True))

    @property
    def dataset_name(self) -> str:
        return self.name or Path(self.out).resolve().name

    @property
    def tables(self) -> dict[str, str]:
        """Additional files that the source reads: setting -> path."""
        names = ["labels"] if self.source.kind == "folder" else []
        files = {name: getattr(self.source, name, None) for name in [*names, "real"]}
        return {name: file for name, file in files.items() if file is not None}

    def resolved(self) -> "BuildSettings":
        """Return the config with absolute paths, and with the names of `classes_file` in `classes`.
        `merge` reads this config."""
        paths = {key: getattr(self.source, key, None) for key in ("path", "images_dir")}
        paths = {
            key: str(Path(path).resolve())
            for key, path in (paths | self.tables).items()
            if path is not None
        }
        kept = self.kept_classes
        changes = {
            "name": self.dataset_name,
            "out": str(self.directory.resolve()),
            "source": self.source.model_copy(update=paths),
            "classes": None if kept is None else tuple(sorted(kept)),
            "classes_file": None,
        }
        return self.model_copy(update=changes)
