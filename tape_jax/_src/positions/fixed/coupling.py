"""Position coupling: digits of equal weight, and the signs, share position ids."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import at_least_32_bits
from tape_jax._src.core.checks import concrete, not_negative, require, set_field
from tape_jax._src.core.segments import running, side_by_side
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.additive import Learned, moved_rows, places_in_runs, previous

Array = jax.Array

# Markers of missing ids.
UNENDED, TOO_LONG = -1, -2


@dataclasses.dataclass(frozen=True)
class PositionCoupling(Learned):
    """Position coupling (Cho et al. 2024, arXiv:2405.20671): a learned vector for each position id.

    For additions. With ``start = 1``, a digit of weight ``10^r`` has the id ``start + 1 + r``, in
    every number, and ``+`` and ``=`` have ``start``; every other token has 0. Numbers are runs of
    digits; a number directly after ``=`` is an answer, all others are operands. Segments are
    separate, and other tokens between theirs do not count. While the model has a random stream
    ``"positions"``, one draw from ``0 .. max_offset`` is added to ``start``.

    Operands written with the highest digit first have ids that depend on where they end: they have
    none until something else follows their last digit. So do not cut a prompt inside a number when
    you give it to a cache; models do not write such operands themselves. Answers get their ids as
    they are written: reversed ones count up; others count down from a length that their operands
    determine, see ``extra_digits``.

    Ids that are missing or too large for the table (``max_offset`` fewer with the random stream)
    are refused or, if tokens are traced (not known yet), give NaN.

    Attributes:
      size: size of the table.
      digits: token ids of the digits.
      plus, equals: token ids of the signs.
      reverse_operands: operands are written with the lowest digit first.
      reverse_answer: answers are, too.
      extra_digits: answers that are not reversed have this many more digits than the longest of
        their operands: for two numbers 1, with zeros in front; for several that have zeros in
        front, 0. None: answers are reversed.
      couple_equals: before answers that are not reversed, ``=`` has the id after that of the first
        digit, as in the published code for two numbers; else ``start``, as in that for several.
      max_offset: largest random offset.

    Raises:
      ValueError: for options out of range or that do not go together; if digits and signs are not
        given, or are not different token ids of the model; for ids that are missing or too large,
        if tokens are known.
    """

    kind: ClassVar[str] = "position_coupling"
    reads_positions: ClassVar[bool] = False

    size: int = 256
    digits: tuple[int, ...] = ()
    plus: int | None = None
    equals: int | None = None
    reverse_operands: bool = False
    reverse_answer: bool = True
    extra_digits: int | None = None
    couple_equals: bool = True
    max_offset: int = 100

    def __post_init__(self):
        super().__post_init__()
        for name in ("digits", "plus", "equals"):
            set_field(self, name, _token_ids(name, getattr(self, name)))
        if self.extra_digits is not None:
            not_negative(f"{self.kind}: extra_digits", self.extra_digits)
        not_negative(f"{self.kind}: max_offset", self.max_offset)
        require(
            self.reverse_answer or self.extra_digits is not None,
            f"{self.kind}: answers that are not reversed need extra_digits: without it their ids "
            "depend on tokens that are not written yet",
        )

    def check(self, sizes: Sizes) -> None:
        given = (*self.digits, *(x for x in (self.plus, self.equals) if x is not None))
        require(
            bool(self.digits) and len(given) == len(self.digits) + 2,
            f"{self.kind}: digits, plus and equals, the token ids, must be given; got "
            f"{self.digits}, {self.plus} and {self.equals}",
        )
        require(
            min(given) >= 0 and max(given) < sizes.vocab_size and len(set(given)) == len(given),
            f"{self.kind}: digits, plus and equals must be different token ids in 0 .. "
            f"{sizes.vocab_size - 1}; got {self.digits}, {self.plus} and {self.equals}",
        )
        require(
            self.size > self.max_offset,
            f"{self.kind}: size = {self.size} must exceed max_offset = {self.max_offset}",
        )

    def max_length(self) -> int | None:
        return None

    def coordinates(self, tokens: Array, positions: Array, segment_ids: Array | None = None):
        tokens = at_least_32_bits(tokens)
        if segment_ids is None:
            return self._ids(jnp.zeros_like(tokens), tokens)
        return side_by_side(self._ids, jnp.broadcast_to(segment_ids, tokens.shape), tokens)

    def embed(self, params, coordinates, sizes: Sizes, key):
        known = concrete(coordinates)
        require(
            known is None or not (known == UNENDED).any(),
            f"{self.kind}: the ids of operands that are not reversed depend on where they end: "
            "give the tokens up to what follows the number in one call",
        )
        require(
            known is None or not (known == TOO_LONG).any(),
            f"{self.kind}: an answer has more digits than its longest operand and extra_digits = "
            f"{self.extra_digits} more",
        )
        what = f"{self.kind}: position ids"
        return moved_rows(what, params["table"], coordinates, self.max_offset, key)

    def _ids(self, segments: Array, tokens: Array) -> Array:
        """Returns position ids of ``tokens [..., T]``; a segment's tokens lie side by side."""
        assert self.plus is not None
        assert self.equals is not None
        numbers = _numbers(segments, tokens, self.digits, self.equals)
        operand = numbers.place + 1 if self.reverse_operands else numbers.weight + 2
        if not self.reverse_operands:
            operand = jnp.where(numbers.ended, operand, UNENDED)
        answer, equals = numbers.place + 1, jnp.ones_like(tokens, jnp.int32)
        if not self.reverse_answer:
            assert self.extra_digits is not None
            length = numbers.longest + self.extra_digits
            answer = length - numbers.place + 2
            answer = jnp.where(numbers.place <= length, answer, TOO_LONG)
            equals = length + 2 if self.couple_equals else equals
        ids = jnp.where(tokens == self.plus, 1, jnp.where(tokens == self.equals, equals, 0))
        digit = jnp.where(numbers.is_answer, answer, operand)
        return jnp.where(numbers.place > 0, digit, ids)


class _Numbers(NamedTuple):
    """The numbers of a text as each token sees them, int32 or booleans ``[..., T]``.

    Attributes:
      place: of a digit in its number, from 1; 0 for all else.
      weight: digits behind it.
      ended: whether something follows its number.
      is_answer: whether its number directly follows an equals sign.
      longest: digits of the longest operand since the last equals sign before it; of a digit of
        an answer, before the sign that it follows.
    """

    place: Array
    weight: Array
    ended: Array
    is_answer: Array
    longest: Array


def _numbers(segments: Array, tokens: Array, digits: Sequence[int], equals: int) -> _Numbers:
    is_digit = jnp.isin(tokens, jnp.asarray(digits))
    same = (segments == previous(segments, 0)).at[..., 0].set(False)
    place = places_in_runs(is_digit, previous(is_digit, False) & same)
    follows = jnp.concatenate([same[..., 1:], jnp.zeros_like(same[..., :1])], axis=-1)
    more = jnp.concatenate([is_digit[..., 1:], jnp.zeros_like(same[..., :1])], axis=-1)
    backwards = places_in_runs(is_digit[..., ::-1], (more & follows)[..., ::-1])
    weight = jnp.maximum(backwards[..., ::-1] - 1, 0)
    index = jnp.arange(tokens.shape[-1], dtype=jnp.int32)

    def at(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, jnp.clip(index, 0, tokens.shape[-1] - 1), axis=-1)

    is_equals = tokens == equals
    begin = index - place + 1
    is_answer = (place > 0) & at(same, begin) & at(is_equals, begin - 1)
    begins = ~same | previous(is_equals, False)
    longest = running(jnp.maximum, begins, jnp.where(is_answer, 0, place), tokens.ndim - 1)
    longest = jnp.where(is_answer, at(longest, begin - 1), longest)
    return _Numbers(place, weight, at(follows, index + weight), is_answer, longest)


def _token_ids(name: str, value: object) -> object:
    """Token ids as Python's integers; None stays."""
    try:
        if name == "digits":
            return tuple(operator.index(x) for x in value)  # type: ignore[attr-defined]
        return None if value is None else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        what = "token ids" if name == "digits" else "a token id"
        raise ValueError(f"position_coupling: {name} must be {what}; got {value!r}") from None
