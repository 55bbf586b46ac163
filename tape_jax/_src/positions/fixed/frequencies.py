"""Frequencies of rotary states, and their adaptations to longer sequences."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tape_jax._src.core.checks import choose, number, positive, real, require, set_field, truth

# Functions that check fields of :class:`RopeScaling` and normalize them.
_SCALING: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("factor", "beta_fast", "beta_slow"), real),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), number),
    "original_length": positive,
    "magnitude": functools.partial(real, optional=True),
    "truncate": truth,
    **dict.fromkeys(("short_factor", "long_factor"), lambda what, given: _factors(what, given)),
}


def _factors(what: str, given: Any) -> tuple[float, ...]:
    """Returns positive numbers as a tuple; ValueError for anything else."""
    require(isinstance(given, tuple | list), f"{what} must be a tuple of numbers; got {given!r}")
    found = tuple(real(what, x) for x in given)
    require(all(x > 0 for x in found), f"{what} must be positive; got {given!r}")
    return found


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """An adaptation of rotary frequencies to sequences longer than those trained on.

    Attributes:
      kind: ``none``; ``linear`` (positions divided by ``factor``); ``ntk`` (base multiplied by
        ``factor ** (D / (D - 2))``); ``dynamic`` (NTK with a factor that follows the length of the
        row, or the ``length`` of a call); ``yarn`` (frequencies blended by wavelength, states
        scaled by a magnitude); ``llama3``; ``longrope`` (each frequency divided by its own factor,
        from one list up to the trained length and from another beyond it; states scaled by a
        magnitude); ``proportional`` (as ``linear``, but if only a share of the dimensions rotates,
        it keeps its frequencies of the whole head).
      factor: ratio of the wanted length to the trained one.
      original_length: the trained length, in tokens (dynamic, yarn, llama3, longrope).
      beta_fast, beta_slow: yarn; rotations over ``original_length`` above which a frequency is
        kept, and below which it is fully interpolated.
      low_freq_factor, high_freq_factor: llama3; the corresponding bounds.
      magnitude: factor on the states. None: for yarn ``0.1 ln(factor) + 1``, for longrope ``sqrt(1
        + ln(factor) / ln(original_length))``; 1 for a ``factor`` up to 1.
      truncate: yarn; round the blending range outwards to whole dimensions, as published.
      short_factor, long_factor: longrope; divisors of the frequencies in sequences up to
        ``original_length`` tokens, and in longer ones; one number for each rotating frequency.
        ``()``: 1 in short ones, ``factor`` in long ones.
    """

    kind: str = "none"
    factor: float = 1.0
    original_length: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    magnitude: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self):
        kinds = ("none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "proportional")
        choose("rope scaling", self.kind, kinds)
        for name, check in _SCALING.items():
            set_field(self, name, check(f"rope scaling: {name}", getattr(self, name)))
        for name in ("factor", "beta_slow", "magnitude"):
            value = getattr(self, name)
            require(
                value is None or value > 0, f"rope scaling: {name} must be positive; got {value}"
            )
        require(
            self.kind != "none" or self.factor == 1,
            f"rope scaling: factor = {self.factor} needs a kind, such as 'linear'; got 'none'",
        )
        require(
            self.beta_fast > self.beta_slow,
            f"rope scaling: beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}",
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"rope scaling: high_freq_factor {self.high_freq_factor} must exceed "
            f"low_freq_factor {self.low_freq_factor}",
        )
        require(
            self.kind == "longrope" or not (self.short_factor or self.long_factor),
            f"rope scaling: short_factor and long_factor are of the kind 'longrope'; got "
            f"{self.short_factor} and {self.long_factor} with {self.kind!r}",
        )
        require(
            self.kind != "longrope" or self.original_length > 1,
            f"rope scaling: longrope needs an original_length above 1; got {self.original_length}",
        )

    @property
    def state_magnitude(self) -> float:
        """Factor on the start state: for yarn and longrope ``magnitude`` or its default, else 1."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.magnitude is not None:
            return self.magnitude
        growth = math.log(max(self.factor, 1.0))
        if self.kind == "longrope":
            return math.sqrt(1 + growth / math.log(self.original_length))
        return 0.1 * growth + 1

    def divisors(self, planes: int, length: int) -> np.ndarray:
        """Returns the divisors of longrope's frequencies for sequences of ``length`` tokens."""
        beyond = length > self.original_length
        name = "long_factor" if beyond else "short_factor"
        found = getattr(self, name) or (self.factor if beyond else 1.0,) * planes
        require(
            len(found) == planes,
            f"rope scaling: {name} must hold one number for each of the {planes} frequencies; got "
            f"{len(found)}",
        )
        return np.asarray(found)


def frequencies(
    head_dim: int,
    base: float = 10_000.0,
    scaling: RopeScaling | None = None,
    length: int | None = None,
    partial_rotary_factor: float = 1.0,
) -> np.ndarray:
    """Angular frequencies of RoPE (RoFormer, section 3.2.2), adapted by ``scaling``.

    Args:
      head_dim: ``D``, even.
      base: the rotary base.
      scaling: linear (Chen et al. 2023), NTK and dynamic NTK (bloc97 2023), YaRN (Peng et al.
        2023, section 3.2), llama3 (Llama 3, section 3.2) or LongRoPE (Ding et al. 2024).
      length: sequence length in tokens; read by ``dynamic`` and ``longrope``.
      partial_rotary_factor: share of the dimensions that rotate (Black et al. 2022, section 2.1.1);
        the frequencies of the others, which come last, are zero.

    Returns:
      Frequencies in radians per token, float64 ``[D/2]``.
    """
    if scaling is not None and scaling.kind == "proportional":
        omega = frequencies(head_dim, base) / scaling.factor
        omega[int(partial_rotary_factor * head_dim / 2) :] = 0.0
        return omega
    if partial_rotary_factor < 1:
        turning = rotating_dims(head_dim, partial_rotary_factor)
        moving = frequencies(turning, base, scaling, length) if turning else np.zeros(0)
        return np.pad(moving, (0, (head_dim - turning) // 2))
    scaling = scaling or RopeScaling()
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    stretch = scaling.factor
    if scaling.kind == "dynamic":
        stretch = dynamic_stretch(scaling, length or 0)
    if scaling.kind in ("ntk", "dynamic") and head_dim > 2:
        base = base * stretch ** (head_dim / (head_dim - 2))
    omega = base**-exponent
    if scaling.kind == "linear":
        return omega / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(omega, head_dim, base, scaling)
    if scaling.kind == "llama3":
        rotations = scaling.original_length * omega / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return omega * (keep + (1 - keep) / scaling.factor)
    if scaling.kind == "longrope":
        return omega / scaling.divisors(head_dim // 2, length or 0)
    return omega


def rotating_dims(head_dim: int, partial_rotary_factor: float) -> int:
    """Returns the number of dimensions of a head that rotate."""
    return 2 * int(head_dim * partial_rotary_factor / 2)


def which_rotate(head_dim: int, axes: int, partial_rotary_factor: float) -> np.ndarray:
    """Returns which frequencies of a head rotate, ``[D/2]`` bool."""
    planes = planes_of_axes(head_dim, axes, partial_rotary_factor)
    return np.concatenate([np.arange(count) < turning for count, turning in planes])


def planes_of_axes(head_dim: int, axes: int, partial_rotary_factor: float) -> list[tuple[int, int]]:
    """Returns the number of frequencies of each coordinate, and how many of them are not zero."""
    counts = [len(part) for part in np.array_split(np.arange(head_dim // 2), axes)]
    return [(count, rotating_dims(2 * count, partial_rotary_factor) // 2) for count in counts]


def dynamic_stretch(scaling: RopeScaling, length: Any) -> Any:
    """Returns dynamic NTK's factor on the base for ``length`` tokens, before the exponent."""
    excess = length / scaling.original_length - 1
    return 1 + scaling.factor * excess * (excess > 0)


def _yarn(omega: np.ndarray, head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_length / (rotations * 2 * math.pi))
            / (2 * math.log(base))
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    return omega * (keep + (1 - keep) / scaling.factor)
