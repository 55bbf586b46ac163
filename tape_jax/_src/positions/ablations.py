"""TAPE with one of its symmetries broken, each named for what it does instead.

All are RoPE-like at the start, trainable, and wrong on purpose. The first three are the reference's
ablations. :class:`MixHeadDim` and :class:`NoEquivariance` treat the cosine and sine tables as
separate vectors of ``D`` numbers, which no longer stay tied, and therefore use the tensor form with
blocks ``E_m = [[c_j, s_j'], [-s_j, c_j']]``, ``j' = j + D/2``.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import at_least_float32, precise_einsum
from tape_jax._src.core.checks import number, require, set_field
from tape_jax._src.core.segments import places
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.additive import sinusoids
from tape_jax._src.positions.protocol import Param, State
from tape_jax._src.positions.tape.encoding import Tape
from tape_jax._src.positions.tape.mixing import (
    ACTIVATIONS,
    by_rows,
    mix_attended,
    mix_heads,
    mixing_matrix,
    scaled_mix,
)

Array = jax.Array
zeros = jax.nn.initializers.zeros


def split_tables(state: Array) -> tuple[Array, Array]:
    """Tensor state ``[..., M, 2, 2]`` to its cosine and sine tables, each ``[..., D]``."""
    cos = jnp.concatenate([state[..., 0, 0], state[..., 1, 1]], axis=-1)
    sin = jnp.concatenate([-state[..., 1, 0], state[..., 0, 1]], axis=-1)
    return cos, sin


def join_tables(cos: Array, sin: Array) -> Array:
    """Inverse of :func:`split_tables`."""
    half = cos.shape[-1] // 2
    rows = [
        jnp.stack([cos[..., :half], sin[..., half:]], -1),
        jnp.stack([-sin[..., :half], cos[..., half:]], -1),
    ]
    return jnp.stack(rows, axis=-2)


@dataclasses.dataclass(frozen=True)
class SeparateCosSin(Tape):
    """Separate weights for cosines and sines: breaks the phase symmetry and the constant shift.

    Raises:
      ValueError: as :class:`Tape` does; in tensor form.
    """

    kind: ClassVar[str] = "tape_separate_cos_sin"

    def __post_init__(self):
        super().__post_init__()
        require(self.form == "rotary", f"{self.kind} exists in rotary form only; got {self.form!r}")

    def mixing_params(self, sizes: Sizes) -> dict[str, Param]:
        def twice(name: str, spec: Param) -> Param:
            if name == "wx":
                return spec

            def init(key, shape, dtype):
                keys = jax.random.split(key, 2)
                return jnp.stack([spec.init(k, shape[1:], dtype) for k in keys])

            return Param((2, *spec.shape), init, (None, *spec.axes))

        shared = super().mixing_params(sizes)
        return {name: twice(name, spec) for name, spec in shared.items()}

    def update_state(
        self, params, state: State, attended, x, *, sharding=None, implementation=None
    ) -> State:
        alpha = params.get("alpha", self.alpha)
        parts = []
        for i, part in enumerate(jnp.split(state, 2, axis=-1)):
            own = {k: v[i] for k, v in params.items() if k in ("mix", "up", "down")}
            if "mix" in own:
                a = jnp.split(attended, 2, axis=-1)[i].astype(state.dtype)
                part = part + mix_attended(a, scaled_mix(own["mix"], alpha), part.shape[-2])
            if "up" in own:
                own["wx"] = params["wx"]
                matrix = mixing_matrix(x, own, alpha, self.activation, dtype=state.dtype)
                part = part + mix_heads(matrix, part)
            parts.append(part)
        e = jnp.concatenate(parts, axis=-1)
        return self.normalized(e).astype(state.dtype)


@dataclasses.dataclass(frozen=True)
class _Untied(Tape):
    """The base of the ablations whose cosines and sines come untied."""

    form: str = "tensor"

    def __post_init__(self):
        super().__post_init__()
        require(
            self.form == "tensor" and (self.l, self.r) == (2, 2),
            f"{self.kind} exists in tensor form with l = r = 2 only; got form={self.form!r}, "
            f"l={self.l}, r={self.r}",
        )

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        require(
            sizes.num_kv_heads == sizes.num_heads,
            f"{self.kind} has one state per query head; got num_heads = {sizes.num_heads}, "
            f"num_kv_heads = {sizes.num_kv_heads}",
        )

    def features(self, sizes: Sizes) -> int:
        """Numbers that the MLP mixing mixes."""
        raise NotImplementedError

    def mixing_params(self, sizes: Sizes) -> dict[str, Param]:
        shared = super().mixing_params(sizes)
        if not self.mlp_mix:
            return shared
        width, n = shared["wx"].shape[-1], self.features(sizes)
        normal = jax.nn.initializers.normal(width**-0.5)
        return shared | {
            "up": Param((width, n), zeros, (None, None)),
            "down": Param((n, width), normal, (None, None)),
        }

    def flatten(self, table: Array) -> Array:
        """Table ``[..., T, H, D]`` to ``[..., T, *, features]``."""
        raise NotImplementedError

    def mix_table(self, params, table: Array, attended: Array | None, x: Array) -> Array:
        """Updates one table ``[..., T, H, D]``."""
        alpha = by_rows(params.get("alpha", self.alpha))
        if attended is not None and "mix" in params:
            table = table + alpha * self.scale_attended(attended, params["mix"].astype(table.dtype))
        if "up" in params:
            gate = ACTIVATIONS[self.activation](x @ params["wx"].astype(x.dtype)).astype(
                table.dtype
            )
            flat = self.flatten(table)
            up, down = (params[name].astype(table.dtype) for name in ("up", "down"))
            hidden = precise_einsum("...n,pn->...p", flat, up) * gate[..., None, :]
            change = precise_einsum("...p,np->...n", hidden, down)
            table = table + alpha * change.reshape(table.shape)
        return table

    def scale_attended(self, attended: Array, mix: Array) -> Array:
        return mix_attended(attended, mix, attended.shape[-2])

    def update_state(
        self, params, state: State, attended, x, *, sharding=None, implementation=None
    ) -> State:
        tables = split_tables(state)
        attended_tables = (None, None) if attended is None else split_tables(attended)
        updated = [
            self.mix_table(params, table, a if a is None else a.astype(state.dtype), x)
            for table, a in zip(tables, attended_tables, strict=True)
        ]
        return self.normalized(join_tables(*updated)).astype(state.dtype)


@dataclasses.dataclass(frozen=True)
class MixHeadDim(_Untied):
    """Mixes along the head dimension instead of over heads: breaks the phase symmetry.

    Raises:
      ValueError: as :class:`Tape` does; in another form than tensor with ``l = r = 2``; for grouped
        heads; for a mix of the attended states over heads, ``attention_mix="heads"``.
    """

    kind: ClassVar[str] = "tape_mix_head_dim"

    attention_mix: str = "head_scale"

    def features(self, sizes: Sizes) -> int:
        return sizes.head_dim

    def flatten(self, table: Array) -> Array:
        return table

    def mixing_params(self, sizes: Sizes) -> dict[str, Param]:
        params = super().mixing_params(sizes)
        if "mix" in params:
            require(
                self.attention_mix == "head_scale",
                f"{self.kind} has a scale per dimension; got attention_mix={self.attention_mix!r}",
            )
            params["mix"] = Param((sizes.head_dim,), zeros, (None,))
        return params

    def scale_attended(self, attended: Array, mix: Array) -> Array:
        return attended * mix


@dataclasses.dataclass(frozen=True)
class NoEquivariance(_Untied):
    """Mixes all heads and dimensions with one matrix: no orthogonal equivariance is left.

    Raises:
      ValueError: as :class:`Tape` does; in another form than tensor with ``l = r = 2``; for grouped
        heads.
    """

    kind: ClassVar[str] = "tape_no_equivariance"

    def features(self, sizes: Sizes) -> int:
        return sizes.num_heads * sizes.head_dim

    def flatten(self, table: Array) -> Array:
        return table.reshape(*table.shape[:-2], 1, -1)


@dataclasses.dataclass(frozen=True)
class PlaceWeights(Tape):
    """Weights that depend on a token's place in its segment: breaks permutation equivariance.

    A layer's change to the state of head ``h`` of the ``i``-th token is multiplied by ``1 +
    s_h(i)``, where ``s_h`` is a learned sum of sines and cosines of ``i``, zero at initialisation.
    Places are counted, independently of positions, so shifts and phases of states change nothing.

    Attributes:
      waves: number of frequencies of ``s_h``.

    Raises:
      ValueError: as :class:`Tape` does; for ``waves`` that are not positive.
    """

    kind: ClassVar[str] = "tape_place_weights"
    # Its places travel as the coordinates that another encoding would embed.
    acts_on: ClassVar[tuple[str, ...]] = ("state", "embedding")

    waves: int = 8

    def __post_init__(self):
        super().__post_init__()
        require(self.waves > 0, f"{self.kind}: waves must be positive; got {self.waves}")

    def mixing_params(self, sizes: Sizes) -> dict[str, Param]:
        places = Param((2 * self.waves, sizes.num_kv_heads), zeros, (None, "kv_heads"))
        return super().mixing_params(sizes) | {"places": places}

    def coordinates(self, tokens, positions, segment_ids=None) -> Array:
        if segment_ids is None:
            return jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        return jnp.broadcast_to(places(segment_ids), tokens.shape)

    def locate(self, state: State, coordinates: Array) -> State:
        return state, coordinates

    def carry(self, state: State, shape: tuple[int, ...], sizes: Sizes) -> State:
        if not isinstance(state, tuple):
            return super().carry(state, shape, sizes)
        e, places = state
        if places.ndim <= len(shape):
            places = jnp.broadcast_to(places[..., None], (*shape, sizes.num_kv_heads))
        return super().carry(e, shape, sizes), places

    def rotation(self, state: State) -> tuple[Array | None, Array | None]:
        return super().rotation(state[0] if isinstance(state, tuple) else state)

    def update_state(
        self, params, state: State, attended, x, *, sharding=None, implementation=None
    ) -> State:
        e, places = state
        wide = at_least_float32(e.dtype)
        bare = dataclasses.replace(self, norm="none")
        moved = Tape.update_state(bare, params, e, attended, x, sharding=sharding)
        waves = sinusoids(places[..., 0], 2 * self.waves, self.base, wide)
        scale = (1 + waves @ params["places"].astype(wide)).astype(e.dtype)
        scale = scale.reshape(*scale.shape, *(1,) * (e.ndim - scale.ndim))
        return self.normalized(e + scale * (moved - e)), places


@dataclasses.dataclass(frozen=True)
class RelaxedEquivariance(Tape):
    """TAPE plus a mirrored state, held back by a penalty: breaks the phase symmetry by degrees.

    After TAPE's own update, ``e <- e + b conj(e)`` with one learned complex number ``b`` per head
    and frequency. Every real-linear map of a complex number is ``a e + b conj(e)``, and commutes
    with phases if ``b`` is zero, as at initialisation. The penalty determines how far it may grow
    (:meth:`loss`).

    Attributes:
      penalty: weight of ``sum |b|^2`` in the loss at the first and at the last step of training,
        linear in between. By default the symmetry is relaxed gradually.

    Raises:
      ValueError: as :class:`Tape` does; in tensor form; for a penalty that is not two numbers from
        0 on.
    """

    kind: ClassVar[str] = "tape_relaxed_equivariance"

    penalty: tuple[float, float] = (1.0, 0.0)

    def __post_init__(self):
        super().__post_init__()
        require(self.form == "rotary", f"{self.kind} exists in rotary form only; got {self.form!r}")
        require(
            isinstance(self.penalty, tuple | list) and len(self.penalty) == 2,
            f"{self.kind}: penalty must be two numbers of at least 0; got {self.penalty!r}",
        )
        penalty = tuple(number(f"{self.kind}: penalty", x) for x in self.penalty)
        set_field(self, "penalty", penalty)

    def mixing_params(self, sizes: Sizes) -> dict[str, Param]:
        mirror = Param(
            (2, sizes.num_kv_heads, sizes.head_dim // 2), zeros, (None, "kv_heads", None)
        )
        return super().mixing_params(sizes) | {"mirror": mirror}

    def update_state(
        self, params, state: State, attended, x, *, sharding=None, implementation=None
    ) -> State:
        bare = dataclasses.replace(self, norm="none")
        e = Tape.update_state(bare, params, state, attended, x, sharding=sharding)
        real, imaginary = params["mirror"].astype(e.dtype)
        c, s = jnp.split(e, 2, axis=-1)
        mirrored = [real * c + imaginary * s, imaginary * c - real * s]
        e = e + jnp.concatenate(mirrored, axis=-1)
        return self.normalized(e)

    def loss(self, params, progress: Array | float) -> Array:
        first, last = self.penalty
        weight = first + (last - first) * progress
        mirrors = [jnp.square(layer["mirror"]).sum() for layer in params if "mirror" in layer]
        return weight * sum(mirrors, jnp.zeros(()))
