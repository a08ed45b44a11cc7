"""Made-up tables of features for the tests of probing, and the settings of small probes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.probe.config import ProbeSettings
from finetune.probe.features import Table
from finetune.probe.rows import Rows, Standard
from tests.finetune.conftest import CPU

FEATURES, CLASSES = 6, 3


def settings_of(**changes: Any) -> ProbeSettings:
    tree = {"run_dir": "r", "dataset": "d", "optimizer": "sgd", "batch_size": 32, "epochs": (3,)}
    return ProbeSettings.model_validate(tree | changes, strict=False)


def blobs(count: int, *, seed: int, spread: float = 3.0) -> Table:
    """Clusters about the same centres for every seed, on unequal scales."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * spread
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    values = (centres[labels] + torch.randn(count, FEATURES, generator=generator)) * torch.arange(1.0, 1 + FEATURES)
    return Table((values + 5,), labels)


def rows_of(*tables: Table) -> Rows:
    return Rows(list(tables), standard=Standard.of(tables[0]), device=CPU)


PROBE: dict[str, Any] = {
    "optimizer": "sgd",
    "lrs": (1e-3, 1e-1),
    "weight_decays": (0.0, 1e-2),
    "epochs": (6,),
    "batch_size": 16,
}
"""Of a few seconds' work."""


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made
