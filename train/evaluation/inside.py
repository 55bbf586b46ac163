"""The inside of a model: attention, position states, and the model with an untrained encoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import Transformer
from train.evaluation import Trained


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """The attention maps and position states of a model in one batch.

    Attributes:
      labels: [B][T] the tokens as text.
      maps: [layers, B, T, H, T] attention probabilities.
      states: [layers, B, T, H_kv, D] (rotary) or [layers, B, T, H_kv, M, L, R] (tensor): the
        position state entering each layer that reads it; the first is the start; None for encodings
        without a state. Of a schedule with several states, the first that layers update, else the
        first.
      layers: the numbers of these layers, from 1.
    """

    labels: Sequence[Sequence[str]]
    maps: np.ndarray
    states: np.ndarray | None
    layers: Sequence[int]

    @property
    def flat_states(self) -> np.ndarray:
        """The states with blocks flattened: [layers, B, T, H, D]."""
        assert self.states is not None
        return self.states.reshape(*self.states.shape[:4], -1)

    @property
    def relative_norms(self) -> np.ndarray:
        """The norms of the states over those of the start, |e| / |start|: [layers, B, T, H]."""
        norms = np.linalg.norm(self.flat_states, axis=-1)
        return norms / norms[0]

    @property
    def moves(self) -> np.ndarray:
        """How far each layer moves a state, |e_after - e_before| / |start|: [layers - 1, B, T, H].

        The last one that reads it is left out: nothing reads its output state.
        """
        start = np.linalg.norm(self.flat_states[0], axis=-1)
        return np.linalg.norm(np.diff(self.flat_states, axis=0), axis=-1) / start

    @property
    def moved(self) -> np.ndarray:
        """The distance of input states from the start, over the start's norm, by layer: [layers].

        It is the root mean square over tokens and heads.
        """
        away = self.flat_states - self.flat_states[0]
        squares = np.square(away).sum(axis=(1, 2, 3, 4))
        return np.sqrt(squares / np.square(self.flat_states[0]).sum())

    @property
    def phase_drift(self) -> np.ndarray | None:
        """The angle of a state to its start, by frequency: [layers, B, T, H, D/2] in radians.

        None in tensor form: its blocks are not complex numbers.
        """
        if self.states is None or self.states.ndim != 5:
            return None
        half = self.states.shape[-1] // 2
        e = self.states[..., :half] + 1j * self.states[..., half:]
        return np.abs(np.angle(e * e[0].conj()))


def look(
    model: Transformer, variables: Any, tokens: np.ndarray, labels: Sequence[Sequence[str]]
) -> Inside:
    """Runs a model on ``tokens`` [B, T] and keeps what happens inside.

    Args:
      model: with any encoding.
      variables: of the model.
      tokens: integers [B, T].
      labels: [B][T] the tokens as text.
    """
    config = model.config
    batch, length = tokens.shape
    keys = jax.ShapeDtypeStruct((batch, length, config.kv_heads, config.dim), jnp.float32)

    def full(e: jax.Array) -> jax.Array:
        if e.ndim == 2:  # Rotary [T, D], the same for all heads.
            e = e[:, None]
        tail = e.shape[-3:] if e.ndim > keys.ndim else e.shape[-1:]
        return jnp.broadcast_to(e, (*keys.shape[:-1], *tail))

    kinds = model.encoding.of_layers(config.num_layers)

    @jax.jit
    def run(variables: Any, tokens: jax.Array) -> Any:
        options: dict[str, Any] = {"return_states": True, "mutable": ["maps"]}
        (_, recorded), sown = model.apply(variables, tokens, **options)
        entering = {
            layer: one.encoding.rotation(one.own(state))[1]
            for layer, (one, state) in enumerate(zip(kinds, recorded.position, strict=True))
        }
        found = {layer: full(e) for layer, e in entering.items() if e is not None}
        # Only one state: the distance of one from another says nothing.
        moved = [kinds[layer].member for layer in found if kinds[layer].updates]
        members = [*moved, *(kinds[layer].member for layer in found)]
        return sown["maps"], {n: e for n, e in found.items() if kinds[n].member == members[0]}

    sown, states = run(variables, jnp.asarray(tokens))
    shape = (-1, batch, length, config.attention_heads, length)
    maps: list[Any] = [None] * config.num_layers
    for blocks in model.blocks:
        of_layers = np.reshape(jax.tree.leaves(sown[blocks.name])[0], shape)
        for layer, own in zip(blocks.layers, of_layers, strict=True):
            maps[layer] = own
    return Inside(
        labels,
        np.stack(maps).astype(np.float32),
        np.stack([states[n] for n in states]).astype(np.float32) if states else None,
        [n + 1 for n in states],
    )


def has_learned(model: Transformer) -> bool:
    """Returns whether the position encoding of a model has parameters."""
    return any(spec.role == "position" for spec in model.parameters().values())


def before_training(model: Transformer, variables: Any) -> Any:
    """The variables of a model, with the parameters of its encoding as before training.

    TAPE's states then stay at their start.
    """
    fresh = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    own = {path for path, spec in model.parameters().items() if spec.role == "position"}
    trained, fresh = (flatten_dict(x, sep="/") for x in (variables["params"], fresh))
    params = {path: (fresh if path in own else trained)[path] for path in trained}
    return {**variables, "params": unflatten_dict(params, sep="/")}


class Changed(NamedTuple):
    """A model with variables other than the trained ones."""

    model: Transformer
    variables: dict[str, Any]
    apply: Callable[..., Any]
    max_length: int | None


def untrained(trained: Trained) -> Changed | None:
    """Returns the model with its encoding as before training; None if that has no parameters."""
    if not has_learned(trained.model):
        return None
    variables = before_training(trained.model, trained.variables)
    return Changed(trained.model, variables, trained.apply, trained.max_length)
