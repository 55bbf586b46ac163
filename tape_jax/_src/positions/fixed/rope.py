"""Encodings by rotary states that no layer changes: RoPE and its kinds, xPos, random positions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import concrete, instance, not_negative, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.drawing import RandomPositions, drawn_positions
from tape_jax._src.positions.fixed.frequencies import (
    RopeScaling,
    planes_of_axes,
    rotating_dims,
    which_rotate,
)
from tape_jax._src.positions.fixed.rotary import check_start, rotary_state
from tape_jax._src.positions.protocol import Encoding, Param, State, as_positions

Array = jax.Array

# Fields of :class:`Rope` that say where a rotary state starts.
START_FIELDS = ("base", "scaling", "axes", "partial_rotary_factor", "learn_base", "still_heads")


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
        planes = planes_of_axes(sizes.head_dim, start["axes"], start["partial_rotary_factor"])
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
        sections = tuple(not_negative("mrope: sections", n) for n in self.sections)
        set_field(self, "sections", sections)

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        turning = rotating_dims(sizes.head_dim, self.partial_rotary_factor) // 2
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
        turning = rotating_dims(head_dim, self.partial_rotary_factor) // 2
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
        turns = which_rotate(sizes.head_dim, self.axes, self.partial_rotary_factor)
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
