"""One update of the position states, by one of several implementations.

All compute the same as :func:`reference`. An implementation takes an :class:`UpdateCall` and
returns the new state, or raises NotImplementedError with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.core import devices
from tape_jax._src.core.algebra import (
    align_state,
    at_least_float32,
    check_state,
    is_tensor_form,
    precise_einsum,
)
from tape_jax._src.core.checks import choose, concrete, positive, refuse, require, typed
from tape_jax._src.core.explicit import automatic_inside, joined, names_of
from tape_jax._src.core.sharding import Sharding
from tape_jax._src.positions.tape.mixing import (
    ACTIVATIONS,
    SUM_OVER_DEVICES,
    Product,
    by_rows,
    displacement,
    mix_attended,
    mix_heads,
    mixing_matrix,
    outer_matrix,
    precise_product,
    scaled_mix,
    sum_of_products,
)
from tape_jax._src.positions.tape.norms import NORMS, normalize

Array = jax.Array

UPDATE_PARAMS = ("mix", "origin", "target", "wx", "up", "down")
# Parameters that multiply attended states.
OF_ATTENDED = ("mix", "origin", "target")


@dataclasses.dataclass(frozen=True)
class UpdateCall:
    """The checked arguments of one call of :func:`tape_jax.update_state`.

    Attributes:
      params: as in that function.
      e: the state, ``[..., T, H_kv | 1, D]`` or ``[..., T, H_kv | 1, M, L, R]``, batch axes full, 1
        or absent.
      a: the attended state, with query heads; None if it is not mixed in.
      x: the MLP's output.
      alpha: step size.
      heads: ``H_kv``.
      tensor: whether the state has tensor form.
      norm, magnitude, activation, sharding: as in :func:`tape_jax.update_state`.
      product: how a matrix over heads is multiplied with states.
    """

    params: dict[str, Array]
    e: Array
    a: Array | None
    x: Array
    alpha: float | Array
    heads: int
    tensor: bool
    norm: str
    magnitude: Any
    activation: str
    sharding: Sharding | None
    product: Product = precise_product

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of the axes that the update does not act on: ``[D]`` or ``[M, L, R]``."""
        return self.e.shape[-3:] if self.tensor else self.e.shape[-1:]

    @property
    def splits_heads(self) -> bool:
        """True if heads are split over devices."""
        split = () if self.sharding is None else ("heads", "kv_heads")
        return any(self.sharding.shards(axis) > 1 for axis in split)  # type: ignore[union-attr]

    def flat_state(self) -> Array:
        """``e`` as ``[..., T, H_kv | 1, N]``."""
        return self._flat(self.e)

    def flat_attended(self) -> Array:
        """``a`` as ``[..., T, H_q, N]``, in the type of the state."""
        assert self.a is not None
        return self._flat(self.a.astype(self.e.dtype))

    def full_state(self) -> Array:
        """``e`` as ``[..., T, H_kv, N]`` with all batch axes."""
        shape = (*self.x.shape[:-1], self.heads, math.prod(self.block))
        return jnp.broadcast_to(self.flat_state(), shape)

    def normalized(self, flat: Array) -> Array:
        """Returns the new state: ``flat [..., T, H_kv | 1, N]`` after the norm."""
        lead = jnp.broadcast_shapes(flat.shape[:-2], self.x.shape[:-1])
        flat = jnp.broadcast_to(flat, (*lead, self.heads, flat.shape[-1]))
        state = flat.reshape(*flat.shape[:-1], *self.block)
        state = normalize(state, self.norm, self.magnitude, tensor=self.tensor)
        return state.astype(self.e.dtype)

    def _flat(self, x: Array) -> Array:
        return x.reshape(*x.shape[: x.ndim - len(self.block)], math.prod(self.block))


def _explicit_axes(given: Mapping[str, Any], shape: Any) -> tuple[Any, ...]:
    """Returns the mesh axes of the new state on a mesh with explicit axes."""
    state, attended = given.get("state"), given.get("attended")
    lead = names_of(given["x"])[:-1]
    of_state, of_a = names_of(state, shape.ndim), names_of(attended, shape.ndim)
    heads, alike = len(lead), [of_state]
    if getattr(attended, "shape", ())[heads : heads + 1] == shape.shape[heads : heads + 1]:
        alike.append(of_a)
    shared = zip(lead, of_state[:heads], of_a[:heads], strict=True)
    batch = [joined("a batch axis of state, attended and x", *names) for names in shared]
    return (
        *batch,
        joined("the axis of heads of state and attended", *(names[heads] for names in alike)),
        *of_state[heads + 1 :],
    )


@typed
@automatic_inside(_explicit_axes)
def update_state(
    params: Mapping[str, Array],
    state: Any,
    attended: Array | None,
    x: Array,
    alpha: float | Array = 1.0,
    *,
    norm: str = "none",
    magnitude: float | Array = 1.0,
    activation: str = "silu",
    num_kv_heads: int | None = None,
    sharding: Sharding | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """One layer's update of the position states (TAPE, equations 6 to 8).

    Computes ``(I + alpha G(x)) (e + alpha Mix(a))``, then the norm. ``G(x)`` is first contracted to
    a heads x heads matrix per token, which costs a fraction of projecting the states up to width
    ``P``.

    With ``origin`` and ``target``, matrices over heads, the sum ``z = e + alpha Mix(a)`` becomes
    ``z + alpha z conj(w) u`` with ``w = origin a`` and ``u = target a``, in tensor form ``Z + alpha
    Z W^T U``. The product lies relative to ``u`` as ``z`` lies to ``w``. If all states are rotated
    alike, ``Z W^T`` stays as it is, so the product rotates as ``U`` does.

    Args:
      params: from :func:`tape_jax.init_update`; absent entries leave their part out.
      state: ``e``, ``[T, D]`` or ``[batch..., T, H_kv | 1, D]``, in tensor form ``[T, 1, M, L, R]``
        or ``[batch..., T, H_kv | 1, M, L, R]``; batch axes may be 1.
      attended: ``a``, with query heads ``H_q`` and the rest as ``state``; may be None if ``params``
        has neither ``mix`` nor ``origin``.
      x: the MLP's output before its residual addition ``[..., T, hidden]``.
      alpha: step size, a number, a scalar array or one for each state head ``[H_kv]``.
      norm: ``none``; ``rms``, which divides by the root mean square over the blocks of a head;
        ``unit``, which takes each block's polar factor.
      magnitude: scale of the start state (YaRN's), which the norms restore.
      activation: one of ``silu``, ``gelu``, ``relu``, ``tanh``, ``identity``.
      num_kv_heads: state heads, if neither ``state`` nor ``params`` determines them.
      sharding: a mesh and rules; if they split heads, sums over heads are one reduce-scatter.
      implementation: a name, or names in order of preference. ``reference``: the equations as
        written, with derivatives of any order. ``unrolled``, for CPUs: products over heads written
        out, with a custom derivative that keeps only the arguments. ``sums``, for TPUs: as
        ``reference``, with no product over heads on a matrix unit. ``fused``, for NVIDIA GPUs from
        Ampere on: one kernel each way. None: ``unrolled`` on a CPU, ``fused`` on a GPU, ``sums`` on
        a TPU, and ``reference`` if those cannot do the call.

    Only ``reference`` and ``sums`` have derivatives in forward mode, but ``unrolled`` has those of
    gradients, as in ``jax.hessian``. ``fused`` has only first derivatives in reverse mode.

    Returns:
      The new state, ``[..., T, H_kv, D]`` or ``[..., T, H_kv, M, L, R]``, in the type of ``state``.
      On a mesh with explicit axes, batch and time are split as in ``x``, heads as in ``state`` (or
      in ``attended``, if it has as many).

    Raises:
      ValueError: if shapes disagree or an option is unknown.
      NotImplementedError: if no named implementation can do the call here.
    """
    for name in params:
        choose("parameter of an update", name, UPDATE_PARAMS)
    choose("norm", norm, NORMS)
    choose("activation", activation, ACTIVATIONS)
    names = implementation_names(implementation)
    positive("num_kv_heads", num_kv_heads, optional=True)
    _check_types(params, state, attended, x, alpha)
    tensor, heads = _check_update(state, attended, x, params, num_kv_heads)
    require(
        jnp.shape(alpha) in ((), (heads,)),
        f"alpha must be a number, or one for each of the {heads} state heads; got shape "
        f"{jnp.shape(alpha)}",
    )
    require(
        jnp.shape(magnitude) == (),
        f"magnitude must be a number; got an array of shape {jnp.shape(magnitude)}",
    )
    e = state if tensor else align_state(state)
    call = UpdateCall(
        params=dict(params),
        e=e,
        a=attended if any(name in params for name in OF_ATTENDED) else None,
        x=x,
        alpha=alpha,
        heads=heads,
        tensor=tensor,
        norm=norm,
        magnitude=magnitude,
        activation=activation,
        sharding=sharding,
    )
    if names is None:
        names = (*USUAL.get(jax.default_backend(), ()), "reference")
    refused = []
    for name in names:
        try:
            return UPDATES[name](call)
        except NotImplementedError as error:
            refused.append((name, error))
    reasons = "; ".join(f"update implementation {name!r}: {why}" for name, why in refused)
    raise NotImplementedError(reasons) from refused[-1][1]


def _displaced(call: UpdateCall) -> UpdateCall:
    """Mixes in attended states, moves the state by them, and returns the remaining update.

    If nothing moves the state, this is the whole update.
    """
    if "origin" not in call.params:
        return call
    a = call.flat_attended()
    matrices = {name: call.params[name].astype(a.dtype) for name in ("origin", "target")}
    matrices["target"] = scaled_mix(matrices["target"], call.alpha)
    mixed = (mix_attended(a, x, call.heads, call.sharding, call.product) for x in matrices.values())
    z = _with_attended(call)
    z = jnp.broadcast_to(z, (*a.shape[:-2], call.heads, z.shape[-1]))
    z, w, u = (
        x.reshape(*x.shape[:-1], *call.block).astype(at_least_float32(x.dtype)) for x in (z, *mixed)
    )
    z = z + displacement(z, w, u, tensor=call.tensor)
    params = {name: x for name, x in call.params.items() if name not in OF_ATTENDED}
    return dataclasses.replace(call, params=params, e=z.astype(call.e.dtype), a=None)


def _with_attended(call: UpdateCall) -> Array:
    """``e + alpha Mix(a)``, flat."""
    mix, flat = call.params.get("mix"), call.flat_state()
    if mix is None:
        return flat
    scaled = scaled_mix(mix.astype(flat.dtype), call.alpha)
    return flat + mix_attended(
        call.flat_attended(), scaled, call.heads, call.sharding, call.product
    )


def reference(call: UpdateCall) -> Array:
    """Computes the update as its equations are written.

    The backward pass keeps only the arguments and any sums over heads that devices add up, so that
    none is sent twice. Under ``jax.checkpoint`` its policy decides.
    """
    call = _displaced(call)

    @functools.partial(
        jax.checkpoint,
        prevent_cse=False,
        policy=jax.checkpoint_policies.save_only_these_names(SUM_OVER_DEVICES),
    )
    def update(params: dict[str, Array], e: Array, a: Array | None, x: Array) -> Array:
        return _written(dataclasses.replace(call, params=params, e=e, a=a, x=x))

    return update(call.params, call.e, call.a, call.x)


def _written(call: UpdateCall) -> Array:
    up, flat = call.params.get("up"), _with_attended(call)
    dtype = flat.dtype
    if up is not None:
        # With the identity in the matrix the states are read once, and not again for a sum.
        matrix = mixing_matrix(
            call.x, call.params, call.alpha, call.activation, dtype=at_least_float32(dtype)
        )
        matrix = (matrix + jnp.eye(call.heads, dtype=matrix.dtype)).astype(dtype)
        if call.splits_heads and flat.shape[-2] > 1:
            # Devices split states as they split tokens, so all batch axes must be full.
            flat = jnp.broadcast_to(flat, (*call.x.shape[:-1], *flat.shape[-2:]))
        flat = mix_heads(matrix, flat, call.sharding, call.product)
    return call.normalized(flat)


def sums(call: UpdateCall) -> Array:
    """Computes the update for TPUs: as the equations, with no product over heads on a matrix unit.

    Raises:
      NotImplementedError: if state heads are split. Sums over devices need a product's layout on
        TPUs, or they send twice as much.
    """
    split = call.sharding is not None and call.sharding.shards("kv_heads") > 1
    refuse(split, "state heads are split over devices")
    return reference(dataclasses.replace(call, product=sum_of_products))


# Written-out code grows with the number of heads, until a library's product pays off.
MOST_HEADS = 32


def unrolled(call: UpdateCall) -> Array:
    """Computes the update for CPUs: products over heads written out, with a custom derivative.

    A product over 12 heads is too small for the matrix products of a CPU's libraries: written out,
    it becomes one loop over the numbers of the states, which includes the sum ``e + alpha Mix(a)``.
    The backward pass keeps only the arguments.

    Raises:
      NotImplementedError: if nothing would be gained.
    """
    call = _displaced(call)
    params = call.params
    refuse("up" not in params, "without the MLP's mix there is no product over heads")
    refuse(call.splits_heads, "heads are split over devices")
    refuse(call.heads > MOST_HEADS, f"heads are at most {MOST_HEADS}; got {call.heads}")
    refuse(
        call.e.shape[-len(call.block) - 1] < call.heads and "mix" not in params,
        "a state that all heads share is multiplied by one number a head",
    )
    gate, down, up, mix = _factors(call)
    a = None if mix is None else call.flat_attended()
    return call.normalized(_written_out(gate, down, up, mix, call.full_state(), a))


def _factors(call: UpdateCall) -> tuple[Array, Array, Array, Array | None]:
    """Gate ``[..., T, P]``, ``alpha down``, ``up``, ``alpha Mix`` or None; at least float32."""
    params, wide = call.params, at_least_float32(call.e.dtype)
    gate = ACTIVATIONS[call.activation](call.x @ params["wx"].astype(call.x.dtype)).astype(wide)
    down = (params["down"].astype(wide) * by_rows(call.alpha)).astype(wide)
    mix = params.get("mix")
    if mix is not None:
        mix = scaled_mix(mix.astype(call.e.dtype), call.alpha).astype(wide)
    return gate, down, params["up"].astype(wide), mix


def _updated(
    gate: Array, down: Array, up: Array, mix: Array | None, e: Array, a: Array | None
) -> Array:
    """``(I + A) (e + Mix(a))`` of ``e [..., T, H, N]``; ``down`` and ``mix`` hold step sizes."""
    return _product(_matrix(gate, down, up), _sum(e, mix, a)).astype(e.dtype)


def _written_out_forward(*args: Any) -> tuple[Array, tuple[Array | None, ...]]:
    # Calling _written_out instead would leave no derivative in forward mode over this one.
    return _updated(*args), args


def _written_out_backward(args: tuple[Array | None, ...], d_out: Array) -> tuple[Array | None, ...]:
    gate, down, up, mix, e, a = args
    assert e is not None
    matrix, pull_matrix = jax.vjp(_matrix, gate, down, up)
    total, pull_sum = jax.vjp(_sum, e, mix, a)
    d_out = d_out.astype(total.dtype)
    d_total = _product(jnp.swapaxes(matrix, -1, -2), d_out)
    d_matrix = precise_einsum("...hn,...kn->...hk", d_out, total)
    d_e, d_mix, d_a = pull_sum(d_total)
    return *pull_matrix(d_matrix), d_mix, d_e, d_a


_written_out = jax.custom_vjp(_updated)
_written_out.defvjp(_written_out_forward, _written_out_backward)


def _matrix(gate: Array, down: Array, up: Array) -> Array:
    """``I + A``, ``[..., T, H, H]``."""
    return outer_matrix(gate, down, up) + jnp.eye(up.shape[-1], dtype=gate.dtype)


def _sum(e: Array, mix: Array | None, a: Array | None) -> Array:
    """``e + Mix(a)`` in at least float32."""
    e = e.astype(at_least_float32(e.dtype))
    if mix is None or a is None:
        return e
    return e + mix_attended(a.astype(e.dtype), mix, e.shape[-2])


def _product(matrix: Array, states: Array) -> Array:
    """``matrix @ states``, head by head."""
    columns = (matrix[..., k, None] * states[..., k, None, :] for k in range(matrix.shape[-1]))
    return functools.reduce(jnp.add, columns)


# Tiles of more heads, or wider heads, do not fit the registers of a warp.
MOST_FUSED_HEADS = 32
MOST_FUSED_WIDTH = 128


def fused(call: UpdateCall, *, interpret: bool = False, **sizes: int) -> Array:
    """Computes the update by one kernel each way, for NVIDIA GPUs from Ampere on.

    The kernel (``update_kernel``) includes the norm ``rms``, unless the magnitude is traced. Other
    norms follow it. The backward pass keeps the arguments and numbers of the gate, and recomputes
    the matrices over heads.

    Args:
      call: the update.
      interpret: run with XLA operations, on any device.
      sizes: tokens, warps and stages of a program.

    Raises:
      NotImplementedError: if the kernel cannot, or nothing would be gained.
    """
    call = _displaced(call)
    params = call.params
    if not interpret:
        devices.check_triton()
    from tape_jax._src.positions.tape import update_kernel

    refuse("up" not in params, "without the MLP's mix there is no product over heads")
    refuse(call.splits_heads, "heads are split over devices")
    refuse(
        call.sharding is not None and call.sharding.shards("sequence") > 1,
        "the sequence is split over devices",
    )
    attended = 0 if call.a is None else call.a.shape[-len(call.block) - 1]
    width, most = math.prod(call.block), max(call.heads, attended)
    refuse(
        most > MOST_FUSED_HEADS or width > MOST_FUSED_WIDTH,
        f"heads are at most {MOST_FUSED_HEADS}, each of {MOST_FUSED_WIDTH} numbers; got {most} of "
        f"{width}",
    )
    for name in (call.e.dtype.name, *(() if call.a is None else (call.a.dtype.name,))):
        refuse(name not in update_kernel.TYPES, f"states are {update_kernel.TYPES}; got {name}")
    square, magnitude = None, concrete(call.magnitude)
    if call.norm == "rms" and magnitude is not None:
        square = 1 / (math.prod(call.block[:1]) * min(call.block[1:])) if call.tensor else 2 / width
    narrow = call.e.dtype.itemsize < 4
    kernel = update_kernel.UpdateKernel(
        square, 1.0 if magnitude is None else float(magnitude), narrow, interpret=interpret, **sizes
    )
    gate, down, up, mix = _factors(call)
    e, a = call.full_state(), None
    if mix is not None:
        assert call.a is not None
        mix = mix if mix.ndim == 2 else _spread(mix, call.heads)
        a = jnp.broadcast_to(call._flat(call.a), (*e.shape[:-2], attended, width))
        a = a.reshape(-1, *a.shape[-3:])
    gate = gate.reshape(-1, *gate.shape[-2:])
    new = _by_kernel(kernel, gate, down, up, mix, e.reshape(-1, *e.shape[-3:]), a).reshape(e.shape)
    done = dataclasses.replace(call, norm="none") if square is not None else call
    return done.normalized(new)


def _spread(mix: Array, heads: int) -> Array:
    """Scales of query heads, ``[H_q]``, as the matrix ``[H_kv, H_q]`` that sums inside groups."""
    group = jnp.arange(mix.shape[0]) // (mix.shape[0] // heads)
    return jnp.where(group == jnp.arange(heads)[:, None], mix, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(kernel: Any, *args: Array | None) -> Array:
    return _kernel_forward(kernel, *args)[0]


def _kernel_forward(kernel: Any, *args: Any) -> tuple[Array, tuple[Array | None, ...]]:
    gate, down, up, *rest = args
    return kernel.update(_matrix(gate, down, up), *rest), args


def _kernel_backward(kernel: Any, args: Any, d_out: Array) -> tuple[Array | None, ...]:
    gate, down, up, *rest = args
    matrix, pull = jax.vjp(_matrix, gate, down, up)
    d_matrix, *gradients = kernel.gradients(d_out, matrix, *rest)
    return *pull(d_matrix), *gradients


_by_kernel.defvjp(_kernel_forward, _kernel_backward)

UPDATES: Mapping[str, Callable[[UpdateCall], Array]] = {
    "reference": reference,
    "unrolled": unrolled,
    "sums": sums,
    "fused": fused,
}
# Tried first, by platform. On an H200 ``fused`` took 0.6 of the time of ``reference`` in float32,
# 0.7 in bfloat16, forward and backward (benchmarks/results/2026-11-26-nvidia-h200-2.md). For the
# savings of ``sums`` on TPUs, by compiler estimate, see docs/scale.md.
USUAL = {"cpu": ("unrolled",), "gpu": ("fused",), "tpu": ("sums",)}


def implementation_names(implementation: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the checked names to try; None for an automatic choice.

    Raises:
      ValueError: if a name is unknown or missing.
    """
    if implementation is None:
        return None
    require(
        isinstance(implementation, Iterable) and len(implementation) > 0,
        f"update implementation must be a name, several or None; got {implementation!r}",
    )
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        choose("update implementation", name, UPDATES)
    return names


def _check_types(params: Any, state: Any, attended: Any, x: Any, alpha: Any) -> None:
    """Raises ValueError unless these are arrays, of floats, and alpha an array or a number."""
    for name, p in params.items():
        require(
            getattr(p, "ndim", 0) > 0,
            f"params[{name!r}] must be an array with axes, as init_update makes it; got {p!r}",
        )
    for name, value in {"state": state, "attended": attended, "x": x}.items():
        dtype = getattr(value, "dtype", None)
        start = "; give tape.rotary_state(...) to the first layer"
        require(
            (name == "attended" and value is None)
            or (dtype is not None and jnp.issubdtype(dtype, jnp.floating)),
            f"{name} must be an array of floats; got {dtype or type(value).__name__}"
            + (start if name == "state" and value is None else ""),
        )
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    require(
        is_number or hasattr(alpha, "dtype"),
        f"alpha must be a number or an array; got {alpha!r}",
    )


def _check_update(e, a, x, params, num_kv_heads) -> tuple[bool, int]:
    """Returns whether the state has tensor form, and its number of heads; ValueError on misfits."""
    mix, up = params.get("mix"), params.get("up")
    if x.ndim < 2:
        raise ValueError(f"x must have shape [..., T, hidden]; got {x.shape}")
    present = [name for name in ("wx", "up", "down") if name in params]
    if present and len(present) < 3:
        raise ValueError(f"params must have all of wx, up and down, or none; got {present}")
    pair = [name for name in ("origin", "target") if name in params]
    if len(pair) == 1:
        raise ValueError(f"params must have both of origin and target, or neither; got {pair}")
    if a is None and (mix is not None or pair):
        name = "a mix" if mix is not None else "an origin"
        raise ValueError(f"params has {name}, so attended, the attended state, is needed; got None")
    require(e.ndim >= 2, f"state must have shape [T, D] or more axes; got {e.shape}")
    like = e if a is None else a
    tensor = is_tensor_form(like, jax.ShapeDtypeStruct((*x.shape[:-1], 1, like.shape[-1]), e.dtype))
    width = math.prod(e.shape[-3:-1]) if tensor else e.shape[-1]
    have = e.shape[-4 if tensor else -2] if e.ndim > 2 else 1
    heads = num_kv_heads or (up.shape[-1] if up is not None else None)
    if heads is None and mix is not None and mix.ndim == 2:
        heads = mix.shape[0]
    if heads is None and pair:
        heads = params["target"].shape[0]
    if heads is None:
        heads = have if have > 1 or mix is None else mix.shape[-1]
    if have not in (1, heads):
        raise ValueError(
            f"state of shape {e.shape} has {have} heads; the parameters expect {heads}: give "
            f"num_kv_heads={have} to init_update or UpdateState"
        )
    keys = jax.ShapeDtypeStruct((*x.shape[:-1], heads, width), e.dtype)
    check_state(e, keys, name="state", of=f"x of shape {x.shape}, keys", heads=(1, heads))
    if mix is not None or pair:
        assert a is not None
        queries = a.shape[a.ndim - (4 if tensor else 2)]
        for name in (name for name in OF_ATTENDED if name in params):
            shape, full = params[name].shape, (heads, queries)
            if name != "mix" and shape != full:
                raise ValueError(f"{name} must have shape {full}, like mix; got {shape}")
            if shape not in ((queries,), full) or queries % heads:
                raise ValueError(
                    f"{name} of shape {shape} fits neither ({queries},) nor {full}: attended has "
                    f"shape {a.shape}, the state {heads} heads"
                )
        block = e.shape[-3:] if tensor else e.shape[-1:]
        if a.shape[a.ndim - len(block) :] != block or a.shape[: x.ndim - 1] != x.shape[:-1]:
            raise ValueError(
                f"attended must have shape {(*x.shape[:-1], queries, *block)} to fit state of "
                f"shape {e.shape} and x of shape {x.shape}; got {a.shape}"
            )
    if up is not None:
        wx, down = params["wx"], params["down"]
        width = wx.shape[-1]
        if wx.shape[0] != x.shape[-1] or up.shape != (width, heads) or down.shape != (heads, width):
            raise ValueError(
                f"expected wx [{x.shape[-1]}, P], up [P, {heads}], down [{heads}, P]; got "
                f"{wx.shape}, {up.shape}, {down.shape}"
            )
    return tensor, heads
