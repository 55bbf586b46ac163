"""TAPE: position states that evolve with the content (Zhu et al., ICML 2025).

Pure functions on arrays, and the encoding that the model uses. One layer computes

    e' = norm((I + alpha G(x)) (e + alpha Mix(a))),   G(x) = W_down diag(act(x W_x)) W_up,

where ``a = A e`` is the state averaged by the attention probabilities and ``G(x)`` is one
heads x heads matrix per token. Both factors act only on the heads axis, never on what the symmetry
group acts on, so the update commutes with :func:`tape_jax.transform`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.algebra import align_state, check_state, float_type
from tape_jax._src.core.checks import (
    FLOATS,
    as_array,
    choose,
    positive,
    require,
    require_x64,
    set_field,
    type_name,
    typed,
)
from tape_jax._src.core.padding import pad_to
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.positions.fixed.rope import Rope
from tape_jax._src.positions.fixed.rotary import angles, check_start, magnitudes
from tape_jax._src.positions.protocol import OPTION_TYPES, Param, State
from tape_jax._src.positions.tape.mixing import ACTIVATIONS
from tape_jax._src.positions.tape.norms import NORMS, normalize
from tape_jax._src.positions.tape.update import UPDATE_PARAMS, UPDATES, update_state

Array = jax.Array

ATTENTION_MIXES = ("none", "head_scale", "heads")
DEGREES = (1, 3)
FORMS = ("rotary", "tensor")


@typed
def tensor_state(
    positions: Array,
    head_dim: int,
    l: int = 2,
    r: int = 2,
    *,
    base: float = 10_000.0,
    scaling: RopeScaling | None = None,
    axes: int = 1,
    length: int | Array | None = None,
    partial_rotary_factor: float = 1.0,
    log_stretch: Array | None = None,
    start: Array | None = None,
    dtype: Any = None,
) -> Array:
    """The start state in tensor form (TAPE, section 3.2): rotations on the diagonals of blocks.

    Block ``m`` has ``L/2`` rotations by the frequencies ``m L/2 ..``, followed by ``R - L`` zero
    columns, so that an unchanged state gives exactly the logits of RoPE for every even ``L``.

    Args:
      positions: ``[..., T]`` (``[..., T, n]`` for ``axes=n > 1``).
      head_dim: ``D = M * L``.
      l: rows of a block.
      r: columns of a block.
      base, scaling, axes, length, partial_rotary_factor, log_stretch, dtype: as in
        :func:`tape_jax.rotary_state`.
      start: your own start, broadcastable to the result; required for odd ``l`` or ``r < l``, where
        none exists.

    Returns:
      ``[..., T, 1, M, L, R]``.

    Raises:
      ValueError: if ``l`` does not divide ``head_dim``, no start exists and none is given, or an
        option is out of range.
    """
    check_start("tensor_state", base, scaling, axes, partial_rotary_factor)
    type_name("tensor_state: dtype", dtype, (None, *FLOATS))
    if l < 1 or r < 1 or head_dim % l:
        raise ValueError(f"l must divide the head dimension: got l={l}, r={r}, head_dim={head_dim}")
    blocks = head_dim // l
    dtype = float_type(dtype)
    require_x64(dtype=dtype)
    if start is not None:
        time = jnp.shape(positions) if axes == 1 else jnp.shape(positions)[:-1]
        shape = (*time, 1, blocks, l, r)
        start = as_array("start", start)
        try:
            return jnp.broadcast_to(start, shape).astype(dtype)
        except ValueError:
            raise ValueError(
                f"start of shape {start.shape} does not broadcast to {shape}, [..., T, 1, M, L, R]"
            ) from None
    if l % 2 or r < l:
        raise ValueError(
            f"a start state exists for even l and r >= l; got l={l}, r={r}: give one, start= of "
            f"tensor_state or initial_state= of a model, [..., T, 1, {blocks}, {l}, {r}]"
        )
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
    magnitude = jnp.asarray(magnitudes(head_dim, scaling, axes, partial_rotary_factor), theta.dtype)
    c, s = jnp.cos(theta) * magnitude, jnp.sin(theta) * magnitude
    rotation = jnp.stack([jnp.stack([c, s], -1), jnp.stack([-s, c], -1)], -2)
    rotation = rotation.reshape(*theta.shape[:-1], blocks, l // 2, 2, 2)
    # Not an einsum, whose operands some machines round.
    diagonal = np.eye(l // 2, dtype=theta.dtype)[:, None, :, None]
    state = rotation[..., None, :] * diagonal
    state = state.reshape(*theta.shape[:-1], 1, blocks, l, l)
    return pad_to(state, r, -1).astype(dtype)


def update_params(
    hidden_size: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    width: int | None = None,
    attention_mix: str = "heads",
    mlp_mix: bool = True,
    degree: int = 1,
) -> dict[str, Param]:
    """Shapes and initialisers of one layer's update; see :func:`init_update`."""
    choose("attention_mix", attention_mix, ATTENTION_MIXES)
    choose("degree", degree, DEGREES)
    positive("hidden_size", hidden_size)
    heads = positive("num_kv_heads", num_kv_heads, optional=True) or num_heads
    if num_heads < 1 or num_heads % heads:
        raise ValueError(f"num_heads = {num_heads} is not a multiple of num_kv_heads = {heads}")
    width = 4 * heads if width is None else width
    require(width > 0, f"the update's width must be positive; got {width}")
    zeros = jax.nn.initializers.zeros
    fan_in = jax.nn.initializers.lecun_normal()
    params = {}
    if attention_mix == "head_scale":
        params["mix"] = Param((num_heads,), zeros, ("heads",))
    elif attention_mix == "heads":
        params["mix"] = Param((heads, num_heads), zeros, (None, "heads"))
    if degree == 3:
        normal = jax.nn.initializers.normal(num_heads**-0.5)
        params["origin"] = Param((heads, num_heads), normal, (None, "heads"))
        params["target"] = Param((heads, num_heads), zeros, (None, "heads"))
    if mlp_mix:
        params["wx"] = Param((hidden_size, width), fan_in, ("embed", None))
        params["up"] = Param((width, heads), zeros, (None, "kv_heads"))
        params["down"] = Param(
            (heads, width), jax.nn.initializers.normal(width**-0.5), (None, None)
        )
    return params


@typed
def init_update(
    key: Array,
    hidden_size: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    width: int | None = None,
    attention_mix: str = "heads",
    mlp_mix: bool = True,
    degree: int = 1,
    dtype: Any = None,
) -> dict[str, Array]:
    """Creates the parameters of :func:`update_state` for one layer.

    ``mix``, ``target`` and ``up`` are zero, so an untrained update changes nothing: TAPE starts as
    RoPE.

    Args:
      key: random key.
      hidden_size: width of ``x``.
      num_heads: query heads ``H_q``.
      num_kv_heads: state heads ``H_kv``; None: ``num_heads``.
      width: ``P``; None: ``4 * H_kv``.
      attention_mix: ``heads``, a matrix over heads (the paper); ``head_scale``, one scalar per
        query head (the published code); ``none``.
      mlp_mix: whether the MLP's output mixes the states.
      degree: 1, or 3 for products of three states, with ``origin`` and ``target [H_kv, H_q]``.
      dtype: type of the parameters; None: jax's default float, float64 where 64-bit types are
        enabled.

    Returns:
      ``mix [H_kv, H_q]`` or ``[H_q]``, ``wx [hidden, P]``, ``up [P, H_kv]``, ``down [H_kv, P]``;
      those that the options leave out are absent.

    Raises:
      ValueError: for options out of range; for query heads that are not a multiple of the state
        heads; for a 64-bit type while these are disabled.
    """
    type_name("init_update: dtype", dtype, (None, *FLOATS))
    dtype = float_type(dtype)
    require_x64(dtype=dtype)
    specs = update_params(
        hidden_size,
        num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        attention_mix=attention_mix,
        mlp_mix=mlp_mix,
        degree=degree,
    )
    keys = jax.random.split(key, max(len(specs), 1))
    return {
        name: spec.init(k, spec.shape, dtype)
        for k, (name, spec) in zip(keys, specs.items(), strict=False)
    }


@dataclasses.dataclass(frozen=True)
class Tape(Rope):
    """TAPE as the model's position encoding.

    Attributes:
      base, scaling, axes, partial_rotary_factor, learn_base: of the start state, as in RoPE.
      still_heads: number of state heads, the last ones, that do not rotate. Updates leave them out:
        mixing rotating and still states would break the shift invariance.
      head_shift: number of tokens by which each rotating state head starts later than the one
        before it, or a tuple of shifts ``c_h``, one per rotating head, which starts at ``t + c_h``.
        It keeps RoPE's logits and every symmetry, and lets a mix of heads be the state of another
        place: with one start for all heads, sums over heads only stretch it.
      form: ``rotary`` (one complex number per pair, the fast path) or ``tensor``.
      l, r: rows and columns of a block in tensor form.
      attention_mix: ``heads`` (the paper), ``head_scale`` (the published code) or ``none``.
      mlp_mix: whether the MLP's output mixes the states.
      degree: 1, or 3, which adds ``alpha z conj(w) u`` (in tensor form ``alpha Z W^T U``) to ``z =
        e + alpha Mix(a)``. ``w`` and ``u`` are learned mixes of the attended states of all heads
        (:func:`tape_jax.update_state`). This moves a token from one that it attends to another: to
        "as far from there as I am from here". With 3, ``norm`` must bound the states.
      width: ``P``; None: four times the state heads.
      activation: of the gate.
      alpha: step size, or its start if ``learn_alpha``.
      learn_alpha: one learned step size per layer.
      alpha_per_head: one step size for each state head instead; needs ``learn_alpha``.
      norm: ``none``, ``rms`` or ``unit``.
      layers: ``all`` or ``(start, stop)``: the layers that update the state, ``stop`` exclusive.
        The last layer of a model never does, since nothing would read the result.

    Raises:
      ValueError: for options out of range, that do not go together, or that do not fit the model.
    """

    kind: ClassVar[str] = "tape"

    head_shift: float | tuple[float, ...] = 0.0
    form: str = "rotary"
    l: int = 2
    r: int = 2
    attention_mix: str = "heads"
    mlp_mix: bool = True
    degree: int = 1
    width: int | None = None
    activation: str = "silu"
    alpha: float = 1.0
    learn_alpha: bool = False
    alpha_per_head: bool = False
    norm: str = "none"
    layers: str | tuple[int, int] = "all"

    def __post_init__(self):
        super().__post_init__()
        choose(f"{self.kind} form", self.form, FORMS)
        choose(f"{self.kind} attention_mix", self.attention_mix, ATTENTION_MIXES)
        choose(f"{self.kind} activation", self.activation, ACTIVATIONS)
        choose(f"{self.kind} norm", self.norm, NORMS)
        choose(f"{self.kind} degree", self.degree, DEGREES)
        require(
            self.degree == 1 or self.norm != "none",
            f"{self.kind}: products of states grow without bounds: degree = {self.degree} needs a "
            "norm, 'rms' or 'unit'; got 'none'",
        )
        require(
            self.learn_alpha or not self.alpha_per_head,
            f"{self.kind}: alpha_per_head needs learn_alpha=True; a fixed alpha is one number",
        )
        require(
            self.l >= 1 and self.r >= 1,
            f"{self.kind}: l and r must be positive; got l={self.l}, r={self.r}",
        )
        require(
            self.width is None or self.width > 0,
            f"{self.kind}: width must be positive or None; got {self.width}",
        )
        if isinstance(self.head_shift, list):
            set_field(self, "head_shift", tuple(self.head_shift))
        step, (_, is_finite) = self.head_shift, OPTION_TYPES["float"]
        require(
            all(map(is_finite, step if isinstance(step, tuple) else (step,))),
            f"{self.kind}: head_shift must be a finite number, or a tuple of such; got {step!r}",
        )
        for name, default in (("still_heads", 0), ("degree", 1)):
            value = getattr(self, name)
            require(
                value == default or self._updates_as_tape,
                f"{self.kind}: {name} is an option of TAPE's own update; got {value}",
            )
        if isinstance(self.layers, list):
            set_field(self, "layers", tuple(self.layers))
        if self.layers != "all":
            valid = (
                isinstance(self.layers, tuple)
                and len(self.layers) == 2
                and all(isinstance(n, int) for n in self.layers)
                and 0 <= self.layers[0] <= self.layers[1]
            )
            require(
                valid,
                f"{self.kind}: layers must be 'all' or (start, stop) with 0 <= start <= stop; got "
                f"{self.layers!r}",
            )

    @property
    def attends_state(self) -> bool:
        return self.attention_mix != "none" or self.degree > 1

    @property
    def starts_by_head(self) -> bool:
        return self.still_heads > 0 or bool(np.any(self.head_shift))

    @property
    def heads_axis(self) -> int:
        return -2 if self.form == "rotary" else -4

    def shifts(self, sizes: Sizes) -> tuple[float, ...]:
        step, heads = self.head_shift, range(sizes.num_kv_heads - self.still_heads)
        shifts = step if isinstance(step, tuple) else tuple(step * h for h in heads)
        # Whole shifts keep integer positions integers.
        return tuple(int(c) if c == int(c) else c for c in shifts)

    @property
    def _updates_as_tape(self) -> bool:
        return type(self).update_state is Tape.update_state

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        require(
            self.scaling.state_magnitude == 1 or self.partial_rotary_factor == 1,
            f"{self.kind}: {self.scaling.kind} scales the states of all dimensions here, so "
            f"partial_rotary_factor must be 1; got {self.partial_rotary_factor}",
        )
        heads = sizes.num_kv_heads - self.still_heads
        require(
            not isinstance(self.head_shift, tuple) or len(self.head_shift) == heads,
            f"{self.kind}: head_shift must be a number or one for each of the {heads} state heads "
            f"that rotate; got {self.head_shift}",
        )
        farthest = max(map(abs, self.shifts(sizes)), default=0)
        require(
            farthest < 2**31,
            f"{self.kind}: head_shift must move heads by less than 2^31 tokens; got "
            f"{self.head_shift}, which moves one by {farthest:g}",
        )
        if self.form == "tensor" and sizes.head_dim % self.l:
            raise ValueError(
                f"{self.kind}: l = {self.l} does not divide the head dimension {sizes.head_dim}"
            )
        if self.layers != "all" and int(self.layers[1]) > sizes.num_layers:
            raise ValueError(
                f"{self.kind}: layers = {self.layers} goes past the {sizes.num_layers} layers that "
                "have this encoding; of a schedule only those are counted"
            )

    def updates(self, layer: int, num_layers: int) -> bool:
        if layer == num_layers - 1 or not (self.mlp_mix or self.attends_state):
            return False
        return self.layers == "all" or self.layers[0] <= layer < self.layers[1]  # type: ignore[operator]

    def start_at(self, positions, sizes, *, key=None, length=None, dtype=jnp.float32, params=None):
        if self.form == "rotary":
            return super().start_at(
                positions, sizes, key=key, length=length, dtype=dtype, params=params
            )
        options = self.start_options(params)
        return tensor_state(
            positions, sizes.head_dim, self.l, self.r, length=length, dtype=dtype, **options
        )

    def carry(self, state: State, shape: tuple[int, ...], sizes: Sizes) -> State:
        like = jax.ShapeDtypeStruct((*shape, sizes.num_kv_heads, sizes.head_dim), state.dtype)
        heads = (1, sizes.num_kv_heads)
        tail = check_state(state, like, name="the initial state", of="keys", heads=heads)
        state = align_state(state)
        return jnp.broadcast_to(state, (*like.shape[:-1], *state.shape[state.ndim - tail :]))

    def layer_params(self, sizes: Sizes, *, updates: bool) -> dict[str, Param]:
        if not updates:
            return {}
        params = self.mixing_params(sizes)
        if self.learn_alpha:
            turning = sizes.num_kv_heads - self.still_heads
            shape, axes = ((turning,), (None,)) if self.alpha_per_head else ((), ())
            params["alpha"] = Param(shape, jax.nn.initializers.constant(self.alpha), axes)
        return params

    def mixing_params(self, sizes: Sizes) -> dict[str, Param]:
        """The parameters of the two mixings."""
        group = sizes.num_heads // sizes.num_kv_heads
        heads = sizes.num_kv_heads - self.still_heads
        return update_params(
            sizes.hidden_size,
            group * heads,
            num_kv_heads=heads,
            width=self.width,
            attention_mix=self.attention_mix,
            mlp_mix=self.mlp_mix,
            degree=self.degree,
        )

    def normalized(self, state: Array) -> Array:
        """The state, bounded by the norm."""
        magnitude, tensor = self.scaling.state_magnitude, self.form == "tensor"
        return normalize(state, self.norm, magnitude, tensor=tensor)

    @property
    def update_implementations(self) -> tuple[str, ...]:
        return tuple(UPDATES) if self._updates_as_tape else ()

    def update_state(
        self, params, state: State, attended, x, *, sharding=None, implementation=None
    ) -> State:
        axis, heads = self.heads_axis, state.shape[self.heads_axis]
        turning, still = heads - self.still_heads, None
        if self.still_heads:
            # Devices split all heads, not only those that rotate.
            sharding = None
            state, still = jnp.split(state, [turning], axis)
            if attended is not None:
                queries = turning * attended.shape[axis] // heads
                attended = jnp.split(attended, [queries], axis)[0]
        new = update_state(
            {name: params[name] for name in UPDATE_PARAMS if name in params},
            state,
            attended,
            x,
            params.get("alpha", self.alpha),
            norm=self.norm,
            magnitude=self.scaling.state_magnitude,
            activation=self.activation,
            num_kv_heads=turning,
            sharding=sharding,
            implementation=implementation,
        )
        return new if still is None else jnp.concatenate([new, still], axis)
