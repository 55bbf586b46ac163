"""The compiled training step: the state, the optimiser, the loss and one update.

Names of arrays end in their axes: B examples, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tape_jax import Transformer
from tape_jax.adapt import merge
from tape_jax.losses import CHUNK_LOGITS, added_by_encoding, added_by_routers, cross_entropy
from train.checks import require
from train.experiment import USUALLY_NOT_DECAYED, Experiment, TrainConfig
from train.training import runs

Array = jax.Array
Batch = dict[str, Array]

# The decay of the running mean of gradient norms, and the weight from which it is trusted, that of
# about 20 steps.
MEMORY, KNOWN = 0.99, 0.2
# By platform. XLA's fusion of kernels with slices runs a kernel of a scanned layer twice: once for
# the layer, once to write what the backward pass keeps.
COMPILER_OPTIONS = {"gpu": {"xla_gpu_enable_dynamic_slice_fusion": False}}
# What :func:`tape_jax.losses.added_by_routers` reports.
ROUTER_LOSSES = ("balance_loss", "z_loss")


class TrainState(NamedTuple):
    """Everything that a step changes, and the random key.

    Attributes:
      params: those that train; if a base is adapted, with None in place of the others.
      opt_state: of the optimiser.
      step: optimiser steps taken, int32.
      key: raw random key, uint32; each step folds its number into it.
      usual_norm: mean norm of the gradients so far, exponentially weighted, and the sum of its
        weights; None unless ``train.spike`` is given.
    """

    params: Any
    opt_state: Any
    step: Array
    key: Array
    usual_norm: tuple[Array, Array] | None = None


def init_state(
    experiment: Experiment,
    optimizer: optax.GradientTransformation,
    params: Any = None,
    seed: Array | None = None,
) -> TrainState:
    """Builds the initial state; trace it with ``jax.jit``.

    Args:
      experiment: what is trained.
      optimizer: of :func:`make_optimizer`.
      params: to start from, with None in place of what does not train; None: random ones.
      seed: raw random key that replaces the experiment's, so that all seeds share a program.
    """
    if params is None:
        params = runs.init_variables(experiment, seed)["params"]
    key = jax.random.key_data(jax.random.fold_in(runs.first_key(experiment, seed), 1))
    usual = None if experiment.train.spike is None else (jnp.float32(0), jnp.float32(0))
    return TrainState(params, optimizer.init(params), jnp.int32(0), key, usual)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Builds clipping and AdamW with the schedule of ``config``."""
    adamw = optax.adamw(
        config.learning_rates,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        mu_dtype=config.moment_dtype,
        weight_decay=config.weight_decay,
        mask=lambda params: decay_mask(params, config.no_decay),
    )
    if config.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def decay_mask(params: Any, no_decay: tuple[str, ...]) -> Any:
    """Returns for each parameter whether weight decay applies.

    Args:
      params: pytree of parameters.
      no_decay: whole path components of the parameters it does not apply to.

    Raises:
      ValueError: for an entry that matches nothing, unless it is one of the usual ones.
    """
    paths = [
        {str(getattr(entry, "key", entry)) for entry in path}
        for path, _ in jax.tree.leaves_with_path(params)
    ]
    for name in set(no_decay) - set(USUALLY_NOT_DECAYED):
        require(
            any(name in path for path in paths),
            f"train.no_decay: no parameter's path has the component {name!r}; components: "
            f"{', '.join(sorted(set().union(*paths)))}",
        )
    mask = [path.isdisjoint(no_decay) for path in paths]
    return jax.tree.unflatten(jax.tree.structure(params), mask)


def make_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    places: Any = None,
) -> jax.stages.Wrapped:
    """Makes a compiled optimiser step ``(state, batch, frozen=None)``, which donates its state.

    ``frozen`` holds the parameters that do not train (see :class:`train.training.runs.Start`), or
    is None. They are neither differentiated nor copied. The batch is computed in
    ``config.accumulate`` parts, one after another. Their gradients are summed in at least float32.
    The result is that of the whole batch, except that routers of experts balance each part
    separately. If the logits of a part would be large, they are computed in chunks
    (:func:`tape_jax.losses.cross_entropy`). The reported ``loss`` leaves out the routers' losses
    (see :func:`tape_jax.losses.added_by_routers`). On a GPU the step sets compiler options, so you
    cannot trace it as a part of another program there.

    Args:
      model: to train.
      optimizer: of :func:`make_optimizer`.
      config: how to train.
      places: a :class:`TrainState` of shardings (:meth:`Sharding.of` its shapes), or None.
    """

    def step(
        state: TrainState, batch: Batch, frozen: Any = None
    ) -> tuple[TrainState, dict[str, Array]]:
        losses, grads = gradients(model, config, state, batch, frozen, places)
        before = state.opt_state
        if config.skip:
            # The optimiser does not count skipped steps, but the schedule ends with the training.
            before = optax.tree.set(before, _is_of_schedule, count=state.step)
        updates, opt_state = optimizer.update(grads, before, state.params)
        norm = optax.tree.norm(grads)
        metrics = {
            **losses,
            "gradient_norm": norm,
            "learning_rate": config.learning_rates(state.step),
        }
        params = optax.apply_updates(state.params, updates)
        new = TrainState(params, opt_state, state.step + 1, state.key, state.usual_norm)
        if config.skip:
            bad = is_bad(losses["loss"], norm, state.usual_norm, config.spike)
            metrics["skipped"] = bad
            if state.usual_norm is not None:
                new = new._replace(usual_norm=add_to_mean(state.usual_norm, norm))
            kept = jax.tree.map(lambda a, b: jnp.where(bad, a, b), state, new)
            new = kept._replace(step=new.step)
        return new, metrics

    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=None if places is None else (places, None),
        compiler_options=COMPILER_OPTIONS.get(jax.default_backend()),
    )


def _is_of_schedule(path: Sequence[Any], _: Any) -> bool:
    """Returns whether a part of an optimiser's state belongs to its learning rates."""
    return getattr(path[-1], "tuple_name", None) == "ScaleByScheduleState"


def gradients(
    model: Transformer,
    config: TrainConfig,
    state: TrainState,
    batch: Batch,
    frozen: Any = None,
    places: Any = None,
) -> tuple[dict[str, Array], Any]:
    """Returns the reported losses of a batch, and the gradient of the minimised loss.

    Args:
      model: to train.
      config: how to train.
      state: before the step.
      batch: of the task.
      frozen: the parameters that do not train, or None.
      places: a :class:`TrainState` of shardings, or None.
    """
    step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    keys = jax.random.split(step_key, config.accumulate)
    weight = jnp.maximum(batch["weights"].sum(), 1e-9)
    share = weight / config.accumulate

    def loss_of(params: Any, part: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        variables = {"params": params if frozen is None else merge(params, frozen)}
        return part_loss(model, variables, part, key, share)

    def add(sums: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
        (_, losses), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, *part)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (losses, grads)), None

    def rows(x: Array) -> Array:
        # Every part takes rows from all devices, so that no device must send rows away.
        return jnp.moveaxis(x.reshape(-1, config.accumulate, *x.shape[1:]), 1, 0)

    def added_loss(params: Any) -> Array | None:
        if not hasattr(model, "encoding"):
            return None
        return added_by_encoding(model, params, state.step / config.steps)

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), state.params
    )
    if places is not None:
        zeros = jax.lax.with_sharding_constraint(zeros, places.params)
    names = ("loss", *(ROUTER_LOSSES if model.config.experts else ()))
    start = dict.fromkeys(names, jnp.float32(0)), zeros
    (losses, grads), _ = jax.lax.scan(add, start, (jax.tree.map(rows, batch), keys))
    losses, grads = jax.tree.map(lambda x: x / weight, (losses, grads))
    if added_loss(state.params) is not None:
        slopes = jax.grad(added_loss)(state.params)
        grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, slopes)
    return losses, grads


def part_loss(
    model: Transformer, variables: Any, part: Batch, key: Array, share: Array
) -> tuple[Array, dict[str, Array]]:
    """Returns the loss to minimise on a part of a batch, and the losses that are reported.

    Args:
      model: to train.
      variables: of the model.
      part: some rows of a batch.
      key: random key for positions that are drawn.
      share: the part's weight, which multiplies the routers' losses.
    """
    experts, encoding = model.config.experts, model.config.position
    positions = part.get("positions")
    if positions is not None and encoding.counts_text:
        positions = jnp.stack([positions] * encoding.coordinate_axes, axis=-1)
    whole = part["targets"].size * model.config.vocab_size <= CHUNK_LOGITS
    result: Any = model.apply(
        variables,
        part["inputs"],
        positions=positions,
        segment_ids=part.get("segment_ids"),
        rngs={"positions": key},
        output="logits" if whole else "hidden",
        mutable=["losses"] if experts else False,
    )
    out, sown = result if experts else (result, None)
    wanted = part["targets"], part["weights"]
    if whole:
        loss = weighted_loss(out, *wanted)
    else:
        kernel = model.output_kernel(variables)
        softcap = model.config.final_logit_softcap
        loss = cross_entropy(out, kernel, *wanted, logit_softcap=softcap, sharding=model.sharding)
    if experts is None:
        return loss, {"loss": loss}
    added, means = added_by_routers(sown, experts)
    return loss + share * added, {"loss": loss} | {k: share * x for k, x in means.items()}


def is_bad(
    loss: Array, norm: Array, usual_norm: tuple[Array, Array] | None, spike: float | None
) -> Array:
    """Returns whether to skip a step: see ``train.skip`` and ``train.spike``."""
    bad = ~(jnp.isfinite(loss) & jnp.isfinite(norm))
    if usual_norm is None or spike is None:
        return bad
    total, weight = usual_norm
    # The mean of fewer than a few tens of steps says little.
    return bad | ((weight > KNOWN) & (norm * weight > spike * total))


def add_to_mean(mean: tuple[Array, Array], x: Array) -> tuple[Array, Array]:
    """Adds one number to an exponentially weighted sum and the sum of its weights."""
    total, weight = mean
    return MEMORY * total + (1 - MEMORY) * x, MEMORY * weight + (1 - MEMORY)


def weighted_loss(logits_BxTxV: Array, targets_BxT: Array, weights_BxT: Array) -> Array:
    """Cross entropy in nats, weighted and summed, in float32."""
    log_p_BxTxV = jax.nn.log_softmax(logits_BxTxV.astype(jnp.float32))
    log_p_BxT = jnp.take_along_axis(log_p_BxTxV, targets_BxT[..., None], axis=-1)[..., 0]
    return -(log_p_BxT * weights_BxT).sum()


@jax.jit
def all_finite(tree: Any) -> Array:
    """Returns whether every floating-point number of a pytree is finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))
