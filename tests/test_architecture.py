"""Who may import whom, how long a function may be, and where the test of a module lies."""

import ast
import graphlib
from collections.abc import Iterator
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
PACKAGES = ("tape_jax", "train", "research")
# Users of the library import its public names alone.
PUBLIC_ONLY = ("train", "research", "examples")


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


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the lines of code of a function: no docstring, comment or blank line."""
    first = function.body[0]
    docstring = ast.get_docstring(function) is not None
    skipped = range(first.lineno, first.end_lineno + 1) if docstring else ()
    own = range(function.lineno, function.end_lineno + 1)
    texts = [lines[number - 1].strip() for number in own if number not in skipped]
    return sum(bool(text) and not text.startswith("#") for text in texts)


def long_functions(source: str) -> dict[str, int]:
    """Return the functions of a file that are too long, with their lines of code."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    sizes = {node.name: code_lines(node, source.splitlines()) for node in found}
    return {name: n for name, n in sizes.items() if n > MOST_LINES}


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Sources by the module's dotted name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_of(path): path.read_text(encoding="utf-8") for path in paths}


def test_imports_point_one_way(files):
    wrong = [
        f"{module} imports {name}"
        for module, source in files.items()
        for name in imported(source)
        if not may_import(module, name)
    ]
    assert not wrong, "\n".join(wrong)
    assert not may_import("train.compare.plots", "tape_jax._src.core.files")
    assert not may_import("tape_jax._src.attention.api", "tape_jax._src.positions.protocol.Param")


def test_no_import_cycles(files):
    """Modules of types alone, and imports inside of functions, count too."""

    def target(name):
        return next((n for n in (name, name.rpartition(".")[0]) if n in files), None)

    imports = {
        module: {found for name in imported(source) if (found := target(name))}
        for module, source in files.items()
    }
    graphlib.TopologicalSorter(imports).prepare()


def test_no_function_is_too_long(files):
    for module, source in files.items():
        assert not long_functions(source), module
    fine = "\n".join(["def fine():", "    # why", "", *["    x = 1"] * (MOST_LINES - 1)])
    assert not long_functions(fine)
    assert long_functions(f"{fine}\n    x = 2") == {"fine": MOST_LINES + 1}
