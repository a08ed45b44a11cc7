"""Does a GPU compute what the CPU does? The checks of benchmarks/gpu/check_cuda.py: `make
gpu-tests`; skipped without a GPU."""

import pytest
import torch

from tests.test_gpu_kit import REPOSITORY, module_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or not run with -m cuda"),
]
CHECKS = module_of(REPOSITORY / "benchmarks/gpu/check_cuda.py").checks()


@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_computes_what_the_cpu_does(name: str) -> None:
    good, words = CHECKS[name](torch.device("cuda", 0))
    assert good, words
