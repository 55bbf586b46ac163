"""Recorded runs of the published language models, compared with this one.

Each file holds parameters, inputs and the reference's results. The parameters are mapped on to
this model.

Differences are divided by the largest value of the quantity where that exceeds 1. Gradients are
recorded in float32, so their tolerance is the same in both precisions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src import positions
from tape_jax._src.core.algebra import align_state, is_tensor_form
from tape_jax._src.core.checks import choose
from tape_jax._src.model.block import Block
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.inputs import Context
from tape_jax._src.model.parameters import full_name
from tape_jax._src.parity.deviations import TOLERANCE, Deviation, read_arrays, scaled_error
from tape_jax._src.positions.ablations import split_tables
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.positions.protocol import OfLayer, default_positions

Array = jax.Array
Weights = dict[str, Any]

GRADIENT_TOLERANCE = 3e-5


@dataclasses.dataclass(frozen=True)
class Variant:
    """The mapping of one variant of the reference on to this model.

    Attributes:
      encoding: the encoding, from the file's config.
      position: this model's position parameters of a layer, each computed from the file's through
        ``w(name)``.
      updates_only: whether those parameters exist only in layers that update the state.
    """

    encoding: Callable[[dict[str, Any]], positions.Encoding]
    position: dict[str, Callable[[Callable[[str], Array]], Array]] = dataclasses.field(
        default_factory=dict
    )
    updates_only: bool = True


def _scaling(config: dict[str, Any]) -> RopeScaling:
    scaling = config.get("rope_scaling")
    if not scaling:
        return RopeScaling()
    return RopeScaling(
        kind=scaling.get("type", "linear"),
        factor=config["rope_scaling_factor"],
        original_length=config["max_position_embeddings"],
    )


def _yarn(config: dict[str, Any]) -> positions.Encoding:
    """Makes the reference's YaRN: by the rounded-up ratio of lengths, not the configured factor."""
    original = config["original_max_position_embeddings"]
    factor = float(math.ceil(config["max_position_embeddings"] / original))
    scaling = RopeScaling(kind="yarn", factor=factor, original_length=original)
    return positions.Yarn(base=config["rope_base"], scaling=scaling)


def _tape(kind: type[positions.Tape] = positions.Tape, **options: Any):
    return lambda config: kind(
        base=config["rope_base"],
        scaling=_scaling(config),
        width=config.get("position_size"),
        **{"attention_mix": "head_scale", **options},
    )


def _rope(kind: type[positions.Rope] = positions.Rope, **options: Any):
    return lambda config: kind(base=config["rope_base"], scaling=_scaling(config), **options)


# The reference uses only the row sums of its heads x heads matrix.
_MIX = {"mix": lambda w: w("post_attention_linear.weight").sum(1)}
_MLP = {
    "wx": lambda w: w("pe.x_proj.weight").T,
    "up": lambda w: w("pe.up_proj.weight"),
    "down": lambda w: w("pe.down_proj.weight"),
}
_SEPARATE = {
    "mix": lambda w: jnp.stack([w(f"post_attention_linears.{i}.weight").sum(1) for i in (0, 1)]),
    "wx": lambda w: w("pe.x_proj.weight").T,
    "up": lambda w: jnp.stack([w(f"pe.up_projs.{i}.weight") for i in (0, 1)]),
    "down": lambda w: jnp.stack([w(f"pe.down_projs.{i}.weight") for i in (0, 1)]),
}
_FIRE = {
    "w1": lambda w: w("self_attn.rotary_emb.mlp.0.weight").T,
    "b1": lambda w: w("self_attn.rotary_emb.mlp.0.bias"),
    "w2": lambda w: w("self_attn.rotary_emb.mlp.2.weight").T,
    "b2": lambda w: w("self_attn.rotary_emb.mlp.2.bias"),
    "c": lambda w: w("self_attn.rotary_emb.c").reshape(()),
    "multiplier": lambda w: (
        w("self_attn.rotary_emb.L_multiplier") * w("self_attn.rotary_emb.init_L")
    ).reshape(()),
}
_T5 = {"table": lambda w: w("self_attn.relative_attention_bias.weight")}

VARIANTS: dict[str, Variant] = {
    "adape": Variant(_tape(), _MIX | _MLP),
    "adamlp": Variant(_tape(attention_mix="none"), _MLP),
    "adattention": Variant(_tape(mlp_mix=False), _MIX),
    "adatensor": Variant(_tape(positions.SeparateCosSin), _SEPARATE),
    "adavector": Variant(_tape(positions.MixHeadDim), _MIX | _MLP),
    "adawoeq": Variant(_tape(positions.NoEquivariance), _MIX | _MLP),
    "rope": Variant(_rope()),
    "xpos": Variant(_rope(positions.Xpos)),
    "yarn": Variant(_yarn),
    "randrope": Variant(
        lambda config: positions.RandomRope(
            base=config["rope_base"], range=2 * config["max_position_embeddings"], each_layer=True
        )
    ),
    "nope": Variant(lambda config: positions.Encoding()),
    "alibi": Variant(lambda config: positions.Alibi()),
    "fire": Variant(lambda config: positions.Fire(threshold=1.0), _FIRE, updates_only=False),
    "t5rb": Variant(
        lambda config: positions.T5Bias(
            buckets=config["relative_attention_num_buckets"],
            max_distance=config["relative_attention_max_distance"],
        ),
        _T5,
        updates_only=False,
    ),
    "sincos": Variant(lambda config: positions.Sinusoidal()),
}

# This model's parameters of a layer, by path, and the file's matrix that each is the transpose of.
_KERNELS = {
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
}


class Golden:
    """One recorded run: its arrays, and its sibling's (``X.npz`` and ``X_grad.npz``).

    Raises:
      ValueError: if the file is not one of this format.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.arrays = read_arrays(path)
        missing = {"config", "input_ids", "labels", "logits", "loss"} - set(self.arrays)
        if missing:
            raise ValueError(f"{path}: lacks {sorted(missing)}; is it a golden file?")
        self.config: dict[str, Any] = json.loads(str(self.arrays["config"]))
        choose(f"variant in {path}", self.config.get("variant"), VARIANTS)
        if self.config.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"{path}: hidden_act must be 'silu'; got {self.config['hidden_act']!r}"
            )

    @property
    def variant(self) -> Variant:
        """The mapping of the file's variant on to this model."""
        return VARIANTS[self.config["variant"]]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.config["num_hidden_layers"]

    def expected(self, name: str, precision: str) -> np.ndarray | None:
        """The recorded quantity, or None if the file lacks it in this precision."""
        return self.arrays.get(name if precision == "float32" else f"f64/{name}")

    def weights(self) -> dict[str, np.ndarray]:
        """All parameters by their names in the file."""
        return {
            name: value
            for name, value in self.arrays.items()
            if name.startswith(("model.", "lm_head."))
        }

    def model(self, precision: str) -> Transformer:
        """This library's model for the file."""
        c = self.config
        return Transformer(
            ModelConfig(
                vocab_size=c["vocab_size"],
                hidden_size=c["hidden_size"],
                num_layers=self.layers,
                num_heads=c["num_attention_heads"],
                head_dim=c["head_dim"],
                intermediate_size=c["intermediate_size"],
                norm_eps=c["rms_norm_eps"],
                position=self.variant.encoding(c),
                dtype=precision,
                param_dtype=precision,
                attention_implementation="reference",
            )
        )


def block_params(weights: Weights, variant: Variant, layer: int, *, position: bool) -> Weights:
    """This model's parameters of one block from the file's."""

    def w(name: str) -> Array:
        return weights[f"model.layers.{layer}.{name}"]

    params: Weights = {
        "attention_norm": {"scale": w("input_layernorm.weight")},
        "mlp_norm": {"scale": w("post_attention_layernorm.weight")},
    }
    for (module, name), source in _KERNELS.items():
        params.setdefault(module, {})[name] = {"kernel": w(f"{source}.weight").T}
    if position:
        params |= {full_name("position", name): make(w) for name, make in variant.position.items()}
    return params


def convert(weights: Weights, golden: Golden, model: Transformer) -> Weights:
    """Maps a file's parameters on to this model's; differentiable."""
    pad = golden.config["pad_token_id"] % golden.config["vocab_size"]
    table = weights["model.embed_tokens.weight"]
    is_pad = (jnp.arange(table.shape[0]) == pad)[:, None]
    params: Weights = {
        # The reference's embedding has no gradient in its padding row.
        "embedding": jnp.where(is_pad, jax.lax.stop_gradient(table), table),
        "final_norm": {"scale": weights["model.norm.weight"]},
        "head": {"kernel": weights["lm_head.weight"].T},
    }
    variant = golden.variant
    for blocks in model.blocks:
        position = blocks.like.updates or not variant.updates_only
        own = [block_params(weights, variant, i, position=position) for i in blocks.layers]
        params[blocks.name] = jax.tree.map(lambda *x: jnp.stack(x), *own)
    return params


def initial_state(golden: Golden, dtype: Any) -> Any:
    """The recorded random positions of every layer as a state; None for other variants."""
    if "random_positions" not in golden.arrays:
        return None
    c = golden.config
    draws = jnp.asarray(golden.arrays["random_positions"])
    tables = positions.rotary_state(draws, c["head_dim"], c["rope_base"], dtype=dtype)
    return tables, jnp.int32(0)


def tables(state: Array, keys: jax.ShapeDtypeStruct) -> tuple[np.ndarray, np.ndarray]:
    """A state of ``keys [B, T, H, D]`` as the reference's cos and sin, each ``[B, H, T, D]``."""
    if is_tensor_form(state, keys):
        cos, sin = split_tables(state)
    else:
        c, s = jnp.split(align_state(state), 2, axis=-1)
        cos, sin = jnp.concatenate([c, c], -1), jnp.concatenate([s, s], -1)

    def arrange(x: Array) -> np.ndarray:
        return np.asarray(jnp.broadcast_to(x, keys.shape).transpose(0, 2, 1, 3))

    return arrange(cos), arrange(sin)


def compare(golden: Golden, precision: str) -> Iterator[Deviation | str]:
    """Yields a comparison for each quantity, or a line of text for one that is not recorded."""
    with jax.enable_x64(precision == "float64"):
        yield from _compare(golden, precision)


def _compare(golden: Golden, precision: str) -> Iterator[Deviation | str]:
    model = golden.model(precision)
    weights = {name: jnp.asarray(value, precision) for name, value in golden.weights().items()}
    tokens = jnp.asarray(golden.arrays["input_ids"])
    labels = jnp.asarray(golden.arrays["labels"])[:, 1:]
    counted = labels != golden.config["pad_token_id"]
    places = default_positions(tokens.shape[1]) + (golden.config.get("shift") or 0)
    start = initial_state(golden, precision)
    evolves = golden.config["variant"].startswith("ada")

    def loss_fn(weights: Weights):
        params = convert(weights, golden, model)
        logits, states = model.apply(
            {"params": params}, tokens, positions=places, initial_state=start, return_states=True
        )
        log_p = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(log_p, jnp.where(counted, labels, 0)[..., None], -1)[..., 0]
        loss = -(picked * counted).sum() / counted.sum()
        extra = {}
        if evolves:
            extra["state"] = _leaving_state(golden, model, weights, states, places)
        if "logits_shift37" in golden.arrays:
            extra["moved"] = model.apply({"params": params}, tokens, positions=places + 37)
        return loss, (logits, states, extra)

    # One compilation: nearly all of the time goes into it.
    (loss, (logits, states, extra)), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
        weights
    )

    def check(quantity: str, pairs: dict[str, Any]):
        recorded = {
            name: (value, golden.expected(name, precision)) for name, value in pairs.items()
        }
        errors = {
            name: scaled_error(value, want)
            for name, (value, want) in recorded.items()
            if want is not None
        }
        if not errors:
            return f"{precision}  {quantity}: not recorded in this file"
        worst = max(errors, key=lambda name: errors[name])
        return Deviation(quantity, precision, errors[worst], worst, TOLERANCE[precision])

    yield check("logits", {"logits": logits})
    yield check("loss", {"loss": loss})
    hidden = {f"hidden_{i}": h for i, h in enumerate(states.hidden)}
    yield check("hidden states", hidden | {"final_norm": states.final_norm})
    if evolves:
        recorded: dict[str, Any] = {}
        c = golden.config
        shape = (*tokens.shape, c["num_attention_heads"], c["head_dim"])
        for i, state in enumerate([*states.position, extra["state"]]):
            cos, sin = tables(state, jax.ShapeDtypeStruct(shape, precision))
            recorded |= {f"cos_{i}": cos, f"sin_{i}": sin}
        yield check("position states", recorded)
    if "moved" in extra:
        yield check("logits, positions moved by 37", {"logits_shift37": extra["moved"]})
    yield _check_gradients(golden, precision, grads)


def _leaving_state(golden, model: Transformer, weights: Weights, states, places: Array) -> Any:
    """The state leaving the last layer, which the model itself never computes."""
    last = golden.layers - 1
    block = Block(model.config, OfLayer(model.encoding, None, True))
    params = block_params(weights, golden.variant, last, position=True)
    h = states.hidden[last]
    state = model.encoding.carry(states.position[last], h.shape[:-1], model.config.sizes)
    context = Context(places, None, None, 0, True)
    (_, state), _ = block.apply({"params": params}, (h, state), None, context, None)
    return state


def _check_gradients(golden: Golden, precision: str, grads: Weights) -> Deviation | str:
    recorded = {
        name.removeprefix("grad/"): value
        for name, value in golden.arrays.items()
        if name.startswith("grad/")
    }
    if not recorded:
        return f"{precision}  gradients: not recorded in this file"
    unused = set(golden.config.get("unused_params", ()))
    compared = {name: value for name, value in recorded.items() if name not in unused}
    unknown = sorted(set(compared) - set(grads))
    if unknown:
        raise ValueError(f"{golden.path}: gradients of parameters that are not there: {unknown}")
    errors = {name: scaled_error(grads[name], want) for name, want in compared.items()}
    worst = max(errors, key=lambda name: errors[name])
    return Deviation(
        f"gradients ({len(errors)})", precision, errors[worst], worst, GRADIENT_TOLERANCE
    )
