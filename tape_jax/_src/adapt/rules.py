"""Rules that choose which parameters train, their masks, and trees split into two parts."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax._src.core.checks import choose, require, typed
from tape_jax._src.core.sharding import ParameterSpec
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.layout import by_path


@dataclasses.dataclass(frozen=True)
class Rule:
    """Chooses parameters: those that the model declares with the role ``kind``."""

    kind: ClassVar[str]

    def matches(self, path: str, spec: ParameterSpec) -> bool:
        """Returns whether the rule chooses a parameter.

        Args:
          path: such as ``layers_0/mlp/up/kernel``.
          spec: what the model declares.
        """
        return spec.role == self.kind

    def __str__(self) -> str:
        return self.kind


@dataclasses.dataclass(frozen=True)
class Position(Rule):
    """Parameters of the position encoding."""

    kind: ClassVar[str] = "position"


@dataclasses.dataclass(frozen=True)
class Norms(Rule):
    """Scales of all norms."""

    kind: ClassVar[str] = "norms"


@dataclasses.dataclass(frozen=True)
class Embeddings(Rule):
    """The embeddings of the tokens and the output projection."""

    kind: ClassVar[str] = "embeddings"


@dataclasses.dataclass(frozen=True)
class LoraFactors(Rule):
    """The factors of low-rank terms."""

    kind: ClassVar[str] = "lora"


@dataclasses.dataclass(frozen=True)
class Everything(Rule):
    """Every parameter."""

    kind: ClassVar[str] = "all"

    def matches(self, path: str, spec: ParameterSpec) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Path(Rule):
    """Parameters whose path matches a pattern, level by level: ``layers_*/attention/q/kernel``."""

    kind: ClassVar[str] = "path"

    pattern: str

    def matches(self, path: str, spec: ParameterSpec) -> bool:
        names, levels = path.split("/"), self.pattern.split("/")
        return len(levels) == len(names) and all(map(fnmatch.fnmatchcase, names, levels))

    def __str__(self) -> str:
        return f"path:{self.pattern}"


RULES: dict[str, type[Rule]] = {
    cls.kind: cls for cls in (Position, Norms, Embeddings, LoraFactors, Everything)
}


@typed
def parse_rule(rule: Rule | str) -> Rule:
    """Makes a rule from text: a name in :data:`RULES`, or ``path:<pattern>``.

    Raises:
      ValueError: for an unknown name.
    """
    if isinstance(rule, Rule):
        return rule
    name, colon, pattern = str(rule).partition(":")
    if name == Path.kind and colon and pattern:
        return Path(pattern)
    choose("rule", rule, (*RULES, "path:<pattern>"))
    return RULES[rule]()


@typed
def trainable_mask(model: Transformer, rules: Iterable[Rule | str]) -> dict[str, Any]:
    """Returns a tree of bools like the parameters of ``model``: True where a rule chooses one.

    Raises:
      ValueError: if there is no rule, or one chooses nothing.
    """
    rules = [rules] if isinstance(rules, str | Rule) else rules
    parsed = [parse_rule(rule) for rule in rules]
    require(bool(parsed), "at least one rule is needed, or nothing trains")
    specs = model.parameters()
    for rule in parsed:
        if not any(rule.matches(*item) for item in specs.items()):
            paths = by_path(unflatten_dict(specs, sep="/"))
            names = sorted({path.replace("layers/", "layers_*/") for path in paths})
            raise ValueError(f"the rule {str(rule)!r} chooses none of {', '.join(names)}")
    chosen = {path: any(r.matches(path, spec) for r in parsed) for path, spec in specs.items()}
    return unflatten_dict(chosen, sep="/")


def partition(params: Any, mask: Any) -> tuple[Any, Any]:
    """Returns ``(trainable, frozen)``: trees like ``params``, with None for the other's leaves.

    None is not a leaf, so ``jax.grad`` and an optimiser see only the trainable parameters.
    """
    return (
        jax.tree.map(lambda x, chosen: x if chosen else None, params, mask),
        jax.tree.map(lambda x, chosen: None if chosen else x, params, mask),
    )


def merge(trainable: Any, frozen: Any) -> Any:
    """Inverse of :func:`partition`."""

    def pick(x: Any, y: Any) -> Any:
        return y if x is None else x

    return jax.tree.map(pick, trainable, frozen, is_leaf=lambda x: x is None)


@typed
def describe_trainable(model: Transformer, rules: Iterable[Rule | str]) -> str:
    """Returns a table of the parameters that the rules choose, with numbers and shares."""
    mask = flatten_dict(trainable_mask(model, rules), sep="/")
    sizes = {name: math.prod(spec.shape.shape) for name, spec in model.parameters().items()}
    chosen = by_path(unflatten_dict({n: s for n, s in sizes.items() if mask[n]}, sep="/"))
    rows = {name: list(leaves.values()) for name, leaves in chosen.items()}
    return table(rows, sum(sizes.values()))


def table(counts: Mapping[str, list[int]], total: int) -> str:
    """Parameters, their numbers, and their shares of ``total``."""
    rows = [(name, sum(sizes)) for name, sizes in sorted(counts.items())]
    rows.append(("in all", sum(count for _, count in rows)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{'parameter':<{width}}  {'number':>14}  share of {total:,}"]
    lines += [f"{name:<{width}}  {count:>14,}  {count / total:8.4%}" for name, count in rows]
    return "\n".join(lines)
