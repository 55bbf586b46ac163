"""Writes the table of docs/encodings_reference.md: what is true of every encoding, found by trying.

Run ``python -m docs.symmetries [KIND ...]``; all of them take a few minutes.

Symmetries and causality are what :mod:`tape_jax.testing` finds of a small model with random
parameters, in float64; implementations of attention are those that do not refuse its calls; caches
and parameters are counted in a model of the width ``WIDE``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import tape_jax as tape
from tape_jax import positions, testing
from tape_jax._src.core import devices
from tape_jax._src.core.files import write_atomically
from tape_jax._src.positions.protocol import on_axes

PAGE = Path(__file__).parent / "encodings_reference.md"
BEGIN, END = "<!-- symmetries: begin -->", "<!-- symmetries: end -->"

VOCAB, TIME, SHIFT = 13, 6, 1000
SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
WIDE = {"hidden_size": 1024, "num_layers": 2, "num_heads": 16}
# Without them these encodings cannot be built.
DIGITS = tuple(range(3, VOCAB))
OPTIONS: dict[str, dict[str, Any]] = {
    "abacus": {"digits": DIGITS},
    "position_coupling": {"digits": DIGITS, "plus": 1, "equals": 2, "reverse_operands": True},
}
HEADER = (
    "encoding",
    "acts on",
    "shift of positions",
    "order of tokens",
    "turn of all states",
    "causal",
    "fused kernel",
    "else",
    "cache, bytes",
    "parameters",
)


def model_of(kind: str, sizes: dict[str, int], **options: Any) -> tape.Transformer:
    """A model with an encoding of the registry, with its default options."""
    position = positions.create(kind, **OPTIONS.get(kind, {}))
    config = tape.ModelConfig(VOCAB, position=position, **sizes, **options)
    return tape.Transformer(config)


def holds(check: Callable[..., None], *args: Any, **options: Any) -> bool:
    """Returns whether an assertion of :mod:`tape_jax.testing` is met."""
    try:
        check(*args, **options)
    except testing.SymmetryError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Small:
    """A small model with random parameters, and tokens."""

    model: tape.Transformer
    tokens: jax.Array
    variables: Any

    @classmethod
    def of(cls, kind: str) -> Small:
        types = {"dtype": "float64", "param_dtype": "float64"}
        model = model_of(kind, SMALL, attention_implementation="reference", **types)
        tokens = jnp.asarray(np.random.default_rng(0).permutation(VOCAB)[None, :TIME])
        # Updates start at zero, which would test little.
        variables = jax.jit(model.init)(jax.random.key(0), tokens)
        return cls(model, tokens, testing.random_params(None, variables))

    def coordinates(self, places: jax.Array) -> jax.Array:
        """Positions ``[T]`` as the model takes them, the same on each of several axes."""
        return on_axes(places, self.model.encoding.coordinate_axes)

    def shift(self) -> str:
        """Tests whether logits stay under a shift of positions, and under any change of them."""

        def logits(places: jax.Array) -> jax.Array:
            places = self.coordinates(places)
            return self.model.apply(self.variables, self.tokens, positions=places)

        moved = functools.partial(testing.assert_shift_invariant, logits, jnp.arange(TIME))
        if not holds(moved, shift=SHIFT):
            return "no"
        anywhere = np.random.default_rng(1).integers(0, 9, TIME)
        return "not read" if holds(moved, shift=anywhere) else "yes"

    def permutations(self) -> str:
        """Tests a permutation of tokens, together with their positions and the mask."""

        def logits(tokens: jax.Array, places: jax.Array, mask: jax.Array) -> jax.Array:
            options = {"positions": self.coordinates(places), "mask": mask, "is_causal": False}
            return self.model.apply(self.variables, tokens, **options)

        inputs = self.tokens, jnp.arange(TIME), jnp.tri(TIME, dtype=bool)
        try:
            jax.eval_shape(logits, *inputs)
        except ValueError as error:
            if "is_causal=True" not in str(error):
                raise
            return "no"
        axes = {"in_axes": (-1, -1, {-2, -1}), "out_axes": -2}
        return said(holds(testing.assert_permutation_equivariant, logits, *inputs, **axes))

    def turns(self) -> str:
        """Tests turns of all states: a phase per frequency, in tensor form an orthogonal matrix."""
        encoding = self.model.encoding
        if "state" not in encoding.acts_on:
            return ""
        _, record = self.model.apply(self.variables, self.tokens, return_states=True)
        if not jax.tree.leaves(record.position):
            return self._turns_in_layers()
        tensor = getattr(encoding, "form", "rotary") == "tensor"
        check = (
            testing.assert_orthogonal_equivariant if tensor else testing.assert_phase_equivariant
        )
        states = [jax.tree.map(_is_float, state) for state in record.position]
        start, is_state = record.position[0], states[0]
        if not all(jax.tree.leaves(is_state)):
            # The model itself puts the places of tokens beside the state.
            start, is_state = start[0], True

        def run(state: Any) -> Any:
            options = {"initial_state": state, "return_states": True}
            logits, record = self.model.apply(self.variables, self.tokens, **options)
            return logits, record.position

        return said(
            holds(check, run, start, in_states=(is_state,), out_states=(False, tuple(states)))
        )

    def _turns_in_layers(self) -> str:
        """Tests the turn for an encoding whose layers make its states: they are turned there."""
        config, encoding = self.model.config, self.model.encoding
        made = []

        def logits(turn: jax.Array) -> jax.Array:
            class Turned(type(encoding)):  # type: ignore[misc]
                def layer_terms(self, params: Any, layer: Any) -> positions.Terms:
                    terms = super().layer_terms(params, layer)
                    if terms.state is None:
                        return terms
                    made.append(self)
                    return terms._replace(state=tape.rotate(terms.state, turn))

            turned = Turned(**vars(encoding))
            model = tape.Transformer(dataclasses.replace(config, position=turned))
            return model.apply(self.variables, self.tokens)

        none = tape.rotary_state(jnp.zeros(TIME), config.dim, dtype="float64")
        options = {"in_states": True, "out_states": False}
        equivariant = holds(testing.assert_phase_equivariant, logits, none, **options)
        return said(equivariant) if made else ""

    def causal(self) -> str:
        """Tests causality in the tokens by value, and in their embeddings by value and gradient."""

        def logits(tokens: jax.Array, embedded: jax.Array) -> jax.Array:
            table = self.variables["params"]["embedding"].at[self.tokens].set(embedded)
            params = self.variables["params"] | {"embedding": table}
            return self.model.apply({"params": params}, tokens)

        shape = (1, TIME, self.model.config.hidden_size)
        embedded = testing.random_state(None, shape, dtype="float64")
        axes = {"in_axes": (1, 1), "out_axes": 1}
        return said(holds(testing.assert_causal, logits, self.tokens, embedded, **axes))


def said(truth: bool) -> str:
    """Returns ``yes`` or ``no``."""
    return "yes" if truth else "no"


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def implementations(kind: str) -> tuple[str, str]:
    """Returns whether a fused kernel can run an encoding, and a linear-memory backend that can."""

    def runs(name: str) -> bool:
        model = model_of(kind, SMALL, attention_implementation=name)
        try:
            model.attention_plan(1, TIME)
        except NotImplementedError:
            return False
        return True

    with mock.patch.object(devices, "compute_capability", return_value=(9, 0)):
        fused = runs("pallas")
    return said(fused), next((f"`{name}`" for name in ("chunked", "rows") if runs(name)), "")


def cache(kind: str) -> str:
    """Returns a token's bytes in the cache: of the first layer by part, and those kept once."""
    model = model_of(kind, WIDE)

    def layers(capacity: int) -> Any:
        made = jax.eval_shape(lambda: tape.init_cache(model, 1, capacity))
        return made.layers[0], made.kept, made

    count = len(model.blocks[0].layers)
    (layer, once, whole), longer = layers(64), layers(128)[2]
    sizes = {
        "keys": layer.k,
        "values": layer.v,
        "states": layer.e,
        **{name.replace("_", " "): x for name, x in layer.kept.items()},
    }
    per_token = {name: nbytes(x) // (64 * count) for name, x in sizes.items() if x is not None}
    if longer.nbytes != 2 * whole.nbytes:
        return "not constant"
    base = per_token.pop("keys") + per_token.pop("values")
    more = [f"{name} {size}" for name, size in per_token.items()]
    more += [f"once {name.replace('_', ' ')} {nbytes(x) // 64}" for name, x in once.items()]
    if model.encoding.rewrites_keys:
        more.append("keys are rewritten")
    return ", ".join([str(base), *more])


def nbytes(x: Any) -> int:
    """Size of an array, or of a description of one."""
    return math.prod(x.shape) * x.dtype.itemsize


def parameters(kind: str) -> str:
    """Returns how many parameters an encoding adds to its first layer and, once, to the model."""
    model = model_of(kind, WIDE)
    config, encoding = model.config, model.encoding

    def count(params: Any) -> int:
        return sum(math.prod(param.shape) for param in params.values())

    layer = count(encoding.layer_params(config.sizes, updates=model.blocks[0].like.updates))
    once = count(encoding.input_params(config.sizes))
    return ", ".join([f"{layer:,}"] * (layer > 0 or not once) + [f"once {once:,}"] * (once > 0))


def row(kind: str) -> str:
    """The line of one encoding."""
    with jax.enable_x64(True):
        small = Small.of(kind)
        found = small.shift(), small.permutations(), small.turns(), small.causal()
    acts = ", ".join(positions.registry[kind].acts_on)
    return line((f"`{kind}`", acts, *found, *implementations(kind), cache(kind), parameters(kind)))


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def rows_of(page: str) -> dict[str, str]:
    """The lines of the table in a page, by encoding."""
    table = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    return {one.split("`")[1]: one for one in table}


def with_rows(page: str, rows: dict[str, str]) -> str:
    """The page with a table of these lines, in the order of the registry."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    table = [line(HEADER), line(["---"] * len(HEADER)), *(rows[k] for k in positions.registry)]
    return "\n".join([before + BEGIN, "", *table, "", END + after])


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the table anew, or some of its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="encodings (all)")
    kinds = parser.parse_args(argv).kinds or list(positions.registry)
    page = PAGE.read_text(encoding="utf-8")
    rows = rows_of(page)
    for kind in kinds:
        rows[kind] = row(kind)
        print(rows[kind], flush=True)
    write_atomically(PAGE, with_rows(page, rows).encode())


if __name__ == "__main__":
    main()
