"""Rotary states and the encodings that never change them: RoPE, YaRN, xPos, randomised RoPE."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import (
    FLOATS,
    as_array,
    choose,
    concrete,
    instance,
    not_negative,
    number,
    positive,
    real,
    require,
    require_x64,
    set_field,
    truth,
    type_name,
    typed,
)
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.drawing import RandomPositions, drawn_positions
from tape_jax._src.positions.protocol import Encoding, Param, State, as_length, as_positions

Array = jax.Array

# Angles of integers below this are plain products: in float32 they are off by 3e-4 at most.
NEAR = 2**12
# Fields of :class:`Rope` that say where a rotary state starts.
START_FIELDS = ("base", "scaling", "axes", "partial_rotary_factor", "learn_base", "still_heads")


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
        turning = _turning(head_dim, partial_rotary_factor)
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


def _turning(head_dim: int, partial_rotary_factor: float) -> int:
    """Returns the number of dimensions of a head that rotate."""
    return 2 * int(head_dim * partial_rotary_factor / 2)


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


def angles(
    positions: Array,
    head_dim: int,
    base: float = 10_000.0,
    *,
    scaling: RopeScaling | None = None,
    axes: int = 1,
    length: int | Array | None = None,
    partial_rotary_factor: float = 1.0,
    log_stretch: Array | None = None,
    dtype: Any = None,
) -> Array:
    """Angles ``[..., T, D/2]`` in radians, at least float32.

    With ``axes = n > 1`` the frequencies are shared out among the coordinates as evenly as
    ``D/2`` allows, and each coordinate has a whole range of them (axial RoPE). Arguments are those
    of :func:`rotary_state`.
    """
    positions, head_dim = _checked(positions, head_dim, axes)
    tokens = positions.shape[:-1] if axes > 1 else positions.shape
    if length is None:
        length = tokens[-1]
    length = as_length(length, np.broadcast_shapes(tokens[:-1], np.shape(length)))
    require_x64(dtype=dtype)
    wanted = algebra.float_type(dtype)
    compute = algebra.at_least_float32(
        jnp.promote_types(wanted, positions.dtype)
        if jnp.issubdtype(positions.dtype, jnp.floating)
        else wanted
    )
    stretch, beyond, lengths = _by_length(scaling, length, compute)
    counts = [len(part) for part in np.array_split(np.arange(head_dim // 2), axes)]
    parts = []
    for axis, count in enumerate(counts):
        omegas = [frequencies(2 * count, base, scaling, n, partial_rotary_factor) for n in lengths]
        t = positions[..., axis] if axes > 1 else positions
        # Logarithm of the factor on the base, [...].
        change = None if log_stretch is None else _log_stretch(log_stretch).astype(compute)
        if stretch is not None:
            turning = _turning(2 * count, partial_rotary_factor)
            power = turning / (turning - 2) if turning > 2 else 0.0
            change = power * jnp.log(stretch) + (0 if change is None else change)
        if change is None:
            found = [turned(t, omega, compute) for omega in omegas]
        else:
            powers = _powers(2 * count, scaling, partial_rotary_factor)
            bases = jnp.exp(change[..., None] * jnp.asarray(powers, compute))
            each = _told_apart(t, compute)[..., None]
            found = [each * (jnp.asarray(omega, compute) * bases) for omega in omegas]
        parts.append(found[0] if beyond is None else jnp.where(beyond, found[1], found[0]))
    return jnp.concatenate(parts, axis=-1)


def _checked(positions: Any, head_dim: Any, axes: int) -> tuple[Array, int]:
    """Checks and converts positions and the head dimension; ValueError if they do not fit."""
    head_dim = positive("the head dimension", head_dim)
    require(head_dim % 2 == 0, f"the head dimension must be even; got {head_dim}")
    positions = as_positions(positions)
    require(
        axes >= 1 and 2 * axes <= head_dim,
        f"axes must lie in 1..{head_dim // 2} (half the head dimension); got {axes}",
    )
    require(
        axes == 1 or (positions.ndim > 1 and positions.shape[-1] == axes),
        f"axes={axes} expects coordinates of shape [..., T, {axes}]; got {positions.shape}",
    )
    require(positions.ndim > 0, "positions must have shape [..., T]; got a scalar")
    return positions, head_dim


def _by_length(
    scaling: RopeScaling | None, length: int | Array, compute: Any
) -> tuple[Array | None, Array | None, tuple[int | None, ...]]:
    """Returns how frequencies depend on a length that may not be known yet.

    Returns:
      The stretch of dynamic NTK ``[..., 1]``, or None; for longrope, whether the length exceeds the
      trained one ``[..., 1, 1]``, or None; and the lengths of the frequencies: the known one, or
      one up to the trained length and one beyond it.
    """
    if isinstance(length, int | np.integer):
        return None, None, (length,)
    if scaling is not None and scaling.kind == "dynamic":
        return dynamic_stretch(scaling, jnp.asarray(length, compute)[..., None]), None, (None,)
    if scaling is not None and scaling.kind == "longrope":
        trained = scaling.original_length
        return None, (jnp.asarray(length) > trained)[..., None, None], (trained, trained + 1)
    return None, None, (None,)


def _log_stretch(given: Any) -> Array:
    x = as_array("log_stretch", given)
    require(
        x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating),
        f"log_stretch must be a scalar floating-point array; got {x.dtype} of shape {x.shape}",
    )
    return x


def _powers(dim: int, scaling: RopeScaling | None, partial_rotary_factor: float) -> np.ndarray:
    """Exponents of the base that give the frequencies, ``[dim / 2]``; 0 where nothing turns."""
    plain = scaling if scaling is not None and scaling.kind == "proportional" else None
    plain = plain and dataclasses.replace(plain, factor=1.0)
    unit = frequencies(dim, math.e, plain, None, partial_rotary_factor)
    return np.log(unit, out=np.zeros_like(unit), where=unit > 0)


def turned(positions: Array, omega: np.ndarray, compute: Any) -> Array:
    """Angles ``[..., n]`` of positions, in radians, without whole turns of positions far away.

    In float32 the product of a large integer and a frequency loses the remainder after whole turns.
    There turns are counted in integers: the angle is right to 2e-7, up to 2^31.

    Args:
      positions: integers or floats of any shape.
      omega: frequencies in radians per token, float64 ``[n]``.
      compute: type of the angles, float32 or float64.
    """
    plain = positions.astype(compute)[..., None] * jnp.asarray(omega, compute)
    if jnp.issubdtype(positions.dtype, jnp.floating) or compute == jnp.float64:
        return plain
    known = concrete(positions)
    if known is not None and _nearer(known, NEAR).all():
        return plain
    if positions.dtype.itemsize > 4:
        wide = positions.astype(jnp.float64)[..., None] * jnp.asarray(omega)
        exact = jnp.fmod(wide, 2 * math.pi).astype(compute)
    else:
        exact = _fixed_point(positions, omega).astype(compute)
    return jnp.where(_nearer(positions, NEAR)[..., None], plain, exact)


def _nearer(positions: Any, limit: int) -> Any:
    """Returns where ``|positions| < limit``; the least integer has no positive counterpart."""
    return (positions > -limit) & (positions < limit)


def _fixed_point(positions: Array, omega: np.ndarray) -> Array:
    """Angles from ``-pi`` to ``pi`` of int32 positions: 64 bits of a turn, of which 32 are kept."""
    turns = [int(x / (2 * math.pi) % 1.0 * 2.0**64) for x in omega]
    high, low = (jnp.asarray([n >> s & 0xFFFFFFFF for n in turns], jnp.uint32) for s in (32, 0))
    p = jnp.abs(positions).astype(jnp.uint32)[..., None]
    # The upper half of the 64 bits of p * low, from products of 16 bits.
    a, b, c, d = p >> 16, p & 0xFFFF, low >> 16, low & 0xFFFF
    first = a * d + (b * d >> 16)
    second = b * c + (first & 0xFFFF)
    phase = p * high + a * c + (first >> 16) + (second >> 16)
    signed = lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32)
    return jnp.sign(positions)[..., None] * signed * np.float32(2 * math.pi / 2**32)


def _told_apart(positions: Array, compute: Any) -> Array:
    """Positions as floats; NaN for integers that float32 cannot tell from their neighbours."""
    x = positions.astype(compute)
    if jnp.issubdtype(positions.dtype, jnp.floating) or compute == jnp.float64:
        return x
    return jnp.where(_nearer(positions, 2**24), x, jnp.nan)


def state_at(angles: Array) -> Array:
    """The rotary state ``[..., D]`` of angles ``[..., D/2]``."""
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


@jax.custom_jvp
def content_state(angles: Array) -> Array:
    """:func:`state_at` of angles that every layer computes, and that have gradients.

    It is computed once: otherwise XLA repeats sines and cosines in each program that rotates by
    them, five per layer on a CPU.
    """
    return lax.optimization_barrier(state_at(angles))


@content_state.defjvp
def _content_state_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    state, (change,) = content_state(*primals), tangents
    return state, jax.checkpoint(_turned, prevent_cse=False)(state, change)


def _turned(state: Array, change: Array) -> Array:
    cos, sin = jnp.split(state, 2, axis=-1)
    return jnp.concatenate([-sin * change, cos * change], axis=-1)


def magnitudes(
    head_dim: int, scaling: RopeScaling | None, axes: int, partial_rotary_factor: float
) -> float | np.ndarray:
    """Factors on the states: one, or one for each frequency ``[D/2]``, 1 where nothing rotates."""
    scaling = scaling or RopeScaling()
    if partial_rotary_factor == 1:
        return scaling.state_magnitude
    turns = _turns(head_dim, axes, partial_rotary_factor)
    return np.where(turns, scaling.state_magnitude, 1.0)


def _turns(head_dim: int, axes: int, partial_rotary_factor: float) -> np.ndarray:
    """Returns which frequencies of a head rotate, ``[D/2]`` bool."""
    planes = _planes(head_dim, axes, partial_rotary_factor)
    return np.concatenate([np.arange(count) < turning for count, turning in planes])


def _planes(head_dim: int, axes: int, partial_rotary_factor: float) -> list[tuple[int, int]]:
    """Returns the number of frequencies of each coordinate, and how many of them are not zero."""
    counts = [len(part) for part in np.array_split(np.arange(head_dim // 2), axes)]
    return [(count, _turning(2 * count, partial_rotary_factor) // 2) for count in counts]


def check_start(
    what: str, base: float, scaling: RopeScaling | None, axes: int, partial_rotary_factor: float
) -> None:
    """Raises ValueError for options of a rotary start that are out of range."""
    require(
        real(f"{what}: the rotary base", base) > 1,
        f"{what}: the rotary base must exceed 1; got {base}",
    )
    positive(f"{what}: axes", axes)
    require(
        0 <= real(f"{what}: partial_rotary_factor", partial_rotary_factor) <= 1,
        f"{what}: partial_rotary_factor is a share from 0 to 1; got {partial_rotary_factor}",
    )
    instance(f"{what}: scaling", scaling, RopeScaling, optional=True)


@typed
def rotary_state(
    positions: Array,
    head_dim: int,
    base: float = 10_000.0,
    *,
    scaling: RopeScaling | None = None,
    axes: int = 1,
    length: int | Array | None = None,
    partial_rotary_factor: float = 1.0,
    log_stretch: Array | None = None,
    dtype: Any = None,
) -> Array:
    """Returns the rotary start state, RoPE's table (TAPE, section 3.2; RoFormer, equation 15).

    Args:
      positions: ``[..., T]`` integers or floats; with ``axes=n > 1`` coordinates ``[..., T, n]``.
      head_dim: ``D``, even.
      base: the rotary base.
      scaling: a :class:`tape_jax.RopeScaling`, or None.
      axes: coordinates per token.
      length: sequence length in tokens, for dynamic scaling and longrope, an integer or integers
        that broadcast to ``[...]``; None: ``T``.
      partial_rotary_factor: share of the dimensions of a head that rotate.
      log_stretch: a scalar array ``s``, which may be learned: the base is multiplied by ``exp(s)``,
        after scaling; None: as 0.
      dtype: type of the result, a floating one; None: jax's default float. Angles are computed in
        at least float32, those of integers up to 2^31 exactly; with ``log_stretch``, or a
        ``length`` that is not known yet, integers from 2^24 on give NaN.

    Returns:
      ``[..., T, D]``: ``[cos half | sin half]``.

    Raises:
      ValueError: if the head dimension is odd, the shapes do not fit, or an option is out of range.
    """
    check_start("rotary_state", base, scaling, axes, partial_rotary_factor)
    type_name("rotary_state: dtype", dtype, (None, *FLOATS))
    theta = angles(
        positions,
        head_dim,
        base,
        scaling=scaling,
        axes=axes,
        length=length,
        partial_rotary_factor=partial_rotary_factor,
        log_stretch=log_stretch,
        dtype=dtype,
    )
    scale = magnitudes(head_dim, scaling, axes, partial_rotary_factor)
    if isinstance(scale, np.ndarray):
        scale = np.tile(scale, 2).astype(theta.dtype)
    e = state_at(theta) * scale
    return e.astype(algebra.float_type(dtype))


@dataclasses.dataclass(frozen=True)
class Rope(Encoding):
    """Rotary position embedding (Su et al. 2021).

    Attributes:
      base: the rotary base.
      scaling: adaptation of the frequencies to longer sequences.
      axes: coordinates per token.
      partial_rotary_factor: share of the dimensions of a head that rotate (Black et al. 2022); the
        others carry only content, whatever the distance.
      learn_base: learn one base for the model, starting from ``base``.
      still_heads: number of state heads, the last ones, that do not rotate: they attend without
        positions and without a magnitude of the scaling.

    Raises:
      ValueError: for options out of range; if ``still_heads`` leaves no head to rotate, or a
        coordinate of a head has no frequency.
    """

    kind: ClassVar[str] = "rope"
    acts_on: ClassVar[tuple[str, ...]] = ("state",)
    # The only kind of scaling accepted; None: any.
    scaling_kind: ClassVar[str | None] = None

    base: float = 10_000.0
    scaling: RopeScaling = RopeScaling()
    axes: int = 1
    partial_rotary_factor: float = 1.0
    learn_base: bool = False
    still_heads: int = 0

    def __post_init__(self):
        check_start(self.kind, self.base, self.scaling, self.axes, self.partial_rotary_factor)
        instance(f"{self.kind}: scaling", self.scaling, RopeScaling)
        require(
            self.scaling_kind in (None, self.scaling.kind),
            f"{self.kind}: scaling.kind must be {self.scaling_kind!r}; got {self.scaling.kind!r}",
        )
        still_heads = not_negative(f"{self.kind}: still_heads", self.still_heads)
        set_field(self, "still_heads", still_heads)

    def check(self, sizes: Sizes) -> None:
        start = self.start_options(None)
        planes = _planes(sizes.head_dim, start["axes"], start["partial_rotary_factor"])
        turning = [count for _, count in planes]
        require(
            all(turning) and sum(turning) >= self.axes,
            f"{self.kind}: each of the coordinates, axes = {self.axes}, needs a frequency; "
            f"partial_rotary_factor = {self.partial_rotary_factor} of {sizes.head_dim} dimensions "
            f"leaves {', '.join(map(str, turning))}",
        )
        if self.scaling.kind == "longrope":
            trained = self.scaling.original_length
            for count in turning:
                for length in (trained, trained + 1):
                    self.scaling.divisors(count, length)
        require(
            self.still_heads < sizes.num_kv_heads,
            f"{self.kind}: still_heads = {self.still_heads} leaves none of the model's "
            f"{sizes.num_kv_heads} state heads to rotate; the encoding 'none' is that",
        )

    @property
    def coordinate_axes(self) -> int:
        return self.axes

    @property
    def starts_by_head(self) -> bool:
        return self.still_heads > 0

    @property
    def heads_axis(self) -> int:
        """The axis of a state's heads."""
        return -2

    def shifts(self, sizes: Sizes) -> tuple[float, ...]:
        """Returns the shift of the start of each rotating head, in tokens."""
        return (0,) * (sizes.num_kv_heads - self.still_heads)

    def input_params(self, sizes: Sizes):
        if not self.learn_base:
            return {}
        return {"log_stretch": Param((), jax.nn.initializers.zeros, ())}

    def start(self, positions, sizes, **options):
        if not self.starts_by_head:
            return self.start_at(positions, sizes, **options)
        positions, shifts = as_positions(positions), self.shifts(sizes)
        made = {shift: self.start_at(positions + shift, sizes, **options) for shift in set(shifts)}
        states = [made[shift] for shift in shifts]
        if self.still_heads:
            scaling = dataclasses.replace(self.scaling, magnitude=1.0)
            unscaled = dataclasses.replace(self, scaling=scaling)
            still = unscaled.start_at(jnp.zeros_like(positions), sizes, **options)
            states += [still] * self.still_heads

        def joined(*heads: Array) -> Array:
            return jnp.concatenate([algebra.align_state(x) for x in heads], self.heads_axis)

        return jax.tree.map(joined, *states)

    def start_options(self, params: dict[str, Array] | None) -> dict[str, Any]:
        """The encoding's own options of :func:`rotary_state`."""
        return {
            "base": self.base,
            "scaling": self.scaling,
            "axes": self.axes,
            "partial_rotary_factor": self.partial_rotary_factor,
            "log_stretch": (params or {}).get("log_stretch"),
        }

    def start_at(self, positions, sizes, *, key=None, length=None, dtype=jnp.float32, params=None):
        """Returns the start that all heads share; see :meth:`start`."""
        options = self.start_options(params)
        state = rotary_state(positions, sizes.head_dim, length=length, dtype=dtype, **options)
        return algebra.with_heads(state)

    def rotation(self, state: State):
        return state, state


@dataclasses.dataclass(frozen=True)
class Yarn(Rope):
    """RoPE with YaRN's frequencies and magnitude (Peng et al. 2023); a name for that scaling.

    Raises:
      ValueError: as :class:`Rope` does; for a scaling of another kind.
    """

    kind: ClassVar[str] = "yarn"
    scaling_kind: ClassVar[str | None] = "yarn"

    scaling: RopeScaling = RopeScaling(kind="yarn", factor=2.0)


@dataclasses.dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753; Phi-3): a name for that scaling.

    The length of the whole sequence selects the list of factors: in cached decoding, the capacity
    or ``length`` of :func:`tape_jax.init_cache`. States are scaled by their magnitude at every
    length.

    Raises:
      ValueError: as :class:`Rope` does; for a scaling of another kind.
    """

    kind: ClassVar[str] = "longrope"
    scaling_kind: ClassVar[str | None] = "longrope"

    scaling: RopeScaling = RopeScaling(kind="longrope", factor=2.0)


@dataclasses.dataclass(frozen=True)
class PRope(Rope):
    """RoPE whose slowest frequencies are zero (p-RoPE, Barbero et al. 2024; Gemma 4).

    The share ``partial_rotary_factor`` of the dimensions rotates by the frequencies of the whole
    head; those left out are its slowest.

    Raises:
      ValueError: as :class:`Rope` does; for a scaling of another kind.
    """

    kind: ClassVar[str] = "p_rope"
    scaling_kind: ClassVar[str | None] = "proportional"

    scaling: RopeScaling = RopeScaling(kind="proportional")
    partial_rotary_factor: float = 0.25


@dataclasses.dataclass(frozen=True)
class MRope(Rope):
    """Multimodal RoPE (Qwen2-VL, Wang et al. 2024, arXiv:2409.12191): coordinates share one head.

    A token has several coordinates, ``[..., T, 3]`` for time, height and width, and each frequency
    of the whole head turns by one of them. Positions that are not given are those of text: the
    index of the token on every axis, continuing after the largest coordinate of the token before.
    (With ``axes`` of :class:`Rope` each coordinate has a whole range of frequencies.)

    Attributes:
      axes: coordinates per token.
      sections: number of rotating frequencies for each coordinate; ``()``: as evenly as possible.
      interleaved: deal out frequencies in turn, as in Qwen3-VL: coordinate ``n > 0`` gets the first
        ``sections[n]`` of those with index ``n`` modulo ``axes``, the first coordinate gets all
        others; False: the first one gets the first ``sections[0]``, and so on.

    Raises:
      ValueError: as :class:`Rope` does; for sections that do not fit the axes or the head.
    """

    kind: ClassVar[str] = "mrope"
    counts_text: ClassVar[bool] = True

    axes: int = 3
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def __post_init__(self):
        super().__post_init__()
        require(self.axes > 1, f"mrope: axes must exceed 1; got {self.axes}")
        require(
            isinstance(self.sections, tuple) and len(self.sections) in (0, self.axes),
            f"mrope: sections must be a tuple of one number for each of the {self.axes} axes; got "
            f"{self.sections!r}",
        )
        sections = tuple(positive("mrope: sections", n) for n in self.sections)
        set_field(self, "sections", sections)

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        turning = _turning(sizes.head_dim, self.partial_rotary_factor) // 2
        require(
            not self.sections or sum(self.sections) == turning,
            f"mrope: sections = {self.sections} must add up to the {turning} frequencies of a head "
            "that rotate",
        )
        dealt = np.bincount(self.axis_of_frequencies(sizes.head_dim)[:turning], minlength=self.axes)
        require(
            not self.sections or tuple(dealt.tolist()) == self.sections,
            f"mrope: interleaved, frequencies cannot be dealt out as sections = {self.sections}: "
            f"{tuple(dealt.tolist())} would be",
        )

    def axis_of_frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the coordinate that turns each frequency, ``[D/2]``."""
        turning = _turning(head_dim, self.partial_rotary_factor) // 2
        shares = [len(part) for part in np.array_split(np.arange(turning), self.axes)]
        sections = np.asarray(self.sections or shares)
        if self.interleaved:
            index = np.arange(turning)
            axis = index % self.axes
            found = np.where(index < self.axes * sections[axis], axis, 0)
        else:
            found = np.repeat(np.arange(self.axes), sections)
        return np.pad(found, (0, head_dim // 2 - turning))

    def start_options(self, params: dict[str, Array] | None) -> dict[str, Any]:
        return super().start_options(params) | {"axes": 1}

    def start_at(self, positions, sizes, **options):
        require(
            jnp.ndim(positions) > 1 and jnp.shape(positions)[-1] == self.axes,
            f"mrope: axes = {self.axes} expects positions of shape [..., T, {self.axes}]; got "
            f"{jnp.shape(positions)}",
        )
        start = super().start_at
        states = [start(positions[..., n], sizes, **options) for n in range(self.axes)]
        return jnp.choose(np.tile(self.axis_of_frequencies(sizes.head_dim), 2), states, mode="clip")


@dataclasses.dataclass(frozen=True)
class Xpos(Rope):
    """xPos (Sun et al. 2022): rotary states whose magnitudes decay with distance.

    Queries are scaled by ``s_j^((t - c) / scale_base)`` and keys by its inverse, with
    ``s_j = (2j + 0.4 D) / (1.4 D)``, where ``D`` dimensions rotate; the others keep their scale.
    Only differences of positions matter: ``c`` is the middle of the sequence, or of the cache, so
    that the scales stay near 1. The compute type limits them: with the default ``scale_base``, to
    sequences of 22,000 tokens in float16, of 258,000 in bfloat16 and float32. Positions farther
    from ``c`` than half of that are refused or, if traced (not known yet), give NaN.

    Attributes:
      scale_base: distance in tokens over which pair ``j`` decays by ``s_j``.

    Raises:
      ValueError: as :class:`Rope` does; for positions too far from ``c``, if they are known.
    """

    kind: ClassVar[str] = "xpos"

    scale_base: float = 2048.0

    def __post_init__(self):
        super().__post_init__()
        require(self.scale_base > 0, f"xpos: scale_base must be positive; got {self.scale_base}")

    def start_at(self, positions, sizes, *, key=None, length=None, dtype=jnp.float32, params=None):
        e = super().start_at(positions, sizes, key=key, length=length, dtype=dtype, params=params)
        turns = _turns(sizes.head_dim, self.axes, self.partial_rotary_factor)
        rotating = 2 * int(turns.sum())
        rates = np.zeros(turns.shape)
        rates[turns] = np.log((np.arange(0, rotating, 2) + 0.4 * rotating) / (1.4 * rotating))
        rates /= self.scale_base
        largest = min(_largest_scale(d) for d in (sizes.dtype, dtype))
        reach = math.log(largest) / float(np.abs(rates).max())
        compute = algebra.at_least_float32(dtype)
        t = as_positions(positions)
        t = (t.mean(-1) if self.axes > 1 else t).astype(compute)
        centre = jnp.minimum(jnp.asarray(t.shape[-1] if length is None else length) / 2, reach)
        t = t - centre.astype(compute)[..., None]
        far = concrete(t)
        if far is not None and far.size and (far := np.abs(far).max()) > reach:
            raise ValueError(
                f"xpos: in {sizes.dtype}, positions may lie up to {reach:.0f} tokens from the "
                f"middle of the length that they are for; got one {far:.0f} tokens from it. Give "
                "length= so that it holds all positions, a wider dtype, or a larger scale_base"
            )
        t = jnp.where(jnp.abs(t) <= reach, t, jnp.nan)
        decay = jnp.exp(t[..., None] * jnp.asarray(rates, compute))
        decay = algebra.with_heads(jnp.concatenate([decay, decay], axis=-1).astype(dtype))
        if decay.ndim > e.ndim:  # A length for each row, and positions that rows share.
            e = algebra.align_state(e)
        return e * decay, e / decay

    def rotation(self, state: State):
        return state


def _largest_scale(dtype: Any) -> float:
    """Largest scale that, with its inverse, leaves the type a factor of 64 above, 4,096 below."""
    numbers = jnp.finfo(dtype)
    # XLA treats subnormal numbers of wider exponents as zero.
    least = numbers.smallest_subnormal if numbers.dtype == jnp.float16 else numbers.tiny
    return min(float(numbers.max) / 64, 1 / (4096 * float(least)))


@dataclasses.dataclass(frozen=True)
class RandomRope(Rope):
    """Randomised positions (Ruoss et al. 2023): RoPE at a sorted random subset of a long range.

    One draw serves every layer, head and batch row of a call, if their lengths agree. A shorter row
    has fewer of the same places, whatever else is in its batch. A row of several segments has one
    length, that of all of them, unless the call is given ``length``. The draw follows the model's
    random stream ``"positions"``; without it a fixed draw is used, so that evaluation is
    repeatable.

    Positions index the draw. Beyond the length of the draw they are refused or, if traced (not
    known yet), make the state NaN.

    Attributes:
      range: positions are drawn from ``0 .. range - 1`` without replacement.
      seed: seed of the fixed draw.
      each_layer: every layer has its own draw, as in the published code.

    Raises:
      ValueError: as :class:`Rope` does; for options that do not go together, or beside
        ``random_positions``.
    """

    kind: ClassVar[str] = "random_rope"
    # It draws positions itself.
    takes_drawn: ClassVar[tuple[str, ...]] = ()

    range: int = 2048
    seed: int = 0
    each_layer: bool = False

    def __post_init__(self):
        super().__post_init__()
        require(self.axes == 1, f"random_rope: one coordinate is drawn per token; got {self.axes}")
        require(self.range > 0, f"random_rope: range must be positive; got {self.range}")
        require(
            not (self.each_layer and self.still_heads),
            f"random_rope: still_heads exists with one draw for all layers only; got each_layer = "
            f"True, still_heads = {self.still_heads}",
        )

    def max_length(self) -> int:
        return self.range

    def start_at(self, positions, sizes, *, key=None, length=None, dtype=jnp.float32, params=None):
        length = jnp.shape(positions)[-1] if length is None else length
        key = jax.random.key(self.seed) if key is None else key
        draw, states = RandomPositions(range=self.range), []
        for k in jax.random.split(key, sizes.num_layers) if self.each_layer else [key]:
            drawn = drawn_positions(draw, positions, length, k, self.kind)
            state = super().start_at(
                drawn, sizes, length=jnp.asarray(length), dtype=dtype, params=params
            )
            states.append(jnp.where(algebra.with_heads((drawn >= 0)[..., None]), state, jnp.nan))
        return (jnp.stack(states), jnp.int32(0)) if self.each_layer else states[0]

    def rotation(self, state: State):
        if self.each_layer:
            tables, layer = state
            state = tables[layer]
        return state, state

    def updates(self, layer: int, num_layers: int) -> bool:
        return self.each_layer

    def update_state(self, params, state, attended, x, *, sharding=None, implementation=None):
        tables, layer = state
        return tables, layer + 1
