"""Effective width m and average connections per layer Omega: of a model, and the sizes that have a given Omega (no torch here).

Letters as in paper A: S tokens, C channels, m = S C; gamma the hidden width of a mixing as a multiple of its input (an S-Mixer has
nothing hidden: 1); p the density of a SW-MLP. A mixing layer is a sparse m x gamma m matrix: C copies of a gamma S x S one across
tokens, S copies of a gamma C x C one across channels; Omega is the mean of both numbers of entries. The calculators return the
integer nearest to the real solution: that is how every pair that the paper prints came about.
"""

import math
from dataclasses import dataclass

from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec, StructuredMlpSpec


@dataclass(frozen=True)
class Widest:
    """The widest mixer of an Omega, as real numbers: a model takes the integers nearby."""

    num_tokens: float
    num_channels: float
    width: float


def mixer_connections(*, num_tokens: float, num_channels: float, gamma: float = 1.0) -> float:
    """Omega = gamma (C S^2 + C^2 S) / 2"""
    return gamma * num_tokens * num_channels * (num_tokens + num_channels) / 2


def tokens_for(omega: float, *, num_channels: int, gamma: float = 1.0) -> int:
    """S of a mixer with so many channels and connections per layer."""
    return _other_side(omega, gamma=gamma, given=num_channels, names=("num_channels", "tokens"))


def channels_for(omega: float, *, num_tokens: int, gamma: float = 1.0) -> int:
    """C of a mixer with so many tokens and connections per layer: Omega is the same when S and C change places."""
    return _other_side(omega, gamma=gamma, given=num_tokens, names=("num_tokens", "channels"))


def widest(omega: float, *, gamma: float = 1.0) -> Widest:
    """C* = S* = (Omega / gamma)^(1/3): m is the greatest where tokens and channels are as many."""
    _check_positive(omega=omega, gamma=gamma)
    side = math.cbrt(omega / gamma)
    return Widest(num_tokens=side, num_channels=side, width=side**2)


def sparse_width(omega: float, *, density: float, gamma: float = 1.0) -> int:
    """m of a SW-MLP: Omega = p gamma m^2."""
    _check_positive(omega=omega, gamma=gamma, density=density)
    return max(1, round(math.sqrt(omega / (density * gamma))))


def effective_width(spec: AnySpec, *, image_size: int) -> int | None:
    """m; None for the models that have no one width."""
    match spec:
        case MlpSpec():
            return spec.width
        case MixerSpec():
            return spec.tokens(image_size=image_size) * spec.num_channels
        case SparseMlpSpec():
            return spec.width_at(image_size=image_size)
        case StructuredMlpSpec():
            return spec.num_rows * spec.num_columns
        case _:
            return None


def average_connections(spec: AnySpec, *, image_size: int) -> float | None:
    """Omega of the blocks' matrices as they are built (hidden sizes rounded); None where the papers define none.

    A first block that makes S tokens of S0 counts like the others, and a mask's entries by their expected number.

    Mixer-B/16 with its hidden sizes 384 and 3072 has 260,112,384: the 2.6e8 that the paper's table prints. The table has 2.6e8 for
    Mixer-B-W, too, whose own gamma = 4.57 gives 2.9e8, and gamma = 4 would give 2.54e8. The sweep over P is at 290,217,984: that of
    S = 196, C = 768 with gamma = 4 for both mixings.
    """
    match spec:
        case MlpSpec():
            return float(spec.width * (spec.hidden_width if spec.bottleneck == "inverted" else spec.width))
        case MixerSpec():
            tokens, channels = spec.tokens(image_size=image_size), spec.num_channels
            one_layer = spec.layers_per_mixing == 1
            across = (tokens, channels) if one_layer else spec.hidden_sizes(num_tokens=tokens)
            return tokens * channels * sum(across) / 2
        case SparseMlpSpec():
            return spec.density * (spec.expansion or 1.0) * spec.width_at(image_size=image_size) ** 2
        case _:
            return None


def _other_side(omega: float, *, gamma: float, given: int, names: tuple[str, str]) -> int:
    """The positive root x of gamma (a x^2 + a^2 x) / 2 = Omega, a being what is given."""
    _check_positive(omega=omega, gamma=gamma, **{names[0]: given})
    # Not (-a + sqrt(a^2 + d)) / 2, which loses all digits where a^2 is far greater than d.
    d = 8 * omega / (gamma * given)
    found = round(d / (2 * (given + math.sqrt(given**2 + d))))
    if found < 1:
        least = gamma * (given + given**2) / 2
        raise ValueError(
            f"omega: {omega:g} is too small for {names[0]} {given} with gamma {gamma:g}: not one of {names[1]} is left; "
            f"give {math.ceil(least)} or more"
        )
    return found


def _check_positive(**given: float) -> None:
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: {value} will not do; give a number greater than 0")
