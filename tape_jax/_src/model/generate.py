"""Cached generation: fill a cache with the prompts, then decode token by token inside one jit.

While decoding, the cache holds every token but the last, which is the input of the next step. The
parts (:func:`prefill`, :func:`extend`, :func:`sample_logits`, :func:`decode`) are pure functions
that you can combine differently, inside or outside ``jax.jit``; :func:`generate` is the usual way.

Prompts of unequal length share a batch by padding on the left. Padding has segment id 0, which real
tokens do not see, and the positions of every row start at 0 at its first real token, so a row does
not depend on the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.algebra import at_least_float32
from tape_jax._src.core.checks import (
    as_array,
    as_integers,
    broadcasts,
    concrete,
    positive,
    require,
    typed,
)
from tape_jax._src.core.explicit import automatic_inside, names_of
from tape_jax._src.core.segments import PADDING, places
from tape_jax._src.model import placement
from tape_jax._src.model.by_layer import loop_over_tokens
from tape_jax._src.model.cache import (
    Cache,
    append,
    check_cache,
    check_length,
    init_cache,
    last_segment,
)
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.inputs import check_inputs, check_variables
from tape_jax._src.positions.protocol import as_positions, check_indices, default_positions, on_axes

Array = jax.Array


@typed
@automatic_inside(placement.outputs)
def generate(
    model: Transformer,
    variables: Any,
    prompts: Array | Sequence[Sequence[int] | np.ndarray],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Iterable[int] | None = None,
    key: Array | None = None,
    pad_id: int = 0,
    capacity: int | None = None,
    prefill_chunk: int | None = None,
) -> Array:
    """Continues prompts.

    Calls with equal model, shapes and kind of sampling share one compilation.

    Args:
      model: the model.
      variables: its variables, ``{"params": ...}``.
      prompts: token ids: integers ``[B, P]``, or ``B`` non-empty sequences of integers, which may
        differ in length; ``P`` is then the longest length.
      max_new_tokens: ``N``, number of tokens to generate.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw from the ``top_k`` most likely tokens only.
      top_p: draw from the fewest most likely tokens that together have at least this probability
        (after ``temperature`` and ``top_k``).
      stop: token ids that end a row: padding follows the first of them. Decoding ends early once
        all rows have ended.
      key: random key, needed if ``temperature`` is positive.
      pad_id: token id of padding, on the left of short prompts and behind a stop.
      capacity: slots of the cache; None: ``P + N``. Encodings that draw random positions or scale
        dynamically do so for this length, if it is given, or else for each row's number of tokens
        without padding. Either way a row does not depend on the others.
      prefill_chunk: number of prompt tokens to run at a time, as ``chunk`` of
        :func:`tape_jax.prefill`; None: all at once.

    Returns:
      int32 ``[B, P + N]``: the prompts, padded on the left to ``P``, and their continuations.

    Raises:
      ValueError: if there is no prompt or an empty one; if ids are not integers or (unless traced)
        not in the vocabulary; if the sequence is longer than the model, its encoding or
        ``capacity`` admits; if a sampling option is out of range.
    """
    check_variables(variables)
    n = positive("max_new_tokens", max_new_tokens)
    vocab_size = model.config.vocab_size
    _check_ids("pad_id", np.asarray(pad_id), vocab_size)
    tokens, lengths = pad_prompts(prompts, pad_id, vocab_size=vocab_size)
    total = tokens.shape[1] + n
    length = lengths + n if capacity is None else None
    capacity = total if capacity is None else positive("capacity", capacity)
    asked = f"a prompt of {tokens.shape[1]} tokens and max_new_tokens = {n}"
    require(total <= capacity, f"{asked} need a capacity of {total}; got {capacity}")
    check_length(model, capacity, what=f"{asked}: a cache")
    _check_sampling(temperature, top_k, top_p)
    sampling = {}
    if temperature > 0:
        require(key is not None, f"temperature = {temperature} needs a random key; got key=None")
        sampling = {"key": key, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    return _generate(
        model,
        variables,
        tokens,
        lengths,
        n,
        capacity,
        None if prefill_chunk is None else positive("prefill_chunk", prefill_chunk),
        length,
        stop=_stop_ids(stop, vocab_size),
        pad_id=pad_id,
        **sampling,
    )


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _generate(
    model, variables, tokens, lengths, max_new_tokens, capacity, chunk, length, **options
) -> Array:
    if tokens.shape[1] == 1:
        cache = init_cache(model, tokens.shape[0], capacity, length=length)
    else:
        # Nobody reads these logits, so the compiler drops the output projection of the prompts.
        prompts = tokens[:, :-1], lengths - 1
        sizes: Any = {"capacity": capacity, "length": length, "chunk": chunk}
        _, cache = prefill(model, variables, *prompts, **sizes)
    new, _ = decode(model, variables, cache, tokens[:, -1], max_new_tokens, **options)
    return jnp.concatenate([tokens, new], axis=1)


@typed
def pad_prompts(
    prompts: Array | Sequence[Sequence[int] | np.ndarray],
    pad_id: int = 0,
    *,
    vocab_size: int | None = None,
) -> tuple[Array, Array]:
    """Pads prompts on the left into one array.

    Args:
      prompts: integers ``[B, P]``, or ``B`` non-empty sequences of integers.
      pad_id: token id of padding.
      vocab_size: number of token ids; None: as many as 32 bits hold.

    Returns:
      Tokens int32 ``[B, P]``, and the length of each prompt, int32 ``[B]``.

    Raises:
      ValueError: if there is no prompt, an empty one, or one whose ids are not integers from 0 to
        ``vocab_size - 1``; a traced array is checked for shape and type only.
    """
    if isinstance(prompts, jax.Array | np.ndarray):
        require(
            prompts.ndim == 2 and prompts.size > 0,
            f"prompts must have shape [B, P] with at least one token; got {prompts.shape}",
        )
        tokens = _check_ids("prompts", prompts, vocab_size)
        return tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    require(
        isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts) > 0,
        f"prompts must be an array [B, P] or a non-empty sequence of sequences; got {prompts!r}",
    )
    rows = [np.asarray(prompt) for prompt in prompts]
    for i, row in enumerate(rows):
        require(
            row.ndim == 1 and row.size > 0,
            f"prompts[{i}] must be a non-empty sequence of token ids; got shape {row.shape}",
        )
        _check_ids(f"prompts[{i}]", row, vocab_size)
    lengths = np.array([row.size for row in rows], np.int32)
    padded = np.full((len(rows), lengths.max()), pad_id, np.int32)
    for row, line in zip(rows, padded, strict=True):
        line[-row.size :] = row
    return jnp.asarray(padded), jnp.asarray(lengths)


@typed
@automatic_inside(placement.outputs)
def prefill(
    model: Transformer,
    variables: Any,
    tokens: Array,
    lengths: Array | None = None,
    *,
    capacity: int,
    length: int | Array | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    chunk: int | None = None,
) -> tuple[Array, Cache]:
    """Runs prompts through the model, padded on the left if their lengths differ.

    Args:
      model: the model.
      variables: its variables.
      tokens: ``[B, P]``, padded on the left.
      lengths: number of real tokens in each row, ``[B]``, may be 0; None: ``P`` in each row.
      capacity: slots of the new cache, at least ``P``.
      length: number of tokens for which random positions are drawn and dynamic scaling is fixed,
        an integer or one for each prompt ``[B]``; None: the capacity.
      positions: ``[B, P]`` or ``[P]``, with several axes ``[..., P, n]``, integers or floats, which
        the cache then has too; not read at padding. None: 0, 1, ... in each segment.
      segment_ids: in place of ``lengths``, ``[B, P]`` or ``[P]``, 0 at padding.
      chunk: run this many tokens at a time, each chunk attending to the cache. The memory beside
        cache and logits then does not grow with ``P``, except for attention of ``chunk`` queries
        over ``capacity`` keys. None: all tokens at once.

    Returns:
      Logits ``[B, P, vocab]`` (meaningless at padding) and a cache that holds the prompts.

    Raises:
      ValueError: as :func:`tape_jax.init_cache` and the model raise it; if both ``lengths`` and
        ``segment_ids`` are given.
    """
    check_variables(variables)
    require(
        lengths is None or segment_ids is None,
        "prefill takes lengths, of prompts padded on the left, or segment_ids; got both",
    )
    require(jnp.ndim(tokens) == 2, f"tokens must have shape [B, P]; got {jnp.shape(tokens)}")
    batch, longest = jnp.shape(tokens)
    if lengths is not None:
        lengths = _check_lengths(lengths, batch, longest)
    if segment_ids is None:
        padding = jnp.int32(0) if lengths is None else longest - lengths.astype(jnp.int32)[:, None]
        counted = default_positions(longest) - padding
        segment_ids = (counted >= 0).astype(jnp.int32)
        encoding = model.config.position
        if positions is None and (encoding.coordinate_axes == 1 or encoding.counts_text):
            positions = on_axes(counted, encoding.coordinate_axes)
    kind = jnp.int32
    if positions is not None:
        positions = as_positions(positions)
        kind = positions.dtype if jnp.issubdtype(positions.dtype, jnp.floating) else kind
    cache = init_cache(model, batch, capacity, length=length, position_dtype=kind)
    given: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids}
    if chunk is not None and positive("chunk", chunk) < longest:
        return _in_chunks(model, variables, cache, tokens, given, int(chunk))
    result: Any = model.apply(variables, tokens, cache=cache, **given)
    return result


def _in_chunks(
    model: Transformer, variables: Any, cache: Cache, tokens: Array, given: Any, chunk: int
) -> tuple[Array, Cache]:
    """Runs :func:`prefill` ``chunk`` tokens at a time; the first chunk may be shorter."""
    check_inputs(model, tokens, given["positions"], given["segment_ids"], cache)
    if given["positions"] is None:  # The cache would find them by comparing all pairs of tokens.
        axes = model.config.position.coordinate_axes
        given["positions"] = on_axes(places(given["segment_ids"]), axes)
    # All are written before any is run, for encodings whose ids depend on later tokens.
    cache = append(cache, tokens, **given)
    check_indices("token ids", cache.tokens, model.config.vocab_size)
    cache = dataclasses.replace(cache, index=jnp.int32(0))

    def run(cache: Cache, size: int) -> tuple[Cache, Array]:
        def next_ones(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, cache.index, size, axis=1)

        ids = {"positions": cache.positions, "segment_ids": cache.segment_ids}
        tokens = next_ones(cache.tokens)
        logits, cache = extend(model, variables, cache, tokens, **jax.tree.map(next_ones, ids))
        return cache, logits

    length = tokens.shape[1]
    begun = []
    if length % chunk:
        cache, logits = run(cache, length % chunk)
        begun = [logits]
    cache, logits = jax.lax.scan(lambda cache, _: run(cache, chunk), cache, length=length // chunk)
    logits = logits.swapaxes(0, 1).reshape(len(tokens), -1, logits.shape[-1])
    return jnp.concatenate([*begun, logits], axis=1), cache


def _check_lengths(lengths: Any, batch: int, longest: int) -> Array:
    lengths = as_integers("lengths", lengths)
    known = concrete(lengths)
    fits = known is None or bool(((known >= 0) & (known <= longest)).all())
    require(
        lengths.shape == (batch,) and jnp.issubdtype(lengths.dtype, jnp.integer) and fits,
        f"lengths must be integers in 0 .. {longest} of shape ({batch},), one a row; got "
        f"{lengths.dtype} of shape {lengths.shape}"
        + ("" if known is None or fits else f", {known.tolist()}"),
    )
    return lengths.astype(jnp.int32)


@typed
@automatic_inside(placement.outputs)
def extend(
    model: Transformer,
    variables: Any,
    cache: Cache,
    tokens: Array,
    *,
    positions: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Cache]:
    """Runs the tokens that follow a cache through the model.

    Args:
      model: the model.
      variables: its variables.
      cache: holds the tokens before.
      tokens: ``[B, T]``.
      positions: ``[B, T]`` or ``[T]``, with several axes ``[..., T, n]``; None: each row continues
        from the last one of its segment, in steps of 1, or starts at 0.
      segment_ids: ``[B, T]`` or ``[T]``, 0 at padding; None: each row continues with the id of its
        last real token, or starts with 1.

    Returns:
      Logits ``[B, T, vocab]`` and the cache, ``T`` tokens longer. Without free slots, which raise
      no error under ``jax.jit``, these and all later logits are NaN.
    """
    check_variables(variables)
    result: Any = model.apply(
        variables, tokens, positions=positions, segment_ids=segment_ids, cache=cache
    )
    return result


class _Decoding(NamedTuple):
    """The values that the loop of :func:`decode` carries.

    Attributes:
      made: tokens generated.
      cache: holds all tokens but ``token``.
      token: the last of each row, ``[B]``.
      done: whether a row has reached a stop, ``[B]``.
      padded: whether ``token`` is padding behind a stop, ``[B]``.
      out: what was generated, ``[B, N]``.
    """

    made: Array
    cache: Any
    token: Array
    done: Array
    padded: Array
    out: Array


@typed
@automatic_inside(placement.outputs)
def decode(
    model: Transformer,
    variables: Any,
    cache: Cache,
    token: Array,
    max_new_tokens: int,
    *,
    key: Array | None = None,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    stop: Iterable[int] | Array | None = None,
    pad_id: int | Array = 0,
) -> tuple[Array, Cache]:
    """Generates tokens in one loop.

    Padding follows a stop, in the cache too: :func:`extend` continues behind the stop. Like any
    last token, a stop that is the last of the ``N`` tokens is not in the cache yet.

    A random draw depends on ``key`` and the number of slots in use, so several calls draw the same
    tokens as one, until a row reaches a stop: the next call continues behind it.

    Args:
      model: the model.
      variables: its variables.
      cache: holds all tokens but the last, with room for ``max_new_tokens`` more.
      token: the last token of each row, ``[B]``.
      max_new_tokens: ``N``.
      key: random key; None: greedy.
      temperature, top_k, top_p: as in :func:`sample_logits`.
      stop: token ids that end a row, a collection or an array ``[K]``; or None.
      pad_id: token id that follows them, or one for each row ``[B]``.

    Returns:
      int32 ``[B, N]``, and the cache, which holds all tokens but the last again. Tokens are -1
      where logits were NaN, as they are once a cache is full.

    Raises:
      ValueError: if the cache is too small, unless it is traced, or not of this model.
    """
    check_variables(variables)
    check_cache(model, cache)
    max_new_tokens = positive("max_new_tokens", max_new_tokens)
    batch = cache.tokens.shape[0]
    token = as_integers("token", token)
    require(
        token.shape == (batch,) and jnp.issubdtype(token.dtype, jnp.integer),
        f"token must be integers of shape ({batch},), one a row; got {token.dtype} of shape "
        f"{token.shape}",
    )
    index = concrete(cache.index)
    require(
        index is None or int(index) + max_new_tokens <= cache.capacity,
        f"{max_new_tokens} tokens do not fit into a cache of capacity {cache.capacity} with "
        f"{index} in use",
    )
    if not isinstance(stop, jax.core.Tracer):
        stop = _stop_ids(stop, model.config.vocab_size)
    pad_id = as_integers("pad_id", pad_id)
    require(
        pad_id.shape in ((), (batch,)) and jnp.issubdtype(pad_id.dtype, jnp.integer),
        f"pad_id must be an integer, or integers of shape ({batch},), one a row; got "
        f"{pad_id.dtype} of shape {pad_id.shape}",
    )
    by = loop_over_tokens(model, jax.tree.map(jnp.asarray, variables), cache)
    ids = None if stop is None else last_segment(cache)

    def unfinished(loop):
        # Until the stop of every row has entered the cache.
        return (loop.made < max_new_tokens) & ~jnp.all(loop.padded)

    def step(loop):
        cache, done = by.enter(loop.cache), loop.done
        draw = None if key is None else jax.random.fold_in(key, cache.index)
        segment = None if ids is None else jnp.where(loop.padded, PADDING, ids)[:, None]
        token = loop.token[:, None]
        logits, cache = extend(by.model, by.variables, cache, token, segment_ids=segment)
        token = sample_logits(logits[:, 0], draw, temperature=temperature, top_k=top_k, top_p=top_p)
        token = jnp.where(done, jnp.int32(pad_id), token)
        out = jax.lax.dynamic_update_slice_in_dim(loop.out, token[:, None], loop.made, axis=1)
        ended = done if stop is None else done | jnp.isin(token, stop)
        return _Decoding(loop.made + 1, by.leave(cache), token, ended, done, out)

    padding = pad_id.astype(jnp.int32)[..., None]  # One id, or one for each row.
    out = jnp.broadcast_to(padding, (batch, max_new_tokens))
    none = jnp.zeros(batch, bool)
    start = _Decoding(jnp.int32(0), by.cache, token.astype(jnp.int32), none, none, out)
    end = jax.lax.while_loop(unfinished, step, start)
    return end.out, by.finish(end.cache)


@typed
@automatic_inside(lambda given, _: names_of(given["logits"])[:-1])
def sample_logits(
    logits: Array,
    key: Array | None = None,
    *,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> Array:
    """Draws token ids from logits.

    Args:
      logits: ``[..., vocab]``; draws use them in at least float32.
      key: random key; None: the most likely token, whatever the other options say.
      temperature: divides the logits; it, ``top_k`` and ``top_p`` may each be an array that
        broadcasts to ``[...]``.
      top_k: keeps the ``top_k`` most likely tokens, exactly that many among equals.
      top_p: keeps the fewest most likely tokens whose probabilities, after ``temperature`` and
        ``top_k``, add up to at least this (Holtzman et al. 2020, section 3.1).

    Returns:
      int32 ``[...]``; -1 where a logit is NaN.

    Raises:
      ValueError: if an option has another shape or, if it is known, is out of range.
    """
    dtype = getattr(logits, "dtype", None)
    require(
        dtype is not None and jnp.issubdtype(dtype, jnp.floating) and logits.ndim > 0,
        f"logits must be an array of floats [..., vocab]; got {dtype or type(logits).__name__}",
    )
    logits = jnp.asarray(logits)
    options = _check_sampling(temperature, top_k, top_p, logits.shape[:-1])
    drawn = _draw(logits.astype(at_least_float32(logits.dtype)), key, *options)
    return jnp.where(jnp.isnan(logits).any(-1), -1, drawn).astype(jnp.int32)


def _draw(logits: Array, key: Array | None, temperature: Any, top_k: Any, top_p: Any) -> Array:
    """Draws token ids as :func:`sample_logits` does, from logits that are not NaN."""
    if key is None:
        return jnp.argmax(logits, axis=-1)
    tiny = jnp.finfo(logits.dtype).tiny
    logits = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, tiny)
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits)
    order = jnp.argsort(logits, axis=-1, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if top_k is not None:
        ranked = jnp.where(jnp.arange(ranked.shape[-1]) < top_k, ranked, -jnp.inf)
    if top_p is not None:
        probability = jax.nn.softmax(ranked, axis=-1)
        more_likely = jnp.cumsum(probability, axis=-1) - probability
        # The sum may be rounded up to 1 before the last token.
        kept = (more_likely < top_p) | (jnp.asarray(top_p) >= 1)
        ranked = jnp.where(kept, ranked, -jnp.inf)
    rank = jax.random.categorical(key, ranked)
    return jnp.take_along_axis(order, rank[..., None], axis=-1)[..., 0]


def _check_sampling(
    temperature: Any, top_k: Any, top_p: Any, rows: tuple[int, ...] = ()
) -> list[Array | None]:
    """Sampling options as arrays that broadcast to ``[*rows, vocab]``, checked where known."""

    def checked(name: str, value: Any, wanted: str, valid: Callable[[Any], Any]) -> Array | None:
        if value is None:
            return None
        x = as_array(name, value)
        # Under a trace an array of a known number is not known itself.
        known = concrete(value if hasattr(value, "dtype") else np.asarray(value))
        require(
            x.dtype != bool and (known is None or bool(np.all(valid(known)))),
            f"{name} must be {wanted}; got {value!r}",
        )
        require(
            broadcasts(x.shape, rows),
            f"{name} must be a number, or broadcast to the rows {rows}; got shape {x.shape}",
        )
        return x[..., None]

    def whole(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.integer) and (x >= 1)

    def finite(x: Any) -> Any:
        return np.isfinite(x) & (x >= 0)

    return [
        checked("temperature", temperature, "finite and not negative", finite),
        checked("top_k", top_k, "an integer of at least 1", whole),
        checked("top_p", top_p, "in (0, 1]", lambda x: (x > 0) & (x <= 1)),
    ]


def _stop_ids(stop: Iterable[int] | Array | None, vocab_size: int) -> Array | None:
    if stop is None:
        return None
    require(isinstance(stop, Iterable), f"stop must be a collection of token ids; got {stop!r}")
    ids = np.asarray(stop if hasattr(stop, "dtype") else list(stop))
    return _check_ids("stop", ids, vocab_size) if ids.size else None


def _check_ids(name: str, ids: Any, vocab_size: int | None) -> Array:
    """Integer token ids as int32; ValueError if they are not, do not fit or are no vocabulary's."""
    require(
        jnp.issubdtype(ids.dtype, jnp.integer),
        f"{name} must hold integer token ids; got {ids.dtype}",
    )
    if not isinstance(ids, jax.core.Tracer):
        low, high = int(ids.min()), int(ids.max())
        last = (2**31 if vocab_size is None else vocab_size) - 1
        require(
            low >= 0 and high <= last,
            f"{name} must hold token ids in 0..{last}; got ids from {low} to {high}",
        )
    return jnp.asarray(ids, jnp.int32)
