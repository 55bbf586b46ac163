"""Docstrings as the site shows them: roles become links, and shared descriptions are repeated.

mkdocstrings loads this as an extension of griffe; see ``mkdocs.yml``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`([\w.]+)`")
# "  base, scaling: as in RoPE" with its continuation lines.
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites docstrings as they are read, before their sections are told apart."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute."""
        if obj.docstring:
            text = ROLE.sub(lambda role: _link(obj, role[1]), obj.docstring.value)
            text = SHARED.sub(_one_by_one, text)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _one_by_one(entry: re.Match) -> str:
    indent, names, description = entry.groups()
    return "\n".join(f"{indent}{name}: {description}" for name in names.split(", "))


def _link(obj: griffe.Object, name: str) -> str:
    """A link to what ``name`` means in the docstring of ``obj``; plain code if no page has it."""
    try:
        target = name if name.split(".")[0] in ("jax", "tape_jax") else obj.resolve(name)
    except griffe.NameResolutionError:
        target = name
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'
