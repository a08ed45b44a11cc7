"""One file per archive layout; each turns what people download into a `Source`.

A new layout is a new file with a class that satisfies `Source`, a settings section in `config.py`, and a line in `open_source`.
"""

from data_prep.sources.base import Arrangement, Source, SourceError
from data_prep.sources.cifar import CifarSource
from data_prep.sources.config import (
    CifarSettings,
    DatasetSettings,
    FolderSettings,
    ImageNet1kSettings,
    ImageNet21kSettings,
    MnistSettings,
    SourceSettings,
    Stl10Settings,
    SyntheticSettings,
    TinyImageNetSettings,
)
from data_prep.sources.dataset import DatasetSource
from data_prep.sources.folder import FolderSource
from data_prep.sources.imagenet1k import ImageNet1kSource
from data_prep.sources.imagenet21k import ImageNet21kSource
from data_prep.sources.mnist import MnistSource
from data_prep.sources.stl10 import Stl10Source
from data_prep.sources.synthetic import SyntheticSource
from data_prep.sources.tinyimagenet import TinyImageNetSource

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
        case CifarSettings():
            return CifarSource(settings)
        case MnistSettings():
            return MnistSource(settings)
        case Stl10Settings():
            return Stl10Source(settings)
        case TinyImageNetSettings():
            return TinyImageNetSource(settings)
        case DatasetSettings():
            return DatasetSource(settings)
