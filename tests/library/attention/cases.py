"""One table of attention calls for all backends, and a float64 oracle in plain numpy loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
      batch, queries, keys, heads, kv_heads, dim, value_dim: shapes; ``keys`` None: as queries.
      form: ``rotary``, ``tensor`` (L = 2, R = 3) or None for no state.
      state_heads: 1 or ``kv_heads``.
      state_batch: whether the state has batch axes; without, it is shared by the heads too.
      query_state: the queries have a state of their own, with ``heads`` heads.
      bias: None, ``array``, ``row`` (an array [keys]), or ``function`` (closes over float and
        integer arrays).
      segments: None, ``same`` (one array) or ``pair``.
      mask: None, or the axes of a random mask: ``full`` [batch, 1, Tq, S] and ``heads`` [heads, Tq,
        S], with a row that sees no key, ``keys`` [batch, 1, 1, S], or ``queries`` [Tq, 1].
      window_positions: None, or for random ones, of queries and of keys, the largest of either
        sign.
      log_decay: None, ``same`` [batch, T, heads], ``shared`` [T, 1], or two: ``pair`` [batch, Tq,
        heads] and [batch, S, heads], ``mixed`` [Tq, 1] and [batch, S, heads].
    """

    name: str
    batch: tuple[int, ...] = (2,)
    queries: int = 19
    keys: int | None = None
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 6
    form: str | None = "rotary"
    state_heads: int = 2
    state_batch: bool = True
    query_state: bool = False
    is_causal: bool = True
    local_window_size: int | tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    segments: str | None = None
    mask: str | None = None
    window_positions: int | None = None
    log_decay: str | None = None
    query_offset: int = 0
    keys_rotated: bool = False
    attend_state: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def key_length(self) -> int:
        return self.keys or self.queries

    @property
    def needs_query_state(self) -> bool:
        return self.query_state or self.keys_rotated or self.key_length != self.queries


CASES = [
    Case("causal"),
    Case("no_batch", batch=(), queries=9),
    Case("two_batch_axes", batch=(2, 3), queries=9, segments="same"),
    Case("one_token", queries=1),
    Case("shared_state", state_heads=1, state_batch=False),
    Case("grouped_heads", heads=6, kv_heads=2, bias="array", segments="same"),
    Case("grouped_heads_shared_state", heads=4, kv_heads=2, state_heads=1, local_window_size=6),
    Case("multi_query", heads=4, kv_heads=1, state_heads=1, bias="function"),
    Case("window_bidirectional", local_window_size=4, queries=33, is_causal=False),
    Case("window_of_two_sides", local_window_size=(6, 2), queries=33, is_causal=False),
    Case("window_one", local_window_size=0),
    Case("segments", segments="same", queries=33, is_causal=False),
    Case("bias_row", bias="row", is_causal=False),
    Case("bias_function", bias="function", queries=21, segments="same"),
    Case("cross", queries=7, keys=21, is_causal=False, segments="pair"),
    Case("suffix", queries=5, keys=21, query_offset=16, bias="function"),
    Case("before_the_keys", queries=12, keys=20, query_offset=-5),
    Case("window_passed", queries=12, keys=9, query_offset=3, local_window_size=3),
    Case(
        "cache",
        queries=3,
        keys=21,
        query_offset=18,
        keys_rotated=True,
        heads=4,
        local_window_size=8,
    ),
    Case("cache_without_state", queries=3, keys=11, form=None, query_offset=8),
    Case("tensor", form="tensor"),
    Case("tensor_cache", form="tensor", queries=3, keys=11, query_offset=8, keys_rotated=True),
    Case("tensor_grouped", form="tensor", heads=4, state_heads=1, state_batch=False),
    Case("own_query_state", query_state=True, heads=4),
    Case("state_not_attended", attend_state=False),
    Case("no_state", form=None, value_dim=8, scale=0.3),
    Case("wide_keys", form=None, dim=16, value_dim=8, heads=4, scale=8**-0.5),
    Case("decay", log_decay="same"),
    Case("decay_grouped", heads=6, log_decay="same", segments="same", local_window_size=8),
    Case("decay_shared", log_decay="shared", form=None, scale=0.3, is_causal=False),
    Case("decay_cache", queries=3, keys=21, query_offset=18, form=None, heads=4, log_decay="pair"),
    Case("decay_cross", queries=17, keys=21, segments="pair", is_causal=False, log_decay="mixed"),
    Case("softcap", softcap=0.7, heads=4, segments="same", local_window_size=6),
    Case("softcap_and_decay", softcap=0.4, heads=4, bias="array", log_decay="same"),
]
# By a mask, or by what only plain JAX has.
MASKED = [
    Case("window_by_positions", window_positions=200, local_window_size=(90, 40), queries=33),
    Case(
        "window_by_far_positions",
        window_positions=2**31 - 1,
        local_window_size=(2**31 + 5, 2**30),
        queries=9,
        keys=21,
        is_causal=False,
    ),
    Case("mask", mask="full", is_causal=False),
    Case("mask_heads", mask="heads", heads=4, local_window_size=8, segments="same"),
    Case("mask_keys", mask="keys", heads=4, batch=(2, 3), queries=9),
    Case("mask_queries", mask="queries", is_causal=False),
    Case("mask_and_decay", mask="heads", heads=4, form=None, bias="function", log_decay="pair"),
]
BY_NAME = {case.name: case for case in CASES + MASKED}

TENSOR_L, TENSOR_R = 2, 3


def inputs(case: Case, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Float64 arrays that get gradients, and all else that the call needs."""
    rng = np.random.default_rng(seed)
    b, tq, s = case.batch, case.queries, case.key_length

    def state(length: int, heads: int) -> np.ndarray:
        tail = (case.dim,)
        if case.form == "tensor":
            tail = (case.dim // TENSOR_L, TENSOR_L, TENSOR_R)
        if not case.state_batch:
            # A rotary state without batch axes has no heads axis either.
            return rng.normal(size=(length, *tail) if len(tail) == 1 else (length, heads, *tail))
        return rng.normal(size=(*b, length, heads, *tail))

    width = case.dim
    if case.form == "tensor" and case.keys_rotated:
        width = case.dim // TENSOR_L * TENSOR_R
    floats = {
        "q": rng.normal(size=(*b, tq, case.heads, case.dim)),
        "k": rng.normal(size=(*b, s, case.kv_heads, width)),
        "v": rng.normal(size=(*b, s, case.kv_heads, case.value_dim)),
    }
    if case.form is not None:
        floats["state"] = state(s, case.state_heads)
        if case.needs_query_state:
            floats["query_state"] = state(tq, case.heads)
    if case.bias == "array":
        floats["bias"] = rng.normal(size=(case.heads, tq, s))
    elif case.bias == "row":
        floats["bias"] = rng.normal(size=(s,))
    elif case.bias == "function":
        floats["bias"] = rng.normal(size=(case.heads, 2))
        floats["phase"] = rng.normal(size=(*b, s))
    fixed: dict[str, Any] = {"rank": rng.integers(0, 5, size=(*b, s))}
    if case.segments == "same":
        fixed["segment_ids"] = np.sort(rng.integers(-1, 3, size=(*b, s)))
    elif case.segments == "pair":
        # No id of the last key exists among the queries of the first row, which sees no key at all.
        ids = rng.integers(0, 3, size=(*b, tq))
        ids[..., 0] = 7
        fixed["segment_ids"] = (ids, rng.integers(0, 3, size=(s,)))
    if case.window_positions is not None:
        far = case.window_positions
        fixed["window_positions"] = tuple(
            rng.integers(-far, far, size=(*b, n), endpoint=True, dtype=np.int64).astype(np.int32)
            for n in (tq, s)
        )
    if case.mask is not None:
        shapes = {
            "full": (*b, 1, tq, s),
            "heads": (case.heads, tq, s),
            "keys": (*b, 1, 1, s),
            "queries": (tq, 1),
        }
        fixed["mask"] = rng.random(size=shapes[case.mask]) < 0.6
        if case.mask in ("full", "heads"):
            fixed["mask"][..., 4, :] = False

    def decay(*shape: int) -> np.ndarray:
        return 2 * rng.normal(size=shape) - np.cumsum(rng.random(size=shape), axis=-2)

    if case.log_decay in ("same", "shared"):
        shape = (s, 1) if case.log_decay == "shared" else (*b, s, case.heads)
        floats["log_decay"] = decay(*shape)
    elif case.log_decay is not None:
        shape = (tq, 1) if case.log_decay == "mixed" else (*b, tq, case.heads)
        floats["query_decay"] = decay(*shape)
        floats["key_decay"] = decay(*b, s, case.heads)
    return floats, fixed


def bias_function(weights: Any, phase: Any, rank: Any) -> Any:
    """A bias ``[..., heads, Q, K]`` that closes over floats, per-row floats and integers."""

    weights, phase, rank = jnp.asarray(weights), jnp.asarray(phase), jnp.asarray(rank)

    def bias(query_index, key_index):
        distance = jnp.sin(0.3 * (query_index[:, None] - key_index))
        per_row = phase[..., key_index] * jnp.tanh(0.5 * rank[..., key_index])
        return weights[:, :1, None] * distance + weights[:, 1:, None] * per_row[..., None, None, :]

    return bias


def log_decay(floats: dict[str, Any]) -> Any:
    """That of a case: one array, a pair, or None."""
    if "query_decay" in floats:
        return floats["query_decay"], floats["key_decay"]
    return floats.get("log_decay")


def call(attention: Any, case: Case, floats: dict[str, Any], fixed: dict[str, Any], **options: Any):
    """Runs ``attention`` on a case."""
    bias = floats.get("bias")
    if case.bias == "function":
        bias = bias_function(floats["bias"], floats["phase"], fixed["rank"])
    return attention(
        *(floats[name] for name in "qkv"),
        state=floats.get("state"),
        is_causal=case.is_causal,
        segment_ids=fixed.get("segment_ids"),
        local_window_size=case.local_window_size,
        window_positions=fixed.get("window_positions"),
        scale=case.scale,
        logit_softcap=case.softcap,
        bias=bias,
        mask=fixed.get("mask"),
        log_decay=log_decay(floats),
        query_state=floats.get("query_state"),
        query_offset=case.query_offset,
        keys_rotated=case.keys_rotated,
        attend_state=case.attend_state,
        **options,
    )


def oracle(
    case: Case,
    floats: dict[str, np.ndarray],
    fixed: dict[str, Any],
    rewrite: Any = None,
    weigh: Any = None,
):
    """``(o, a)`` by loops over batch, heads and queries, from the definitions.

    ``rewrite(row, head, query, logits, visible)`` gives new logits ``[S]`` before anything is
    added to them, ``weigh(query, logits)`` the weights, logits being -inf where a key is hidden.
    """
    b, tq, s = case.batch, case.queries, case.key_length
    group = case.heads // case.kv_heads
    scale = case.scale if case.scale is not None else 1 / np.sqrt(case.dim)
    e = floats.get("state")
    query_state = floats.get("query_state", e)
    o = np.zeros((*b, tq, case.heads, case.value_dim))
    a = None
    if e is not None and case.attend_state:
        tail = 3 if case.form == "tensor" else 1
        a = np.zeros((*b, tq, case.heads, *e.shape[-tail:]))

    for row in np.ndindex(*b):
        for h in range(case.heads):
            kv = h // group
            keys, values = floats["k"][row][:, kv], floats["v"][row][:, kv]
            state = _of_head(e, row, kv, case)
            if state is not None and not case.keys_rotated:
                keys = [_rotated(keys[j], state[j]) for j in range(s)]
            for i in range(tq):
                query = floats["q"][row][i, h]
                if query_state is not None:
                    own = _of_head(query_state, row, _state_head(query_state, h, case), case)
                    query = _rotated(query, own[i])
                visible = np.array([_visible(case, fixed, row, h, i, j) for j in range(s)])
                if not visible.any():
                    continue
                logits = np.array([scale * np.dot(query, keys[j]) for j in range(s)])
                if case.softcap is not None:
                    logits = case.softcap * np.tanh(logits / case.softcap)
                if rewrite is not None:
                    logits = rewrite(row, h, i, logits, visible)
                logits += [_bias(case, floats, fixed, row, h, i, j) for j in range(s)]
                logits += [_decay(case, floats, row, h, i, j) for j in range(s)]
                logits[~visible] = -np.inf
                weights = _softmax(logits) if weigh is None else weigh(i, logits)
                o[row][i, h] = sum(weights[j] * values[j] for j in range(s))
                if a is not None:
                    a[row][i, h] = sum(weights[j] * state[j] for j in range(s))
    return o, a


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _state_head(state: np.ndarray, h: int, case: Case) -> int:
    if not case.state_batch:
        return 0
    heads = state.shape[-4 if case.form == "tensor" else -2]
    return h // (case.heads // heads)


def _of_head(state: np.ndarray | None, row: tuple[int, ...], head: int, case: Case):
    if state is None:
        return None
    state = state[row] if case.state_batch else state
    if case.form == "rotary" and state.ndim == 2:
        return state
    return state[:, min(head, state.shape[1] - 1)]


def _rotated(x: np.ndarray, state: np.ndarray) -> np.ndarray:
    half = x.size // 2
    if state.ndim == 1:
        out = (x[:half] + 1j * x[half:]) * (state[:half] + 1j * state[half:])
        return np.concatenate([out.real, out.imag])
    # Block m owns dimensions m and m + D/2 (L = 2); output r of block m is sum_l E[m, l, r] x[l].
    # Odd R: blocks are laid out one after another.
    blocks = [state[m].T @ np.array([x[m], x[m + half]]) for m in range(half)]
    return np.concatenate(blocks)


def _visible(
    case: Case, fixed: dict[str, Any], row: tuple[int, ...], h: int, i: int, j: int
) -> bool:
    at = i + case.query_offset
    if case.is_causal and j > at:
        return False
    window = case.local_window_size
    left, right = window if isinstance(window, tuple) else (window, window)
    own, other = at, j
    if case.window_positions is not None:
        queries, keys = fixed["window_positions"]
        own, other = int(queries[row][i]), int(keys[row][j])
    if window is not None and not own - left <= other <= own + right:
        return False
    if "mask" in fixed:
        full = (*case.batch, case.heads, case.queries, case.key_length)
        if not np.broadcast_to(fixed["mask"], full)[row][h, i, j]:
            return False
    if "segment_ids" in fixed:
        ids = fixed["segment_ids"]
        queries, keys = ids if isinstance(ids, tuple) else (ids, ids)
        keys = keys[row] if keys.ndim > 1 or not row else keys
        return bool(queries[row][i] == keys[j])
    return True


def _bias(case: Case, floats, fixed, row: tuple[int, ...], h: int, i: int, j: int) -> float:
    bias = floats.get("bias")
    if case.bias == "array":
        return bias[h, i, j]
    if case.bias == "row":
        return bias[j]
    if case.bias == "function":
        distance = np.sin(0.3 * (i + case.query_offset - j))
        per_row = floats["phase"][row][j] * np.tanh(0.5 * fixed["rank"][row][j])
        return bias[h, 0] * distance + bias[h, 1] * per_row
    return 0.0


def _decay(case: Case, floats, row: tuple[int, ...], h: int, i: int, j: int) -> float:
    given = log_decay(floats)
    if given is None:
        return 0.0
    pair = given if isinstance(given, tuple) else (given, given)
    queries, keys = (
        np.broadcast_to(x, (*case.batch, x.shape[-2], case.heads))[row][..., h] for x in pair
    )
    return queries[i] - keys[j]
