"""Who may import whom, and how long a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

MOST_LINES = 500
OURS = ("tape_jax", "train", "research", "configs", "benchmarks", "tests", "docs", "examples")

# The rooms of a package: each may import itself and those before it; rooms side by side do not know
# each other.
LAYERS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "tape_jax._src": (
        "core",
        ("positions", "attention"),
        "model",
        ("pretrained", "adapt", "parity"),
    ),
    "train": (
        ("checks", "files"),
        "data",
        "process",
        "evaluation",
        "tasks",
        "experiment",
        "training",
        "compare",
        "analysis",
        "commands",
        "main",
    ),
}
# What else of this repository a package may import.
BELOW = {"tape_jax._src": (), "train": ("tape_jax", "configs")}

# To be ended: a description of a model asks the registries of encodings and of implementations
# whether they know a name, and is what encodings are given.
LATE = {
    ("core", "model"),
    ("positions", "model"),
    ("attention", "model"),
    ("positions", "attention"),
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package.replace(".", "/")).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it, but for those of types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _for_types(node)]
    left_out = {inner for node in types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def _for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def may_import(package: str, here: str, name: str) -> bool:
    """Whether the room ``here`` of a package may import what has the dotted name."""
    if not name.startswith(f"{package}."):
        theirs = name.partition(".")[0]
        return theirs not in OURS or theirs in BELOW[package]
    room = name.removeprefix(f"{package}.").partition(".")[0]
    if package == "tape_jax._src" and (here, room) in LATE:
        return True
    return room == here or level(package, room) < level(package, here)


def room_of(package: str, path: Path) -> str:
    return path.relative_to(ROOT / package.replace(".", "/")).parts[0].removesuffix(".py")


def level(package: str, room: str) -> int:
    """How many rooms lie below one."""
    return next(
        n
        for n, rooms in enumerate(LAYERS[package])
        if room in ((rooms,) if isinstance(rooms, str) else rooms)
    )


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        if (here := room_of(package, path)) != "__init__"
        for name in imported(path)
        if not may_import(package, here, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_what_points_the_other_way_is_found():
    assert may_import("train", "training", "train.training.step")
    assert may_import("train", "training", "train.data.sources")
    assert not may_import("train", "training", "train.compare.plots")
    assert not may_import("train", "commands", "research.claims")
    assert may_import("tape_jax._src", "model", "tape_jax._src.positions.tape.encoding.Tape")
    assert not may_import("tape_jax._src", "attention", "tape_jax._src.positions.protocol.Param")
    assert not may_import("tape_jax._src", "model", "tape_jax.testing")


@pytest.mark.parametrize("package", LAYERS)
def test_no_file_is_too_long(package):
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)
    }
    assert {path: n for path, n in lengths.items() if n > MOST_LINES} == {}
