"""Sharding: logical axes, rules that map them to mesh axes, and meshes.

The model names the axes of its parameters and activations. Ordered rules say which of them are
split over which axes of a device mesh; a config can hold the rules as plain data:

| mesh axis | what it splits |
|---|---|
| ``data`` | the batch; parameters are copied |
| ``fsdp`` | the batch, and the parameters, which are gathered where they are used |
| ``sequence`` | time: keys, values and position states travel around a ring |
| ``tensor`` | heads, the width of the MLP or of each expert, and the vocabulary |

>>> sharding = ShardingConfig(fsdp=-1).build()
>>> model = Transformer(config, sharding=sharding)
>>> sharding.check(model, batch_size=8, length=1024)
>>> init = functools.partial(model.init, tokens=tokens)
>>> shardings = sharding.of(model, jax.eval_shape(init, key))
>>> variables = jax.jit(init, out_shardings=shardings)(key)
>>> logits = jax.jit(model.apply)(variables, sharding.place(tokens))
"""

from tape_jax._src.core.sharding import (
    MESH_AXES,
    PRESETS,
    RULES,
    ParameterSpec,
    Sharding,
    ShardingConfig,
    constrain,
    preset,
)

__all__ = [
    "MESH_AXES",
    "PRESETS",
    "RULES",
    "ParameterSpec",
    "Sharding",
    "ShardingConfig",
    "constrain",
    "preset",
]
