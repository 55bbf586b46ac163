"""The ``adapt`` section of a config, which trains on top of a trained model.

The section ``adapt`` of a config names a base and a method of :data:`tape_jax.adapt.METHODS`. The
model is then the base as the method adapts it. If the config also states fields of the model, they
must agree. Trained parameters are kept in at least float32, whatever the type of the base. All
others stay as they are, take part in no gradient, and are in no checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import ModelConfig, RopeScaling, Transformer, adapt
from tape_jax.adapt import Adapted, Rule, restack
from tape_jax.positions import Encoding, Rope, Tape
from train.checks import choose, require

Array = jax.Array

# The baselines of methods: the base as it is, and with its rotary frequencies scaled.
UNTRAINED = ("base", "scaled")
METHODS = (*UNTRAINED, *adapt.METHODS)
# Methods that have no rotary frequencies to scale, or leave them unchanged.
UNSCALED = ("base", "drope")
# Methods that read the model's ``position``.
POSITIONED = ("tape", "encoding")

# Fields that say how the model is computed, not what it is. A config may set them.
COMPUTED = (
    "dtype",
    "attention_implementation",
    "update_implementation",
    "remat",
    "scan_layers",
    "state_dtype",
)

# Options of TAPE that the base decides: where its rotary state starts.
OF_THE_BASE = tuple(f.name for f in dataclasses.fields(Rope))


@dataclasses.dataclass(frozen=True)
class AdaptOptions:
    """Options of methods, as in :func:`tape_jax.adapt.adapt`; None: the method's default.

    The options of ``tape`` and ``encoding`` are in the model's ``position``.

    Attributes:
      rank, alpha, targets: of the low-rank terms (lora, longlora, theta).
      groups: parts of the sequence that attention stays within (longlora).
      base: the new rotary base (theta).
    """

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    groups: int | None = None
    base: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def option_names(method: str) -> tuple[str, ...]:
    """The fields of :class:`AdaptOptions` that concern a method."""
    known = () if method in UNTRAINED else adapt.METHODS[method].options or ()
    return tuple(f.name for f in dataclasses.fields(AdaptOptions) if f.name in known)


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """The section ``adapt`` of a config: the trained model that is adapted, and the method.

    Attributes:
      base: a Hugging Face Llama folder, or a run folder.
      method: a name in :data:`METHODS`. ``base``, the base as it is, and ``scaled``, the base with
        ``scaling``, train nothing: their runs take no steps and are evaluated like the others.
      options: of the method.
      norms, embeddings: whether the norms, and the embeddings with the output projection, train
        beside the method's own parameters.
      rules: replace all of the above: texts for :func:`tape_jax.adapt.parse_rule` that choose what
        trains. Each must choose something, and together all parameters that the method adds. None:
        the above.
      scaling: adapts the rotary frequencies, for every method except ``base`` and ``drope``.
      replace_scaling: whether it may replace a scaling of the base; else that is an error of a new
        experiment.
      max_length: the longest sequence that the model accepts, in tokens; None: the base's.
    """

    base: str
    method: str = "tape"
    options: AdaptOptions = AdaptOptions()
    norms: bool = True
    embeddings: bool = True
    rules: tuple[str, ...] | None = None
    scaling: RopeScaling | None = None
    replace_scaling: bool = False
    max_length: int | None = None

    def __post_init__(self):
        require(bool(self.base), "adapt: base must name a run or a Hugging Face Llama folder")
        choose("adapt method", self.method, METHODS)
        for name in self.options.given:
            if name not in option_names(self.method):
                known = ", ".join(option_names(self.method)) or "none"
                raise ValueError(
                    f"adapt.options.{name} is no option of the method {self.method!r}; it has "
                    f"{known}" + (" but those of model.position" * (self.method in POSITIONED))
                )
        for rule in self.rules or ():
            adapt.parse_rule(rule)

    @property
    def trains(self) -> bool:
        """True if any parameter trains."""
        return self.method not in UNTRAINED

    @property
    def trained(self) -> tuple[Rule, ...]:
        """The rules of what trains."""
        if not self.trains:
            return ()
        if self.rules is not None:
            return tuple(map(adapt.parse_rule, self.rules))
        method = adapt.METHODS[self.method]
        return method.trained(norms=self.norms, embeddings=self.embeddings)


def apply(
    adaptation: Adaptation,
    model: Transformer,
    variables: Any,
    *,
    key: Array,
    position: Encoding | None = None,
) -> Adapted:
    """Adapts the base, and returns it with the rules of what trains, which may be none.

    Args:
      adaptation: the config's section.
      model: the base.
      variables: its variables, whose arrays may be deleted; or ShapeDtypeStructs.
      key: random key for new parameters.
      position: the wanted encoding: for ``tape`` its own options, for ``encoding`` all of it.

    Raises:
      ValueError: if the base, an option or a rule does not fit.
    """
    method = adaptation.method if adaptation.trains else "full"
    options = adaptation.options.given
    if method == "tape":
        options |= {} if position is None else _options_of_its_own(position)
    elif method == "encoding":
        options["position"] = position
    if method in POSITIONED:
        options["donate"] = True
    known = adapt.METHODS[method].options
    if known is None or "dtype" in known:
        # A new parameter in a narrower type would lose its first small steps.
        options["dtype"] = _wide(model.config.param_dtype)
    before = set(_by_name(variables["params"]))
    made = adapt.adapt(
        adapt.full_attention(model),
        variables,
        method,
        key=key,
        scaling=None if adaptation.method in UNSCALED else adaptation.scaling,
        **options,
    )
    rules = adaptation.trained
    if rules:
        chosen = _by_name(adapt.trainable_mask(made.model, rules))
        left_out = sorted(p for p in chosen if p not in before and not all(chosen[p]))
        require(
            not left_out,
            f"adapt.rules choose not all that the method {method!r} adds: {', '.join(left_out)}",
        )
    adapted = made.model
    if adaptation.max_length is not None:
        adapted = _replaced(adapted, max_length=adaptation.max_length)
    return dataclasses.replace(made, model=adapted, rules=rules, method=adaptation.method)


def describe(
    adaptation: Adaptation, base: ModelConfig, position: Encoding | None = None
) -> Adapted:
    """Returns the result of :func:`apply` on such a base, without values.

    Args:
      adaptation: the config's section.
      base: describes the base; sets the wanted fields of :data:`COMPUTED`.
      position: as for :func:`apply`.
    """
    model = Transformer(base)
    params = {path: spec.shape for path, spec in model.parameters().items()}
    variables = {"params": unflatten_dict(params, sep="/")}
    key = jax.eval_shape(jax.random.key, 0)
    return apply(adaptation, model, variables, key=key, position=position)


def _wide(dtype: Any) -> Any:
    """Widens a type to at least float32, for trained parameters."""
    return jnp.promote_types(dtype, jnp.float32)


def _replaced(model: Transformer, **changes: Any) -> Transformer:
    """Returns the model with changed configuration fields."""
    return Transformer(dataclasses.replace(model.config, **changes), sharding=model.sharding)


def _by_name(params: Any) -> dict[str, list[Any]]:
    """Groups leaves by their path without layer numbers."""
    found: dict[str, list[Any]] = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        found.setdefault(re.sub(r"^layers_\d+/", "layers/", path), []).append(leaf)
    return found


def _options_of_its_own(position: Encoding) -> dict[str, Any]:
    """Returns TAPE's options that are not the base's."""
    tape = next((one for one in position.members if isinstance(one, Tape)), None)
    own = {} if tape is None else vars(tape)
    return {name: value for name, value in own.items() if name not in OF_THE_BASE}


def computed_as(
    model: Transformer, variables: Any, wanted: ModelConfig
) -> tuple[Transformer, dict[str, Any]]:
    """Returns the model, computed and laid out as the COMPUTED fields of ``wanted`` say."""
    new = _replaced(model, **{name: getattr(wanted, name) for name in COMPUTED})
    return new, {**variables, "params": restack(variables["params"], model, new, donate=True)}


def split(adapted: Adapted) -> tuple[Any, Any]:
    """Splits off the parameters that train, in at least float32.

    Both results are trees like the parameters, with None for the other's leaves.
    """
    return split_params(adapted.model, adapted.variables["params"], adapted.rules)


def split_params(model: Transformer, params: Any, rules: Sequence[Rule | str]) -> tuple[Any, Any]:
    """Splits parameters as :func:`split` does; ``rules`` choose those that train."""
    if not rules:
        return jax.tree.map(lambda _: None, params), params
    trainable, frozen = adapt.partition(params, adapt.trainable_mask(model, rules))
    return jax.tree.map(lambda x: x.astype(_wide(x.dtype)), trainable), frozen
