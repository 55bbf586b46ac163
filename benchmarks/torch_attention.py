"""PyTorch's kernels for what our attention computes, to measure them beside it.

``scaled_dot_product_attention`` and FlashAttention take values as wide as keys, so they run three
times: over values, cosines and sines. The published code does so too; its state is these two with
duplicated halves. FlexAttention takes values of any width, and runs once, over ``[v | e]``, a state
of cosines beside sines. Keys and queries are rotated beforehand.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from tape_jax._src.attention.tuning.measure import DIRECTIONS
from train.training.flops import STATE, THREE_CALLS, Products

# ``way(q, k, v, *state)`` maps arrays [B, H, T, D] of PyTorch to outputs of values and of the
# state's arrays. A function makes it for a causal rule and a window.
Way = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class TorchRow:
    """One of PyTorch's ways to compute attention.

    Attributes:
      products: that it needs.
      calls: by direction; the result of each has ``block_until_ready``.
    """

    products: Products
    calls: dict[str, Callable[[], Any]]


def three_calls(attend: Callable[[Any, Any, Any], Any]) -> Way:
    """Returns a way that calls ``attend`` three times, for a state of cosines and sines."""

    def way(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return tuple(attend(q, k, x) for x in (v, cos, sin))

    return way


def scaled_dot_product(is_causal: bool, window: int | None) -> Way:
    """Returns the way of ``torch.nn.functional.scaled_dot_product_attention``.

    Raises:
      NotImplementedError: for a window.
    """
    import torch

    if window is not None:
        raise NotImplementedError("has no window")
    attend = torch.nn.functional.scaled_dot_product_attention
    return three_calls(functools.partial(attend, is_causal=is_causal))


def flash(is_causal: bool, window: int | None) -> Way:
    """Returns the way of the package flash-attn.

    Raises:
      NotImplementedError: if it is not installed.
    """
    if importlib.util.find_spec("flash_attn") is None:
        raise NotImplementedError("flash-attn is not installed")
    from flash_attn import flash_attn_func

    sides = (-1, -1) if window is None else (window, window)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, causal=is_causal, window_size=sides).transpose(1, 2)

    return three_calls(attend)


def flex(is_causal: bool, window: int | None) -> Way:
    """Returns the way of ``torch.nn.attention.flex_attention``, which is compiled on a GPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = query >= key if is_causal else query == query
        return seen if window is None else seen & ((query - key).abs() <= window)

    # Made once, as a model would.
    mask_of = functools.cache(lambda *sizes: create_block_mask(sees, None, None, *sizes))
    compiled = torch.compile(flex_attention)

    def way(q: Any, k: Any, v: Any, e: Any) -> tuple[Any, Any]:
        q, k = (rotated(x, *duplicated(e)) for x in (q, k))
        mask = mask_of(q.shape[2], k.shape[2], q.device)
        attend = compiled if q.device.type == "cuda" else flex_attention
        found = attend(q, k, torch.cat([v, e], dim=-1), block_mask=mask)
        return tuple(found.split([v.shape[-1], e.shape[-1]], dim=-1))

    return way


def duplicated(e: Any) -> tuple[Any, Any]:
    """Cosines and sines of a rotary state ``[..., D]``, each twice: ``[..., D]``."""
    import torch

    cos, sin = e.chunk(2, dim=-1)
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """``x [..., D]``, turned by cosines and sines of that shape."""
    import torch

    real, imag = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-imag, real], dim=-1) * sin


# What each needs, and how to make it and its state from cosines beside sines.
WAYS: dict[str, tuple[Products, Callable[[bool, int | None], Way], Callable[[Any], Any]]] = {
    "three calls": (THREE_CALLS, scaled_dot_product, duplicated),
    "FlashAttention, three calls": (THREE_CALLS, flash, duplicated),
    "FlexAttention": (STATE, flex, lambda e: (e,)),
}


class _Launched:
    """Work on the GPU, awaited as :func:`jax.block_until_ready` awaits arrays."""

    def block_until_ready(self) -> None:
        import torch

        torch.cuda.synchronize()


def rows(
    shape: tuple[int, int, int, int], dtype: str, *, is_causal: bool, window: int | None
) -> tuple[dict[str, TorchRow], dict[str, str]]:
    """Returns the rows for the GPU that PyTorch sees, and the reasons why others are missing.

    Args:
      shape: ``[B, H, T, D]`` of queries, keys, values and states.
      dtype: of all of them.
      is_causal: whether keys behind a query are hidden from it.
      window: keys before and behind a query that it sees; None: all.

    Returns:
      Nothing without a PyTorch that sees a GPU.
    """
    if importlib.util.find_spec("torch") is None:
        return {}, {}
    import torch

    if not torch.cuda.is_available():
        return {}, {}
    make = {"device": "cuda", "dtype": getattr(torch, dtype)}
    q, k, v, e = (torch.randn(shape, **make) for _ in range(4))
    found, skipped = {}, {}
    for way, (products, make_way, state) in WAYS.items():
        name = f"PyTorch {torch.__version__}, {way}"
        try:
            inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, *state(e))]
            calls = _calls(make_way(is_causal, window), inputs)
            for call in calls.values():
                call().block_until_ready()
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        else:
            found[name] = TorchRow(products, calls)
    return found, skipped


def _calls(forward: Way, inputs: list[Any]) -> dict[str, Callable[[], Any]]:
    import torch

    # Outputs have the shapes of values and of the arrays of the state.
    cotangents = [torch.randn_like(x) for x in inputs[2:]]

    def alone() -> _Launched:
        with torch.no_grad():
            forward(*inputs)
        return _Launched()

    def both() -> _Launched:
        torch.autograd.grad(forward(*inputs), inputs, cotangents)
        return _Launched()

    return dict(zip(DIRECTIONS, (alone, both), strict=True))
