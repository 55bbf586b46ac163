"""The bodies of the fused kernels of the update, in Pallas for its Triton backend.

Each program owns a few tokens of one row of the batch and holds their states, all heads of them, in
registers: ``e``, ``a`` and the gradient are read once, results are written once. Rows of the
matrices ``I + A`` are made head by head, from the gate, and never written. A rotary state is two
tiles, the real and the imaginary half of each head.

Sums over tokens, which gradients of parameters are, leave a program as the part of its tokens.
Sizes of tiles are powers of two; what lies past the end of an array is read as zeros and never
written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tape_jax._src.positions.tape.norms import TINY

Array = jax.Array
Refs = Mapping[str, Any]

# The interpreter takes no Python integers for indices, nor indices of unlike types.
HALVES = (np.int32(0), np.int32(1))


@dataclasses.dataclass(frozen=True)
class UpdateKernel:
    """What the kernels know about a call at compile time.

    Attributes:
      heads, groups: state heads, and query heads for each of them.
      dim: numbers of a head.
      norm, magnitude: as in :func:`tape_jax.update_state`.
      tokens: of a program: a power of two.
      warps: of a program.
      interpret: run by XLA operations, on any device.
    """

    heads: int
    groups: int
    dim: int
    norm: str
    magnitude: float
    tokens: int = 8
    warps: int = 8
    interpret: bool = False


class Halves(NamedTuple):
    """Two tiles, the halves of each head."""

    real: Array
    imag: Array

    def map(self, function: Callable[[Array], Array]) -> Halves:
        return Halves(function(self.real), function(self.imag))

    def plus(self, other: Halves) -> Halves:
        return Halves(self.real + other.real, self.imag + other.imag)

    def products(self, other: Halves) -> Array:
        """Products of the numbers of both halves, added up."""
        return self.real * other.real + self.imag * other.imag


def _iota(size: int) -> Array:
    return lax.iota(jnp.int32, size)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class UpdateProgram:
    """Access to the arrays of one program, the ``tile``-th of a ``row`` of the batch."""

    kernel: UpdateKernel
    refs: Refs
    tile: Array
    row: Array

    @classmethod
    def here(cls, kernel: UpdateKernel, refs: Refs) -> UpdateProgram:
        # Read outside loops: the interpreter cannot inside.
        return cls(kernel, refs, pl.program_id(0), pl.program_id(1))

    def tokens(self) -> Array:
        return self.tile * np.int32(self.kernel.tokens) + _iota(self.kernel.tokens)

    def heads(self, group: int | None = None) -> Array:
        """State heads, or the query heads of a place in their groups."""
        heads = _iota(power(self.kernel.heads))
        if group is None:
            return heads
        return heads * np.int32(self.kernel.groups) + np.int32(group)

    def half(self) -> Array:
        return _iota(power(self.kernel.dim // 2))

    def read(self, name: str, *axes: Any) -> Array:
        """A tile ``[n, ...]`` in float32, with an axis for every index that is an array."""
        at, mask = self._at(name, axes)
        loaded = plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)
        return loaded.astype(jnp.float32)

    def write(self, name: str, value: Array, *axes: Any) -> None:
        """Writes what :meth:`read` would read."""
        at, mask = self._at(name, axes)
        plt.store(at, value.astype(self.refs[name].dtype), mask=mask)

    def read_state(self, name: str, head: Any) -> Halves:
        """Of all tokens the states of some heads ``[tokens, heads, D/2]``, or of one."""
        parts = (self.read(name, self.tokens(), head, part, self.half()) for part in HALVES)
        return Halves(*parts)

    def write_state(self, name: str, value: Halves, head: Any) -> None:
        for x, part in zip(value, HALVES, strict=True):
            self.write(name, x, self.tokens(), head, part, self.half())

    def _at(self, name: str, axes: tuple[Any, ...]) -> tuple[Any, Array | None]:
        ref = self.refs[name]
        row = np.int32(0) if ref.shape[0] == 1 else self.row
        sizes = [x.shape[0] for x in axes if getattr(x, "ndim", 0)]
        at: list[Any] = [row]
        mask: Array | None = None
        for x, length in zip(axes, ref.shape[1:], strict=True):
            if getattr(x, "ndim", 0):
                place = sum(1 for y in at if getattr(y, "ndim", 0))
                shape = [size if n == place else 1 for n, size in enumerate(sizes)]
                x = jnp.broadcast_to(x.reshape(shape), sizes)
                if length % sizes[place]:
                    exists = x < length
                    mask = exists if mask is None else mask & exists
            at.append(x)
        return ref.at[tuple(at)], mask

    def total(self) -> Halves:
        """``e + Mix(a)``, ``[tokens, heads, D/2]``."""
        total = self.read_state("e", self.heads())
        if "mix" in self.refs:
            for mix, attended, _ in self.mixed():
                total = total.plus(attended.map(lambda x, mix=mix: mix * x))
        return total

    def mixed(self) -> Any:
        """Weights ``[1, heads, 1]``, attended states that broadcast, and the heads of these.

        With one weight a query head, by places in the groups; with a matrix, by query heads.
        """
        if len(self.refs["mix"].shape) == 2:
            for group in range(self.kernel.groups):
                heads = self.heads(group)
                yield self.read("mix", heads)[None, :, None], self.read_state("a", heads), heads
            return
        for query in range(self.kernel.heads * self.kernel.groups):
            head = np.int32(query)
            attended = self.read_state("a", head).map(lambda x: x[:, None, :])
            yield self.read("mix", self.heads(), head)[None, :, None], attended, head

    def gate(self) -> tuple[Array, Array]:
        """The gate ``[tokens, P]`` and ``up [P, heads]``."""
        width = _iota(power(self.refs["up"].shape[1]))
        return self.read("gate", self.tokens(), width), self.read("up", width, self.heads())

    def down(self, head: Array) -> Array:
        """Of a head, ``[1, P]``."""
        return self.read("down", head, _iota(power(self.refs["down"].shape[2])))[None, :]

    def matrix_row(self, gate: Array, up: Array, head: Array) -> Array:
        """Of ``I + A`` the row of a head, ``[tokens, heads]``."""
        # Not by a product of tiles, which wants 16 tokens: their states would not fit in registers.
        row = jnp.sum((gate * self.down(head))[:, :, None] * up[None], axis=1)
        return row + (self.heads() == head).astype(jnp.float32)[None, :]


def normalized(kernel: UpdateKernel, y: Halves) -> Halves:
    """The norm of the states of one head, ``[tokens, D/2]``."""
    if kernel.norm == "none":
        return y
    square = y.products(y)
    if kernel.norm == "rms":
        square = jnp.sum(square, axis=1, keepdims=True) * np.float32(2 / kernel.dim)
    scale = lax.rsqrt(jnp.maximum(square, np.float32(TINY))) * np.float32(kernel.magnitude)
    return y.map(lambda x: x * scale)


def applied(row: Array, total: Halves) -> Halves:
    """One row of each token's matrix times its states."""
    return total.map(lambda x: jnp.sum(row[:, :, None] * x, axis=1))


def forward(kernel: UpdateKernel, inputs: Refs, outputs: Refs) -> None:
    """The new states of a few tokens."""
    program = UpdateProgram.here(kernel, {**inputs, **outputs})
    total = program.total()
    gate, up = program.gate()

    def step(head: Array, carry: None) -> None:
        y = applied(program.matrix_row(gate, up, head), total)
        program.write_state("out", normalized(kernel, y), head)

    lax.fori_loop(np.int32(0), np.int32(kernel.heads), step, None)


def backward(kernel: UpdateKernel, inputs: Refs, outputs: Refs) -> None:
    """Gradients of a few tokens' states and gates, and their part of those of the parameters."""
    program = UpdateProgram.here(kernel, {**inputs, **outputs})
    total = program.total()
    gate, up = program.gate()
    width = _iota(up.shape[0])

    def step(head: Array, carry: Any) -> Any:
        d_total, d_gate, d_up = carry
        down = program.down(head)
        row = program.matrix_row(gate, up, head)
        d_y = program.read_state("d_out", head)
        if kernel.norm != "none":
            d_y = normalized_gradient(kernel, applied(row, total), d_y)
        across = d_y.map(lambda x: x[:, None, :])
        d_total = d_total.plus(across.map(lambda x: row[:, :, None] * x))
        d_row = jnp.sum(across.products(total), axis=2)
        pulled = jnp.sum(d_row[:, None, :] * up[None], axis=2)
        program.write("d_down", jnp.sum(gate * pulled, axis=0), program.tile, head, width)
        return (
            d_total,
            d_gate + pulled * down,
            d_up + jnp.sum((gate * down)[:, :, None] * d_row[:, None, :], axis=0),
        )

    nothing = jnp.zeros(total.real.shape, jnp.float32)
    carry = (Halves(nothing, nothing), jnp.zeros_like(gate), jnp.zeros_like(up))
    found = lax.fori_loop(np.int32(0), np.int32(kernel.heads), step, carry)
    d_total, d_gate, d_up = found
    program.write_state("d_e", d_total, program.heads())
    program.write("d_gate", d_gate, program.tokens(), width)
    program.write("d_up", d_up, program.tile, width, program.heads())
    if "mix" not in inputs:
        return
    for mix, attended, heads in program.mixed():
        d_mix = jnp.sum(jnp.sum(d_total.products(attended), axis=2), axis=0)
        if len(inputs["mix"].shape) == 2:
            program.write_state("d_a", d_total.map(lambda x, mix=mix: mix * x), heads)
            program.write("d_mix", d_mix, program.tile, heads)
        else:
            d_a = d_total.map(lambda x, mix=mix: jnp.sum(mix * x, axis=1))
            program.write_state("d_a", d_a, heads)
            program.write("d_mix", d_mix, program.tile, program.heads(), heads)


def normalized_gradient(kernel: UpdateKernel, y: Halves, d_out: Halves) -> Halves:
    """What :func:`normalized` passes back."""
    _, pull = jax.vjp(lambda y: normalized(kernel, y), y)
    return pull(d_out)[0]
