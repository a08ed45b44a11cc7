"""Permutations compared with dense matrices. An index survives every way of storing a model, and a
wrong index is an error."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pretrain.models.layers.permutation import Permutation, inverse_of, random_permutation

SIZE = 12
Kept = Callable[[dict[str, Tensor], Path], dict[str, Tensor]]


def matrix_of(permutation: Permutation) -> Tensor:
    """Return J with J x = x[index]: entry (i, index(i)) is 1."""
    return torch.eye(len(permutation.index), dtype=torch.float64)[permutation.index.long()]


def drawn(size: int = SIZE, *, seed: int = 0) -> Permutation:
    return random_permutation(size, generator=torch.Generator().manual_seed(seed))


def test_a_permutation_is_its_matrix_forwards_and_backwards() -> None:
    permutation, x = drawn(), torch.randn(3, SIZE, dtype=torch.float64, requires_grad=True)
    dense = matrix_of(permutation)
    assert not torch.equal(
        dense, dense.T
    )  # otherwise the inverse is the same, and a wrong backward pass would pass
    y, weights = permutation(x), torch.randn(3, SIZE, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    assert torch.equal(y, x @ dense.T)
    assert torch.equal(gradient, weights @ dense)


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda x: x,
        lambda x: x.T.contiguous().T,
        lambda x: x[:1].expand(3, -1),
        lambda x: x.repeat(1, 2)[:, ::2],
    ],
    ids=["contiguous", "transposed", "expanded", "strided"],
)
def test_gradients_are_those_of_finite_differences(laid_out: Callable[[Tensor], Tensor]) -> None:
    permutation = drawn()
    x = torch.randn(3, SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permutation(laid_out(x)), (x,))
    assert torch.autograd.gradgradcheck(lambda x: permutation(laid_out(x)).square(), (x,))
    assert torch.equal(permutation(laid_out(x)), laid_out(x) @ matrix_of(permutation).T)


def is_whole(module: nn.Module, index: Tensor) -> bool:
    found = module[0]  # type: ignore[index]
    is_inverse = torch.equal(
        found.index[found.inverse.long()], torch.arange(SIZE, dtype=torch.int32)
    )
    return is_inverse and found.inverse.dtype == torch.int32 and torch.equal(found.index, index)


def through_torch(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    torch.save(state, folder / "model.pt")
    return dict(torch.load(folder / "model.pt", weights_only=True))


def through_safetensors(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    save_file(state, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


def as_int64(state: dict[str, Tensor], _folder: Path) -> dict[str, Tensor]:
    return {name: tensor.long() for name, tensor in state.items()}


@pytest.mark.parametrize("kept", [through_torch, through_safetensors, as_int64])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_index_comes_back_and_the_inverse_with_it(
    kept: Kept, assign: bool, device: str, tmp_path: Path
) -> None:
    index = drawn(seed=1).index
    state = kept(nn.Sequential(Permutation(index)).state_dict(), tmp_path)
    assert list(state) == ["0.index"]
    with torch.device(device):
        other = nn.Sequential(drawn(seed=2))
    if device == "meta" and not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(state, assign=assign)
    assert is_whole(other, index)


def test_copies_and_conversions_keep_index_and_inverse() -> None:
    index = drawn(seed=1).index
    module = nn.Sequential(Permutation(index), nn.Linear(SIZE, 2))
    for other in (
        copy.deepcopy(module),
        module.to("cpu"),
        module.bfloat16(),
        module.to(torch.float16),
        module.float(),
    ):
        assert is_whole(other, index)
    on_meta = module.to("meta")
    assert on_meta[0].index.is_meta
    assert on_meta[0].inverse.is_meta


def test_a_permutation_is_drawn_on_the_cpu_whatever_the_device() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert drawn().index.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn().index.tolist() == drawn().index.tolist() != drawn(seed=1).index.tolist()


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor(each)
        for each in ([0, 1, 1, 3], [0, 1, 2, 4], [0, -1, 2, 3], [0.0, 1.0, 2.0, 3.0])
    ],
    ids=["doubled", "too large", "negative", "not integers"],
)
def test_a_wrong_index_is_refused(index: Tensor) -> None:
    with pytest.raises(ValueError, match="index is not a permutation of 0 to 3"):
        Permutation(index)
    module = nn.Sequential(drawn(4, seed=3))
    kept = module[0].index.clone()
    for strict, assign in ((True, False), (False, True)):
        with pytest.raises(
            RuntimeError, match=r"0\.index is not a permutation .*another copy"
        ) as raised:
            module.load_state_dict({"0.index": index}, strict=strict, assign=assign)
        assert str(raised.value).count("\n") == 1  # one line of torch, one of ours
        assert torch.equal(module[0].index, kept)
        assert torch.equal(module[0].inverse, inverse_of(kept))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.index: .*\[5\].*\[4\]"):
        module.load_state_dict({"0.index": drawn(5).index})
