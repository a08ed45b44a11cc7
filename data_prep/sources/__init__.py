"""One module per archive layout.

To add a layout, add a module with a settings section (a `kind`) and a subclass of `Source`, and add
the section to `SourceSettings`.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from data_prep.archives.guard import SourceError
from data_prep.sources.base import Arrangement, Source
from data_prep.sources.cifar import CifarSettings
from data_prep.sources.dataset import DatasetSettings
from data_prep.sources.digits import DigitsSettings
from data_prep.sources.folder import FolderSettings
from data_prep.sources.huggingface import HuggingFaceSettings
from data_prep.sources.imagenet1k import ImageNet1kSettings
from data_prep.sources.imagenet21k import ImageNet21kSettings
from data_prep.sources.mnist import MnistSettings
from data_prep.sources.stl10 import Stl10Settings
from data_prep.sources.synthetic import SyntheticSettings
from data_prep.sources.tinyimagenet import TinyImageNetSettings

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
    | DigitsSettings
    | HuggingFaceSettings
    | DatasetSettings,
    Field(discriminator="kind"),
]


def open_source(
    settings: SourceSettings, *, num_workers: int, work_directory: Path | None = None
) -> Source:
    """Open the source. `work_directory` is for archives that must be unpacked before reading."""
    source = Source.by_settings[type(settings)](settings)
    source.num_workers, source.work_directory = num_workers, work_directory
    return source
