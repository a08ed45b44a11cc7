"""JSON schemas for editors: the keys of each config and their meaning.

`wide-mlps init` and, in a checkout, `make` write the schemas into configs/schemas/.
"""

from pathlib import Path

from cluster.plan_file import PlanSettings
from data_prep.build.config import BuildSettings
from data_prep.explain import json_schema
from data_prep.index.config import IndexSettings
from data_prep.publish import make_directory, write_atomic
from data_prep.settings import Settings
from finetune.evaluate.config import EvaluateSettings
from finetune.export.config import ExportSettings
from finetune.probe.config import KnnSettings, ProbeSettings
from finetune.tune.config import TuneSettings
from pretrain.config import PretrainSettings

SCHEMAS: dict[str, type[Settings]] = {
    "build": BuildSettings,
    "index": IndexSettings,
    "train": PretrainSettings,
    "probe": ProbeSettings,
    "knn": KnnSettings,
    "tune": TuneSettings,
    "evaluate": EvaluateSettings,
    "export": ExportSettings,
    "plan": PlanSettings,
}


def write_schemas(directory: Path) -> None:
    make_directory(directory)
    for name, schema in SCHEMAS.items():
        write_atomic(directory / f"{name}.json", json_schema(schema).encode())
