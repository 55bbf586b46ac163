"""Who may import whom, how long a function may be, and where the test of a module lies."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.paths import ROOT

MOST_LINES = 60
OURS = ("tape_jax", "train", "research", "configs", "benchmarks", "tests", "docs", "examples")

# What of this repository each room may import, beside itself. The longest name that fits counts.
CORE = "tape_jax._src.core"
SIDE_BY_SIDE = (CORE, "tape_jax._src.positions", "tape_jax._src.attention")
BELOW_PRETRAINED = (*SIDE_BY_SIDE, "tape_jax._src.model")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    CORE: (),
    "tape_jax._src.positions": (CORE,),
    "tape_jax._src.attention": (CORE,),
    "tape_jax._src.model": SIDE_BY_SIDE,
    "tape_jax._src.pretrained": BELOW_PRETRAINED,
    "tape_jax._src.adapt": BELOW_PRETRAINED,
    "tape_jax._src.parity": BELOW_PRETRAINED,
    "tape_jax": ("tape_jax",),
    "train": ("tape_jax", "configs"),
    "research": ("tape_jax", "train", "configs"),
}
# Users of the library import its public names alone.
PUBLIC_ONLY = ("train", "research", "examples")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package.replace(".", "/")).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> Iterator[str]:
    """Yield the dotted names that a file imports, wherever in it, those for types included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def may_import(module: str, name: str) -> bool:
    """Return whether a module may import what has the dotted name."""
    top = name.partition(".")[0]
    if top not in OURS:
        return True
    if module.partition(".")[0] in PUBLIC_ONLY and inside(name, "tape_jax._src"):
        return False
    room = max((room for room in MAY_IMPORT if inside(module, room)), key=len)
    return any(inside(name, other) for other in (room, *MAY_IMPORT[room]))


def cycles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, by way of others too."""
    reached = {module: _reached(module, imports) for module in imports}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached.get(other, ())))
        for module in imports
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, imports: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    left = list(imports[start])
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left.extend(imports.get(module, ()))
    return found


def imports_of(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which of the modules each imports.

    Args:
      files: source by the module's dotted name.
    """

    def target(name: str) -> str | None:
        return next((n for n in (name, name.rpartition(".")[0]) if n in files), None)

    return {
        module: {found for name in imported(source) if (found := target(name))}
        for module, source in files.items()
    }


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the lines of code of a function: no docstring, comment or blank line."""
    skipped: set[int] = set()
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        skipped = set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    assert function.end_lineno is not None
    return sum(
        bool(text := lines[number - 1].strip()) and not text.startswith("#")
        for number in range(function.lineno, function.end_lineno + 1)
        if number not in skipped
    )


def long_functions(source: str) -> dict[str, int]:
    """Return the functions of a file that are too long, with their lines of code."""
    lines = source.splitlines()
    return {
        node.name: n
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (n := code_lines(node, lines)) > MOST_LINES
    }


@pytest.mark.parametrize("package", ["tape_jax", "train", "research"])
def test_imports_point_one_way(package):
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in sources(package)
        for name in imported(path.read_text(encoding="utf-8"))
        if not may_import(module_of(path), name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "name", "allowed"),
    [
        ("tape_jax._src.model.decoder", "tape_jax._src.positions.tape.encoding.Tape", True),
        ("train.compare.plots", "research.claims", False),
        ("train.compare.plots", "tape_jax._src.core.files", False),
        ("tape_jax._src.attention.api", "tape_jax._src.positions.protocol.Param", False),
    ],
)
def test_what_points_the_other_way_is_found(module, name, allowed):
    assert may_import(module, name) == allowed


def test_no_import_cycles():
    paths = [path for package in ("tape_jax", "train", "research") for path in sources(package)]
    files = {module_of(path): path.read_text(encoding="utf-8") for path in paths}
    found = cycles(imports_of(files))
    assert not found, "\n".join(", ".join(group) for group in found)


def test_an_import_cycle_is_found():
    files = {
        "p.a": "from p import b\nimport numpy",
        "p.b": "def late():\n    from p.c import name",
        "p.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import Name",
        "p.d": "from p.a import other",
    }
    assert cycles(imports_of(files)) == [["p.a", "p.b", "p.c"]]
    assert cycles(imports_of(files | {"p.c": ""})) == []


@pytest.mark.parametrize("package", ["tape_jax", "train", "research"])
def test_no_function_is_too_long(package):
    wrong = [
        f"{module_of(path)}.{name}: {n} lines of code"
        for path in sources(package)
        for name, n in long_functions(path.read_text(encoding="utf-8")).items()
    ]
    assert not wrong, "\n".join(wrong)


def test_a_function_that_is_too_long_is_found():
    text = '"""Says\n' + "more\n" * 90 + '"""'
    body = ["    # why", "", *["    x = 1"] * (MOST_LINES - 1)]
    fine = "\n".join(["def fine():", f"    {text}", *body])
    assert long_functions(fine) == {}
    assert long_functions(f"{fine}\n    x = 2") == {"fine": MOST_LINES + 1}
