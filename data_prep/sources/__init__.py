"""One module per archive layout.

To add a layout, add a module with a settings section (a `kind`) and a subclass of `Source`, and a
line to both lists below.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from data_prep.archives.guard import SourceError
from data_prep.sources.base import Arrangement, Source
from data_prep.sources.cifar import CifarSettings, CifarSource
from data_prep.sources.dataset import DatasetSettings, DatasetSource
from data_prep.sources.folder import FolderSettings, FolderSource
from data_prep.sources.huggingface import HuggingFaceSettings, HuggingFaceSource
from data_prep.sources.imagenet1k import ImageNet1kSettings, ImageNet1kSource
from data_prep.sources.imagenet21k import ImageNet21kSettings, ImageNet21kSource
from data_prep.sources.mnist import MnistSettings, MnistSource
from data_prep.sources.stl10 import Stl10Settings, Stl10Source
from data_prep.sources.synthetic import SyntheticSettings, SyntheticSource
from data_prep.sources.tinyimagenet import TinyImageNetSettings, TinyImageNetSource

__all__ = [
    "Arrangement",
    "Source",
    "SourceError",
    "SourceSettings",
    "SyntheticSettings",
    "open_source",
]

SourceSettings = Annotated[
    FolderSettings
    | SyntheticSettings
    | ImageNet21kSettings
    | ImageNet1kSettings
    | CifarSettings
    | MnistSettings
    | Stl10Settings
    | TinyImageNetSettings
    | HuggingFaceSettings
    | DatasetSettings,
    Field(discriminator="kind"),
]

_SOURCES: dict[type[Any], type[Any]] = {
    FolderSettings: FolderSource,
    SyntheticSettings: SyntheticSource,
    ImageNet21kSettings: ImageNet21kSource,
    ImageNet1kSettings: ImageNet1kSource,
    CifarSettings: CifarSource,
    MnistSettings: MnistSource,
    Stl10Settings: Stl10Source,
    TinyImageNetSettings: TinyImageNetSource,
    HuggingFaceSettings: HuggingFaceSource,
    DatasetSettings: DatasetSource,
}


def open_source(
    settings: SourceSettings, *, num_workers: int, work_directory: Path | None = None
) -> Source:
    """Open the source. `work_directory` is for archives that must be unpacked before reading."""
    source: Source = _SOURCES[type(settings)](settings)
    source.num_workers, source.work_directory = num_workers, work_directory
    return source
