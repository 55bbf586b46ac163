"""Windows against hand counts, and their losses against whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, Transformer
from tape_jax.sharding import ShardingConfig
from tests.models import VOCAB, random_variables, small_model
from train.evaluation import window_losses
from train.evaluation.programs import Programs
from train.evaluation.window_losses import (
    TokenLosses,
    losses_and_places,
    windows,
    windows_of,
    with_window,
)


class TestWindows:
    @pytest.mark.parametrize(
        ("targets", "length", "stride", "starts", "first"),
        [
            (12, 4, 4, [0, 4, 8], [0, 0, 0]),
            (11, 4, 3, [0, 3, 6, 7], [0, 1, 1, 3]),
            (5, 5, 2, [0], [0]),
        ],
    )
    def test_every_target_once(self, targets, length, stride, starts, first):
        found = windows(targets, length, stride)
        np.testing.assert_array_equal(found, (starts, first))
        scored = [t for s, f in zip(*found, strict=True) for t in range(s + f, s + length)]
        assert sorted(scored) == list(range(targets))

    def test_several_texts(self):
        starts, first = windows_of([8, 4], 4, 2)
        np.testing.assert_array_equal(starts, [0, 2, 4, 9])
        np.testing.assert_array_equal(first, [0, 2, 2, 0])


class TestTokenLosses:
    @pytest.mark.slow
    def test_equals_whole_logits(self, monkeypatch):
        monkeypatch.setattr(window_losses, "CHUNK", 4)
        model = small_model("tape", num_layers=2, tie_embeddings=True)
        variables = random_variables(model, std=0.5)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 8)).astype(np.int32)
        logits = np.asarray(model.apply(variables, tokens[:, :-1]), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -np.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
        np.testing.assert_allclose(TokenLosses(model)(variables, tokens), expected, rtol=2e-5)

    @pytest.mark.slow
    def test_memory_is_linear_in_the_length(self):
        vocab, shape = 4000, {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
        model = Transformer(
            ModelConfig(vocab, position="tape", attention_implementation="chunked", **shape)
        )
        variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))

        def temporary(length):
            tokens = jax.ShapeDtypeStruct((1, length + 1), jnp.int32)
            compiled = jax.jit(TokenLosses(model)).lower(variables, tokens).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        short, long = temporary(4096), temporary(8192)
        assert long < 2.1 * short
        assert long < 8192 * vocab * 4 / 2, "the logits of all tokens are in memory at once"


def test_window_narrows_only():
    assert with_window(small_model("rope"), 5).config.local_window_size == 4
    assert with_window(small_model("rope", local_window_size=3), 5).config.local_window_size == 3
    windows_by_layer = with_window(small_model("rope+window/rope", num_layers=2), 5)
    assert windows_by_layer.config.local_window_size == 4
    sharding = ShardingConfig(fsdp=2).build(2)
    assert with_window(small_model("rope").clone(sharding=sharding), 5).sharding is sharding


def test_each_target_is_scored_in_its_own_window():
    model = small_model("rope", num_layers=1)
    variables = random_variables(model, std=0.5)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 11).astype(np.int32)
    starts, first = windows(10, 4, 3)
    done = []
    losses, places = losses_and_places(
        *(model, variables, tokens, starts, first, 4),
        batch_tokens=8,
        advance=done.append,
        programs=Programs(),
        name="losses",
    )
    np.testing.assert_array_equal(places[:-1], [0, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    begin = [0, 0, 0, 0, 3, 3, 3, 6, 6, 6]
    own_windows = np.stack([tokens[start : start + 5] for start in begin])
    expected = jax.jit(TokenLosses(model))(variables, own_windows)
    expected = expected[np.arange(10), np.arange(10) - begin]
    np.testing.assert_allclose(losses[:-1], expected, rtol=1e-5)
    assert done == [8, 12]
