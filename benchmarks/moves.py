"""Counts the instructions of a compiled program that only move numbers, by its optimised HLO.

An instruction moves if it only cuts, joins, casts and reorders. It is counted as often as the loops
around it run, with the bytes that it writes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

# Opcodes without work of their own.
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "after-all"}
# Kinds of moves, by what marks them; an instruction has the first kind that fits.
KINDS = {
    "into stacks": {"dynamic-update-slice", "scatter"},
    "out of stacks": {"dynamic-slice"},
    "transposes": {"transpose"},
    "joins and cuts": {"concatenate", "pad", "slice"},
    "casts": {"convert"},
    "copies": {"copy", "copy-start", "reshape", "broadcast"},
}
MOVING = set().union(*KINDS.values()) | {"select", "compare", "and"}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2}
BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^ +(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
SCALAR = re.compile(r"\w+\[\]")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*))?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO.

    Attributes:
      root: whether its computation returns it.
      name, shape, opcode: as written.
      rest: its operands and attributes.
    """

    root: bool
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> str | None:
        """The computation that it runs."""
        found = CALLED.search(self.rest)
        return found and found[1]


@dataclasses.dataclass(frozen=True)
class Move:
    """Instructions that only move numbers.

    Attributes:
      count: how often one runs.
      written: bytes, of all of them.
    """

    count: int = 0
    written: int = 0


def moves(text: str) -> dict[str, Move]:
    """Returns the moves of a program by kind, and under ``all`` all instructions that it runs.

    Args:
      text: of the compiled HLO module.

    Raises:
      ValueError: if there is no entry in it.
    """
    parts, entry = _computations(text)
    if entry is None:
        raise ValueError("the text has no ENTRY computation; expected compiled HLO")
    shapes = {one.name: one.shape for body in parts.values() for one in body}
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for one, turns in _executed(parts, entry, 1):
        fused = one.opcode in ("fusion", "fusion-start")
        body = parts[one.called or ""] if fused else [dataclasses.replace(one, root=True)]
        kinds = ["all"]
        if (kind := _kind(body, shapes)) is not None:
            kinds.append(kind)
        for name in kinds:
            found[name][0] += turns
            found[name][1] += turns * _written(body)
    return {name: Move(*found[name]) for name in ("all", *KINDS)}


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """Returns instructions by computation, and the entry's name."""
    parts: dict[str, list[Instruction]] = {}
    entry, name = None, ""
    for line in text.splitlines():
        if begun := COMPUTATION.match(line):
            name = begun[2]
            parts[name], entry = [], name if begun[1] else entry
        elif found := INSTRUCTION.match(line):
            parts[name].append(Instruction(bool(found[1]), *found.groups()[1:]))
    return parts, entry


def _executed(
    parts: dict[str, list[Instruction]], name: str, turns: int
) -> Iterator[tuple[Instruction, int]]:
    """Yields each instruction that runs by itself, and how often it runs."""
    for one in parts[name]:
        if one.opcode == "while":
            count = TURNS.search(one.rest)
            yield from _executed(parts, one.called or "", turns * int(count[1] if count else 1))
        elif one.opcode == "call":
            yield from _executed(parts, one.called or "", turns)
        elif one.opcode == "conditional":
            for branch in re.findall(r"[\w.\-]+", BRANCHES.search(one.rest)[1]):
                yield from _executed(parts, branch, turns)
        elif one.opcode not in FREE and not one.opcode.endswith("-done"):
            yield one, turns


def _kind(body: list[Instruction], shapes: dict[str, str]) -> str | None:
    """Returns the kind of a move; None for what computes."""
    # Scalars only compute where to cut.
    opcodes = {one.opcode for one in body if one.root or not SCALAR.match(one.shape)} - FREE
    if not opcodes or opcodes - MOVING:
        return None
    relaid = any(one.opcode == "copy" and _relaid(one, shapes) for one in body)
    opcodes |= {"transpose"} if relaid else set()
    return next((kind for kind, marks in KINDS.items() if marks & opcodes), None)


def _relaid(one: Instruction, shapes: dict[str, str]) -> bool:
    """Returns whether a copy changes the order of its axes in memory."""
    given = [shapes[name] for name in one.operands if name in shapes]
    layouts = [ARRAY.search(shape) for shape in (one.shape, *given)]
    return len({found[3] for found in layouts if found}) > 1


def _written(body: list[Instruction]) -> int:
    """Returns the bytes written; an update of a stack counts its part, not the whole stack."""
    by_name = {one.name: one for one in body}

    def size(one: Instruction) -> int:
        inner = [by_name[name] for name in one.operands if name in by_name]
        if one.opcode == "tuple":
            return sum(map(size, inner))
        if one.opcode == "bitcast" and inner:
            return size(inner[0])
        if one.opcode == "dynamic-update-slice" and len(inner) > 1:
            return _size(inner[1].shape)
        return _size(one.shape)

    return sum(size(one) for one in body if one.root)


def _size(shape: str) -> int:
    return sum(
        BYTES.get(dtype, 0) * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes, _ in ARRAY.findall(shape)
    )
