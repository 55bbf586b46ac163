"""Methods that adapt a trained model: TAPE and its baselines."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax._src import positions
from tape_jax._src.adapt.identity import Fingerprint, fingerprint, has_no_values
from tape_jax._src.adapt.rules import Embeddings, Everything, LoraFactors, Norms, Position, Rule
from tape_jax._src.core.algebra import at_least_float32
from tape_jax._src.core.checks import FLOATS, choose, refuse, require, require_x64, type_name, typed
from tape_jax._src.model.config import Lora
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.inputs import check_variables
from tape_jax._src.model.layout import replaced, restack, unrolled, with_position
from tape_jax._src.model.parameters import full_name, lora_params
from tape_jax._src.positions.creation import option_names
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.positions.fixed.rope import START_FIELDS
from tape_jax._src.positions.protocol import Param

Array = jax.Array

# Encodings with TAPE's start; others also derive from Rope, but start or rotate differently.
START_KINDS = ("rope", "yarn", "longrope")


@typed
def add_tape(
    model: Transformer,
    variables: Any,
    *,
    key: Array,
    dtype: Any = None,
    donate: bool = False,
    **options: Any,
) -> tuple[Transformer, dict[str, Any]]:
    """Adds TAPE to a RoPE model (Zhu et al. 2025); the logits do not change at first.

    Args:
      model: a model with the encoding ``rope``, ``yarn`` or ``longrope``, of any base, scaling and
        axes: as the only encoding, beside others (``rope+window``), or in some layers of a
        schedule, whose other layers stay.
      variables: its variables; arrays or ShapeDtypeStructs.
      key: random key for the new parameters; ``mix`` and ``up`` start at zero.
      dtype: type of the new parameters; None: the model's ``param_dtype``.
      donate: whether the arrays of ``variables`` may be deleted; see :func:`restack`.
      **options: of :class:`tape_jax.positions.Tape`, except those of the start state (``base``,
        ``scaling``, ``axes``, ``partial_rotary_factor``, ``learn_base``, ``still_heads``), which
        are the model's.

    Returns:
      The model with ``tape`` in place of RoPE, and its variables. Existing arrays keep their type
      and sharding.

    Raises:
      ValueError: if the model has another encoding, or an option is unknown or does not fit.
    """

    def tape(rope: positions.Rope) -> positions.Encoding:
        _check_start(rope, model)
        fixed = {name: getattr(rope, name) for name in START_FIELDS}
        for name in options:
            changed_by = {"base": "scale_theta", "scaling": "with_scaling"}.get(name)
            require(
                name not in fixed,
                f"add_tape: {name} is the model's own, {fixed.get(name)!r}"
                + (f": change it there first (tape_jax.adapt.{changed_by})" if changed_by else ""),
            )
        return positions.create("tape", **fixed, **options)

    position = _with_rotary(model.encoding, tape)
    return with_encoding(model, variables, position, key=key, dtype=dtype, donate=donate)


@typed
def with_encoding(
    model: Transformer,
    variables: Any,
    position: Any,
    *,
    key: Array,
    dtype: Any = None,
    donate: bool = False,
    include_unrotated: bool = False,
) -> tuple[Transformer, dict[str, Any]]:
    """Replaces the model's encoding by another, or several.

    Windows stay. In a schedule, only layers with a rotation change; the others stay as they are. A
    schedule as ``position`` replaces everything, windows too; one by its name, such as
    ``rope/none``, starts as the model does. ``update_implementation`` and ``random_positions`` are
    dropped if the encoding has no use for them.

    Parameters with the same name and shape in both encodings are kept; new ones start as in a fresh
    model. The logits change unless the added terms start at zero, as for TAPE with RoPE's start, or
    ALiBi with ``slopes="learned_from_zero"``.

    Args:
      model: any model.
      variables: its variables; arrays or ShapeDtypeStructs.
      position: as ``ModelConfig.position``. If it has a rotary start and is a name or a mapping,
        the start options that it does not set (``base``, ``scaling``, ``axes``,
        ``partial_rotary_factor``, ``learn_base``, ``still_heads``) are the model's; for ``fope``
        only the base.
      key: random key for new parameters.
      dtype: type of the new parameters; None: the model's ``param_dtype``.
      donate: whether the arrays of ``variables`` may be deleted; see :func:`restack`.
      include_unrotated: whether layers of a schedule without a rotation get it too.

    Returns:
      The model with that encoding, and its variables. Existing arrays keep their type and sharding.

    Raises:
      ValueError: if the encoding, or an option, is unknown or does not fit the model.
    """
    check_variables(variables)
    new = with_position(model, in_place_of(model.encoding, position, include_unrotated))
    heads = model.encoding.heads_per_query, new.encoding.heads_per_query
    require(
        heads[0] == heads[1],
        f"{new.encoding.kind!r} has {heads[1]} heads attend for each query head, "
        f"{model.encoding.kind!r} {heads[0]}: the output projection would not fit",
    )
    known = {path: spec.role for path, spec in model.parameters().items()}
    given = flatten_dict(variables["params"], sep="/")
    own = {path: x for path, x in given.items() if known.get(path) == "position"}
    rest = unflatten_dict({p: x for p, x in given.items() if p not in own}, sep="/")
    flat = flatten_dict(restack(rest, model, new, donate=donate), sep="/")
    dtype = _type_of_new(dtype, new)
    flat |= _position_params(model, new, own, key, dtype, next(iter(flat.values())))
    return new, {**variables, "params": unflatten_dict(flat, sep="/")}


def _position_params(
    model: Transformer, new: Transformer, own: dict[str, Any], key: Array, dtype: Any, like: Any
) -> dict[str, Any]:
    """Parameters of a new encoding by path: the old ones of each layer that fit, else fresh ones.

    Args:
      model: has the old ones.
      new: will have the new ones.
      own: the old ones by path.
      key: random key.
      dtype: type of fresh ones.
      like: any parameter; if it has no values, fresh ones have none.
    """
    c, single = new.config, unrolled(model)
    old = flatten_dict(restack(unflatten_dict(own, sep="/"), model, single), sep="/")
    ranges = {blocks.name: blocks.layers for blocks in model.blocks}
    # Of like layers, or of none, and what their keys are folded with.
    groups: list[tuple[range | None, dict[str, Param], int]] = [
        (None, new.encoding.input_params(c.sizes), c.num_layers)
    ]
    for blocks in new.blocks:
        specs = blocks.like.encoding.layer_params(c.sizes, updates=blocks.like.updates)
        groups.append((blocks.layers, specs, blocks.layers[0]))
    found: dict[str, Any] = {}
    for layers, specs, fold in groups:
        block = "" if layers is None else f"layers_{layers[0]}/"
        named = {block + full_name("position", name): spec for name, spec in specs.items()}
        stack = len(layers) if layers is not None and c.scan_layers else None
        made = _initial(named, key, fold, stack, dtype, like)
        for path, x in made.items():
            name = path.removeprefix(block)
            parts = [f"layers_{n}/{name}" for n in layers] if layers is not None else [name]
            fits = [part in old and old[part].shape == named[path].shape for part in parts]
            if all(fits) and path in own and ranges.get(block.rstrip("/")) == layers:
                x = own[path]
            elif all(fits):
                kept = unflatten_dict({part: old[part] for part in parts}, sep="/")
                x = flatten_dict(restack(kept, single, new), sep="/")[path]
            elif any(fits) and not isinstance(x, jax.ShapeDtypeStruct):
                rows = enumerate(zip(parts, fits, strict=True))
                x = jnp.stack([old[part] if fit else x[n] for n, (part, fit) in rows])
            found[path] = x
    return found


@typed
def in_place_of(
    old: positions.Encoding, position: Any, include_unrotated: bool = False
) -> positions.Encoding:
    """Returns the encoding that :func:`with_encoding` puts in place of ``old``.

    Args:
      old: a model's encoding.
      position, include_unrotated: as for :func:`with_encoding`.

    Raises:
      ValueError: as :func:`with_encoding` does; for a schedule by name, if layers of ``old`` start
        differently.
    """
    given = position.get("kind") if isinstance(position, Mapping) else position
    if isinstance(given, str) and "/" in given:
        return _schedule_in_place_of(old, position)
    if isinstance(given, positions.Layers):
        return given

    def of_layer(one: positions.Encoding) -> positions.Encoding:
        new = _with_start_of(one if _is_rotary(one) else old, position)
        windows = [] if "window" in new.acts_on else [x for x in one.members if _is_window(x)]
        return positions.create([*([new] if new.acts_on else []), *windows]) if windows else new

    if not isinstance(old, positions.Layers):
        return of_layer(old)
    require(
        include_unrotated or _is_rotary(old),
        f"no layer of {old.kind!r} rotates: give include_unrotated=True, or a schedule",
    )
    return _scheduled(
        [of_layer(x) if include_unrotated or _is_rotary(x) else x for x in old.encodings]
    )


def _schedule_in_place_of(old: positions.Encoding, position: Any) -> positions.Encoding:
    """A schedule by its name, whose entries start as ``old`` does."""
    options = dict(position) if isinstance(position, Mapping) else {"kind": position}
    if "encodings" in options:
        return positions.create(position)
    name = options.pop("kind")
    layers = old.encodings if isinstance(old, positions.Layers) else (old,)
    rotary = [layer for layer in layers if _is_rotary(layer)] or [old]

    def make(entry: dict[str, Any]) -> positions.Encoding:
        found = dict.fromkeys(_with_start_of(layer, entry) for layer in rotary)
        require(
            len(found) == 1,
            f"layers of {old.kind!r} start differently: {entry['kind']!r} in {name!r} needs "
            "options of its own, such as base",
        )
        return next(iter(found))

    return positions.Layers.named(name, options, make)


def _scheduled(entries: Sequence[positions.Encoding]) -> positions.Encoding:
    """The encoding of all layers if they are equal, else the schedule."""
    return entries[0] if len(set(entries)) == 1 else positions.Layers(entries)


def _is_rotary(encoding: positions.Encoding) -> bool:
    return any(isinstance(one, positions.Rope) for one in encoding.members)


def _is_window(encoding: positions.Encoding) -> bool:
    return "window" in encoding.acts_on


def _with_start_of(old: positions.Encoding, position: Any) -> positions.Encoding:
    """The encoding ``position`` with the rotary start of ``old``, except options that it sets."""
    if isinstance(position, Sequence) and not isinstance(position, str):
        return positions.create([_with_start_of(old, one) for one in position])
    given = position if isinstance(position, Mapping) else {"kind": position}
    kind = given.get("kind", "tape")
    own = _rotary_start(old, kind) if isinstance(kind, str) else {}
    return positions.create({**own, **given} if own else position)


def _rotary_start(old: positions.Encoding, kind: str) -> dict[str, Any]:
    """Returns the rotary start of ``old`` as options of ``kind``, a name or several with ``+``."""
    rope = next((one for one in old.members if isinstance(one, positions.Rope)), None)
    if rope is None:
        return {}
    known = option_names(kind)
    own: dict[str, Any] = {}
    for name in START_FIELDS:
        cls = known[name][0] if name in known else positions.Encoding
        # A default other than Rope's is part of the encoding's name.
        rotary = issubclass(cls, positions.Rope | positions.Fope)
        if rotary and getattr(cls, name) == getattr(positions.Rope, name):
            own[name] = getattr(rope, name)
    return own


@typed
def add_lora(
    model: Transformer,
    variables: Any,
    *,
    key: Array,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("q", "k", "v", "out"),
    dtype: Any = None,
) -> tuple[Transformer, dict[str, Any]]:
    """Adds low-rank terms to projections (Hu et al. 2021); the logits do not change at first.

    Args:
      model: a model without low-rank terms.
      variables: its variables; arrays or ShapeDtypeStructs.
      key: random key for the factors ``A``; the factors ``B`` start at zero.
      rank, alpha, targets: as in ``Lora``.
      dtype: type of the factors; None: the model's ``param_dtype``.

    Returns:
      The model and its variables, with ``lora_a [in, rank]`` and ``lora_b [rank, out]`` beside each
      target's ``kernel`` (behind an axis of layers, if there is one).

    Raises:
      ValueError: if the model has low-rank terms already, or an option does not fit.
    """
    check_variables(variables)
    require(
        model.config.lora is None,
        f"add_lora: the model has low-rank terms already, {model.config.lora}: merge_lora first",
    )
    new = replaced(model, lora=Lora(rank, alpha, tuple(targets)))
    declared, first = new.parameters(), full_name("lora", "a")
    flat = flatten_dict(variables["params"], sep="/")
    dtype = _type_of_new(dtype, new)
    for i, (name, kernel) in enumerate(sorted(flat.items())):
        projection = name.removesuffix("kernel")
        if projection + first not in declared:
            continue
        *stack, fan_in, features = kernel.shape
        specs = {
            projection + full_name("lora", factor): spec
            for factor, spec in lora_params(fan_in, features, rank).items()
        }
        layers = stack[0] if stack else None
        flat |= _initial(specs, key, i, layers, dtype, kernel)
    return new, {**variables, "params": unflatten_dict(flat, sep="/")}


@typed
def merge_lora(model: Transformer, variables: Any) -> tuple[Transformer, dict[str, Any]]:
    """Adds the low-rank terms to their kernels: a plain model again, with full attention.

    The sum is computed in at least float32 and rounded to the type of the kernel. Of
    ShapeDtypeStructs in place of arrays the result has ShapeDtypeStructs.

    Raises:
      ValueError: if the model has no low-rank terms.
    """
    check_variables(variables)
    lora = model.config.lora
    if lora is None:
        raise ValueError("merge_lora: the model has no low-rank terms (config.lora is None)")
    scale = lora.scale
    flat = flatten_dict(variables["params"], sep="/")

    @jax.jit
    def add(kernel: Array, a: Array, b: Array) -> Array:
        wide = at_least_float32(jnp.result_type(kernel, a, b))
        a, b = a.astype(wide), b.astype(wide)
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return (kernel.astype(wide) + scale * product).astype(kernel.dtype)

    for name in [n.removesuffix("lora_a") for n in flat if n.endswith("/lora_a")]:
        factors = flat.pop(f"{name}lora_a"), flat.pop(f"{name}lora_b")
        if not isinstance(kernel := flat[f"{name}kernel"], jax.ShapeDtypeStruct):
            flat[f"{name}kernel"] = add(kernel, *factors)
    merged = replaced(model, lora=None, shifted_groups=None)
    return merged, {**variables, "params": unflatten_dict(flat, sep="/")}


@typed
def scale_theta(model: Transformer, variables: Any, base: float = 1e6) -> tuple[Transformer, Any]:
    """Returns the model with another rotary base (Xiong et al. 2023); parameters are unchanged.

    In a schedule, layers with a window keep theirs, unless all have one, or they share learned
    position parameters with others. (:func:`tape_jax.save_pretrained` has no place for two
    rotations in families with one, such as Gemma 2.)

    Raises:
      ValueError: if the encoding is not a rotary one, the base does not exceed 1, or the model
        would have other parameters.
    """
    return _with_rotation(model, base=float(base)), variables


@typed
def with_scaling(
    model: Transformer, scaling: RopeScaling, *, max_length: int | None = None
) -> Transformer:
    """Returns the model with its rotary frequencies adapted by ``scaling``.

    In a schedule, layers with a window keep theirs, as with :func:`scale_theta`.

    Args:
      model: a model with a rotary encoding: ``rope``, ``yarn``, ``tape`` ...
      scaling: such as ``RopeScaling("linear", 2.0)``.
      max_length: the new longest sequence, in tokens; None: the model's.

    Raises:
      ValueError: if the encoding is not a rotary one, or the model would have other parameters.
    """
    model = _with_rotation(model, scaling=scaling)
    return model if max_length is None else replaced(model, max_length=max_length)


@typed
def drop_positions(model: Transformer, variables: Any) -> tuple[Transformer, dict[str, Any]]:
    """Removes the model's rotation (DroPE, arXiv:2512.12167); other parameters are unchanged.

    Every layer drops its rotary encodings: ``rope``, ``yarn``, ``longrope`` and others with a
    rotary start. Encodings beside them stay, such as windows and biases. The model then computes
    another function, which a short training repairs. The paper trains all parameters on sequences
    of the length that the model was trained at.

    Raises:
      ValueError: if no layer has a rotary encoding, or if it makes heads of its own.
      NotImplementedError: if parameters of what stays have other names without the rotation.
    """
    none, sizes = positions.create("none"), model.config.sizes
    position = _with_rotary(model.encoding, lambda rope: none)

    def names(encoding: positions.Encoding) -> set[str]:
        layers = encoding.layer_params(sizes, updates=False)
        return {*encoding.input_params(sizes), *layers}

    before, after = (x.of_layers(sizes.num_layers) for x in (model.encoding, position))
    for old, new in zip(before, after, strict=True):
        refuse(
            not names(new.encoding) <= names(old.encoding),
            f"drop_positions: parameters of {new.encoding.kind!r} have other names in "
            f"{old.encoding.kind!r}, and would be lost",
        )
    make_key = functools.partial(jax.random.key, 0)
    key = jax.eval_shape(make_key) if has_no_values(variables) else make_key()
    return with_encoding(model, variables, position, key=key)


@typed
def full_attention(model: Transformer) -> Transformer:
    """Returns the model without shifted groups, for evaluation and generation."""
    return replaced(model, shifted_groups=None)


def _type_of_new(dtype: Any, model: Transformer) -> np.dtype:
    """The type of new parameters; ValueError unless it is a float type that jax has here."""
    name = type_name("dtype of new parameters", dtype, (None, *FLOATS)) or model.config.param_dtype
    require_x64(dtype=name)
    return jnp.dtype(name)


def _initial(
    specs: Mapping[str, Param], key: Array, fold: int, layers: int | None, dtype: Any, like: Any
) -> dict[str, Any]:
    """New parameters, drawn separately for each layer; without values if ``like`` has none."""

    def draw(key: Array) -> dict[str, Array]:
        keys = jax.random.split(jax.random.fold_in(key, fold), max(len(specs), 1))
        return {
            name: spec.init(k, spec.shape, dtype)
            if layers is None
            else jax.vmap(lambda k, s=spec: s.init(k, s.shape, dtype))(jax.random.split(k, layers))
            for k, (name, spec) in zip(keys, specs.items(), strict=False)
        }

    return jax.eval_shape(draw, key) if has_no_values(like) else draw(key)


def _check_start(encoding: positions.Encoding, model: Transformer) -> None:
    """Raises ValueError unless TAPE can start as an encoding of a model does."""
    require(
        encoding.kind in START_KINDS,
        f"expected a model with the encoding {' or '.join(map(repr, START_KINDS))}; this one has "
        f"{model.encoding.kind!r}",
    )


def _with_rotary(
    encoding: positions.Encoding,
    change: Callable[[positions.Rope], positions.Encoding],
    chosen: Callable[[positions.Encoding], bool] = _is_rotary,
) -> positions.Encoding:
    """An encoding with its rotary members changed; in a schedule, only in layers ``chosen``."""
    require(_is_rotary(encoding), f"expected a model with a rotary encoding; got {encoding.kind!r}")

    def changed(one: positions.Encoding) -> positions.Encoding:
        return change(one) if isinstance(one, positions.Rope) else one

    def of_layer(one: positions.Encoding) -> positions.Encoding:
        members = [changed(member) for member in one.members]
        return positions.create([x for x in members if type(x) is not positions.Encoding] or "none")

    if not isinstance(encoding, positions.Layers):
        return of_layer(encoding)
    return _scheduled([of_layer(x) if chosen(x) else x for x in encoding.encodings])


def _with_rotation(model: Transformer, **changes: Any) -> Transformer:
    """The model with fields of its rotary encoding changed: in layers that see all, if any do."""
    layers = model.encoding.encodings if isinstance(model.encoding, positions.Layers) else ()
    rotary = [one for one in layers if _is_rotary(one)]
    full = [one for one in rotary if not _is_window(one)]

    def change(rope: positions.Rope) -> positions.Rope:
        named = isinstance(rope, positions.Yarn | positions.LongRope)
        plain = positions.Rope(**vars(rope)) if named else rope
        return dataclasses.replace(plain, **changes)

    def changed(chosen: Sequence[positions.Encoding]) -> Transformer:
        position = _with_rotary(model.encoding, change, lambda one: one in chosen)
        return replaced(model, position=position)

    def shapes(of: Transformer) -> dict[str, Any]:
        return {path: spec.shape for path, spec in of.parameters().items()}

    new = changed(full or rotary)
    if shapes(new) != shapes(model):
        new = changed(rotary)
    require(
        shapes(new) == shapes(model),
        f"parameters of {model.encoding.kind!r} would be others as {new.encoding.kind!r}",
    )
    return new


@dataclasses.dataclass(frozen=True)
class Adapted:
    """The result of :func:`adapt`.

    Attributes:
      model: the adapted model.
      variables: its variables.
      rules: which parameters train.
      method: name of the method.
      base: fingerprint of the base model, for :func:`save_adapter`; None without values.
    """

    model: Transformer
    variables: Any
    rules: tuple[Rule, ...]
    method: str
    base: Fingerprint | None


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to adapt a model.

    Attributes:
      prepare: maps ``(model, variables, *, key, **options)`` to the adapted model and variables.
      rules: which parameters train, beside norms and embeddings.
      options: names of the options; None: those of :class:`tape_jax.positions.Tape`.
    """

    prepare: Callable[..., tuple[Transformer, Any]]
    rules: tuple[Rule, ...]
    options: tuple[str, ...] | None

    def trained(self, *, norms: bool = True, embeddings: bool = True) -> tuple[Rule, ...]:
        """The rules, with those of norms and embeddings unless everything trains already."""
        if Everything() in self.rules:
            return self.rules
        return self.rules + (Norms(),) * norms + (Embeddings(),) * embeddings


def _long_lora(model: Transformer, variables: Any, *, key: Array, groups: int = 4, **lora: Any):
    model, variables = add_lora(model, variables, key=key, **lora)
    return replaced(model, shifted_groups=groups), variables


def _theta(model: Transformer, variables: Any, *, key: Array, base: float = 1e6, **lora: Any):
    return add_lora(*scale_theta(model, variables, base), key=key, **lora)


def _encoding(model: Transformer, variables: Any, *, key: Array, position: Any = None, **options):
    require(position is not None, "the method 'encoding' needs position=, what takes its place")
    return with_encoding(model, variables, position, key=key, **options)


def _drope(model: Transformer, variables: Any, *, key: Array | None):
    return drop_positions(model, variables)


def _unchanged(model: Transformer, variables: Any, *, key: Array | None):
    return model, variables


_LORA_OPTIONS = ("rank", "alpha", "targets", "dtype")

# The methods that the paper compares for longer contexts, full fine-tuning, and full fine-tuning
# with another encoding or none: the base's projections were not made for its logits.
METHODS = {
    "tape": Method(add_tape, (Position(),), None),
    "lora": Method(add_lora, (LoraFactors(),), _LORA_OPTIONS),
    "longlora": Method(_long_lora, (LoraFactors(),), ("groups", *_LORA_OPTIONS)),
    "theta": Method(_theta, (LoraFactors(),), ("base", *_LORA_OPTIONS)),
    "full": Method(_unchanged, (Everything(),), ()),
    "drope": Method(_drope, (Everything(),), ()),
    "encoding": Method(_encoding, (Everything(),), ("position", "dtype", "donate")),
}


@typed
def adapt(
    model: Transformer,
    variables: Any,
    method: str,
    *,
    key: Array | None = None,
    norms: bool = True,
    embeddings: bool = True,
    scaling: RopeScaling | None = None,
    **options: Any,
) -> Adapted:
    """Prepares a trained model for one method of context extension.

    Args:
      model: the base; for ``tape`` with the encoding ``rope``, ``yarn`` or ``longrope``.
      variables: its variables; arrays or ShapeDtypeStructs.
      method: ``tape``; ``lora``; ``longlora``, which trains on shifted groups and is evaluated with
        :func:`full_attention`; ``theta``, LoRA with another rotary base; ``full``, everything;
        ``drope``, everything, with :func:`drop_positions`; ``encoding``, everything, with another
        encoding.
      key: random key for new parameters; ``full`` and ``drope`` need none.
      norms, embeddings: whether the norms, and the embeddings with the output projection, also
        train; ``full``, ``drope`` and ``encoding`` always train them.
      scaling: first adapts the rotary frequencies, as :func:`with_scaling`.
      **options: ``tape``: those of :func:`add_tape`; else ``rank``, ``alpha``, ``targets`` and
        ``dtype`` of :func:`add_lora`, ``groups`` (longlora) and ``base`` (theta); ``encoding``:
        ``position``, ``dtype`` and ``donate`` of :func:`with_encoding`.

    Raises:
      ValueError: for an unknown method or option, a missing key, or a model that does not fit.
    """
    choose("method", method, METHODS)
    check_variables(variables)
    chosen = METHODS[method]
    if chosen.options is not None:
        for name in options:
            choose(f"option of the method {method!r}", name, chosen.options)
    needs_key = chosen.prepare not in (_unchanged, _drope)
    require(key is not None or not needs_key, f"the method {method!r} needs a random key; got None")
    base = None if has_no_values(variables) else fingerprint(model, variables)
    if scaling is not None:
        model = with_scaling(model, scaling)
    model, variables = chosen.prepare(model, variables, key=key, **options)
    members = model.encoding.members
    require(
        scaling is None or any(getattr(one, "scaling", None) == scaling for one in members),
        f"scaling is of the rotary frequencies that the model had: {model.encoding.kind!r}, put in "
        f"its place, would lose it; got {scaling}",
    )
    rules = chosen.trained(norms=norms, embeddings=embeddings)
    return Adapted(model, variables, rules, method, base)
