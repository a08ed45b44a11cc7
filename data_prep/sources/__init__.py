"""One file per archive layout; each turns what people download into a `Source`.

A new layout is a new file with a class that satisfies `Source`, a settings section in `config.py`, and a line in `open_source`.
"""

from data_prep.sources.base import Arrangement, Source, SourceError
from data_prep.sources.config import (
    FolderSettings,
    ImageNet1kSettings,
    ImageNet21kSettings,
    SourceSettings,
    SyntheticSettings,
)
from data_prep.sources.folder import FolderSource
from data_prep.sources.imagenet1k import ImageNet1kSource
from data_prep.sources.imagenet21k import ImageNet21kSource
from data_prep.sources.synthetic import SyntheticSource

__all__ = ["Arrangement", "Source", "SourceError", "SourceSettings", "open_source"]


def open_source(settings: SourceSettings, *, num_workers: int) -> Source:
    match settings:
        case FolderSettings():
            return FolderSource(settings)
        case ImageNet21kSettings():
            return ImageNet21kSource(settings)
        case ImageNet1kSettings():
            return ImageNet1kSource(settings)
        case SyntheticSettings():
            return SyntheticSource(settings, num_workers=num_workers)
