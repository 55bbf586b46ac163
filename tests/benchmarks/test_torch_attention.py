"""PyTorch's ways compute what ours does: on a CPU, forward."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import torch_attention
from tape_jax import attention, rotary_state

SHAPE = 2, 3, 40, 8

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@needs_torch
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("way", ["three calls", "FlexAttention"])
def test_is_ours(way, is_causal, window):
    import torch

    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(3))
    e = np.asarray(rotary_state(jnp.asarray(rng.normal(size=SHAPE[:-1])), SHAPE[-1]))
    _, make, state = torch_attention.WAYS[way]
    if way == "three calls" and window is not None:
        with pytest.raises(NotImplementedError, match="window"):
            make(is_causal, window)
        return
    o, *states = make(is_causal, window)(*map(torch.tensor, (q, k, v)), *state(torch.tensor(e)))
    if way == "three calls":
        cos, sin = states
        states = [torch.cat([cos[..., :4], sin[..., 4:]], dim=-1)]
        np.testing.assert_array_equal(cos[..., :4], cos[..., 4:])
    turned = [jnp.swapaxes(jnp.asarray(x), 1, 2) for x in (q, k, v, e)]
    wanted = attention(
        *turned[:3], state=turned[3], is_causal=is_causal, local_window_size=window,
        implementation="reference",
    )  # fmt: skip
    for x, y in zip((o, *states), wanted, strict=True):
        np.testing.assert_allclose(x.numpy().swapaxes(1, 2), y, atol=2e-5)
