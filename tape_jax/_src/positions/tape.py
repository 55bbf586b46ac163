"""TAPE: position states that evolve with the content (Zhu et al., ICML 2025).

Pure functions on arrays, and the encoding that the model uses. One layer computes

    e' = norm((I + alpha A(x)) (e + alpha Mix(a))),   A(x) = W_down diag(act(x W_x)) W_up,

where ``a = A e`` is the state averaged by the attention probabilities and ``A(x)`` is one
heads x heads matrix per token. Both factors act on the heads axis alone, never on what the
symmetry group acts on, so the update commutes with :func:`tape_jax.transform`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.algebra import check_state, float_type
from tape_jax._src.checks import choose, positive, require, require_x64, set_field
from tape_jax._src.config import ModelConfig, RopeScaling
from tape_jax._src.positions.mixing import ACTIVATIONS
from tape_jax._src.positions.norms import NORMS
from tape_jax._src.positions.protocol import Param, State
from tape_jax._src.positions.rotary import Rope, angles
from tape_jax._src.positions.update import UPDATE_PARAMS, UPDATES, update_state

Array = jax.Array

ATTENTION_MIXES = ("none", "head_scale", "heads")
FORMS = ("rotary", "tensor")


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
      start: a start of one's own, broadcastable to the result; needed where none exists, for odd
        ``l`` or ``r < l``.

    Returns:
      ``[..., T, 1, M, L, R]``.

    Raises:
      ValueError: if ``l`` does not divide ``head_dim``, or no start exists and none is given.
    """
    if l < 1 or r < 1 or head_dim % l:
        raise ValueError(f"l must divide the head dimension: got l={l}, r={r}, head_dim={head_dim}")
    blocks = head_dim // l
    dtype = float_type(dtype)
    require_x64(dtype=dtype)
    if start is not None:
        time = jnp.shape(positions) if axes == 1 else jnp.shape(positions)[:-1]
        shape = (*time, 1, blocks, l, r)
        start = jnp.asarray(start)
        try:
            return jnp.broadcast_to(start, shape).astype(dtype)
        except ValueError:
            raise ValueError(
                f"start of shape {start.shape} does not broadcast to {shape}, [..., T, 1, M, L, R]"
            ) from None
    if l % 2 or r < l:
        raise ValueError(
            f"a start state exists for even l and r >= l; got l={l}, r={r}: give start= "
            f"(broadcastable to [..., T, 1, {blocks}, {l}, {r}])"
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
    magnitude = (scaling or RopeScaling()).state_magnitude
    c, s = jnp.cos(theta) * magnitude, jnp.sin(theta) * magnitude
    rotation = jnp.stack([jnp.stack([c, s], -1), jnp.stack([-s, c], -1)], -2)
    rotation = rotation.reshape(*theta.shape[:-1], blocks, l // 2, 2, 2)
    # Not by an einsum, whose operands some machines round.
    diagonal = np.eye(l // 2, dtype=theta.dtype)[:, None, :, None]
    state = rotation[..., None, :] * diagonal
    state = state.reshape(*theta.shape[:-1], 1, blocks, l, l)
    padding = [(0, 0)] * (state.ndim - 1) + [(0, r - l)]
    return jnp.pad(state, padding).astype(dtype)


def update_params(
    hidden_size: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    width: int | None = None,
    attention_mix: str = "head_scale",
    mlp_mix: bool = True,
) -> dict[str, Param]:
    """Shapes and initialisers of one layer's update; see :func:`init_update`."""
    choose("attention_mix", attention_mix, ATTENTION_MIXES)
    positive("hidden_size", hidden_size)
    heads = num_kv_heads or num_heads
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
    if mlp_mix:
        params["wx"] = Param((hidden_size, width), fan_in, ("embed", None))
        params["up"] = Param((width, heads), zeros, (None, "kv_heads"))
        params["down"] = Param(
            (heads, width), jax.nn.initializers.normal(width**-0.5), (None, None)
        )
    return params


def init_update(
    key: Array,
    hidden_size: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    width: int | None = None,
    attention_mix: str = "head_scale",
    mlp_mix: bool = True,
    dtype: Any = None,
) -> dict[str, Array]:
    """Parameters of :func:`update_state` for one layer.

    ``mix`` and ``up`` are zero, so that an untrained update changes nothing: TAPE starts as RoPE.

    Args:
      key: random key.
      hidden_size: width of ``x``.
      num_heads: query heads ``H_q``.
      num_kv_heads: state heads ``H_kv``; None: ``num_heads``.
      width: ``P``; None: ``4 * H_kv``.
      attention_mix: ``none``; ``head_scale``, one scalar per query head (the published code);
        ``heads``, a matrix over heads (the paper).
      mlp_mix: whether the MLP's output mixes the states.
      dtype: type of the parameters; None: jax's default float, float64 where 64-bit types are
        enabled.

    Returns:
      ``mix [H_q]`` or ``[H_kv, H_q]``, ``wx [hidden, P]``, ``up [P, H_kv]``, ``down [H_kv, P]``;
      those that the options leave out are absent.
    """
    dtype = float_type(dtype)
    require_x64(dtype=dtype)
    specs = update_params(
        hidden_size,
        num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        attention_mix=attention_mix,
        mlp_mix=mlp_mix,
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
      form: ``rotary`` (one complex number per pair, the fast path) or ``tensor``.
      l, r: rows and columns of a block in tensor form.
      attention_mix: ``none``, ``head_scale`` (the published code) or ``heads`` (the paper).
      mlp_mix: whether the MLP's output mixes the states.
      width: ``P``; None: four times the state heads.
      activation: of the gate.
      alpha: step size, or its start if ``learn_alpha``.
      learn_alpha: one learned step size per layer.
      alpha_per_head: one for each state head of a layer instead, if ``learn_alpha``.
      norm: ``none``, ``rms`` or ``unit``.
      layers: ``all`` or ``(start, stop)``: the layers that update the state, ``stop`` exclusive.
        The last layer of a model never does, for nobody would read the result.
    """

    kind: ClassVar[str] = "tape"

    form: str = "rotary"
    l: int = 2
    r: int = 2
    attention_mix: str = "head_scale"
    mlp_mix: bool = True
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
        return self.attention_mix != "none"

    def check(self, config: ModelConfig) -> None:
        if self.form == "tensor" and config.dim % self.l:
            raise ValueError(
                f"{self.kind}: l = {self.l} does not divide the head dimension {config.dim}"
            )
        if self.layers != "all" and int(self.layers[1]) > config.num_layers:
            raise ValueError(
                f"{self.kind}: layers = {self.layers} goes past the model's {config.num_layers} "
                "layers"
            )

    def updates(self, layer: int, num_layers: int) -> bool:
        if layer == num_layers - 1 or not (self.mlp_mix or self.attends_state):
            return False
        return self.layers == "all" or self.layers[0] <= layer < self.layers[1]  # type: ignore[operator]

    def start(self, positions, config, *, key=None, length=None, dtype=jnp.float32, params=None):
        if self.form == "rotary":
            return super().start(
                positions, config, key=key, length=length, dtype=dtype, params=params
            )
        return tensor_state(
            positions,
            config.dim,
            self.l,
            self.r,
            base=self.base,
            scaling=self.scaling,
            axes=self.axes,
            length=length,
            partial_rotary_factor=self.partial_rotary_factor,
            log_stretch=(params or {}).get("log_stretch"),
            dtype=dtype,
        )

    def carry(self, state: State, shape: tuple[int, ...], config: ModelConfig) -> State:
        like = jax.ShapeDtypeStruct((*shape, config.kv_heads, config.dim), state.dtype)
        heads = (1, config.kv_heads)
        check_state(state, like, name="the initial state", of="keys", heads=heads)
        tail = 1 if self.form == "rotary" else 3
        if state.ndim < len(shape) + 1 + tail and tail == 1:
            state = jnp.expand_dims(state, -2)
        return jnp.broadcast_to(state, (*like.shape[:-1], *state.shape[state.ndim - tail :]))

    def layer_params(self, config: ModelConfig, *, updates: bool) -> dict[str, Param]:
        if not updates:
            return {}
        params = self.mixing_params(config)
        if self.learn_alpha:
            shape, axes = ((config.kv_heads,), (None,)) if self.alpha_per_head else ((), ())
            params["alpha"] = Param(shape, jax.nn.initializers.constant(self.alpha), axes)
        return params

    def mixing_params(self, config: ModelConfig) -> dict[str, Param]:
        """The parameters of the two mixings."""
        return update_params(
            config.hidden_size,
            config.num_heads,
            num_kv_heads=config.kv_heads,
            width=self.width,
            attention_mix=self.attention_mix,
            mlp_mix=self.mlp_mix,
        )

    @property
    def update_implementations(self) -> tuple[str, ...]:
        return tuple(UPDATES) if type(self).update_state is Tape.update_state else ()

    def update_state(
        self, params, state: State, attended, x, *, sharding=None, implementation=None
    ) -> State:
        return update_state(
            {name: params[name] for name in UPDATE_PARAMS if name in params},
            state,
            attended,
            x,
            params.get("alpha", self.alpha),
            norm=self.norm,
            magnitude=self.scaling.state_magnitude,
            activation=self.activation,
            num_kv_heads=state.shape[-2 if self.form == "rotary" else -4],
            sharding=sharding,
            implementation=implementation,
        )
