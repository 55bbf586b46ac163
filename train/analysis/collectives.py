"""Reads from a compiled program which collectives it runs, on what, and over which mesh axes.

>>> compiled = jax.jit(step).lower(state, batch).compile()
>>> for found in collectives(compiled.as_text(), mesh):
...     print(found)
all-reduce over data, fsdp of f32[64,256], 65,536 bytes, 3 times: .../mlp/up/dot_general
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      kind: one of :data:`KINDS`.
      shapes: type and shape of each result on one device, such as ``("f32", (64, 256))``.
      groups: devices, numbered by their place in the mesh, that work together; for a permutation
        the pairs (source, target).
      axes: mesh axes along which the devices of a group differ; None without a mesh.
      times: how often one run of the program executes it, as if it took all branches; None if
        a loop's length is unknown.
      name: where in the traced program it comes from.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...] | None
    times: int | None
    name: str

    @property
    def bytes(self) -> int:
        """The bytes of the results on one device; for a reduce-scatter, those of its operand."""
        size = sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in self.shapes)
        return size * len(self.groups[0]) if self.kind == "reduce-scatter" else size

    @property
    def traffic(self) -> float:
        """Bytes that each device sends in one execution if its group is a ring."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        count = len(self.groups[0])
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.bytes * (count - 1) / count

    def __str__(self) -> str:
        shapes = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in self.shapes)
        over = "" if self.axes is None else f" over {', '.join(self.axes) or 'nothing'}"
        times = "an unknown number of times" if self.times is None else f"{self.times} times"
        return f"{self.kind}{over} of {shapes}, {self.bytes:,} bytes, {times}: {self.name}"


def collectives(text: str, mesh: Mesh | AbstractMesh | None = None) -> list[Collective]:
    """Returns the collectives of an optimised program.

    Args:
      text: the program, as ``compiled.as_text()`` of a jitted function gives it.
      mesh: the mesh that the program was compiled for; its order numbers the devices.

    Returns:
      Those whose groups have several devices, in the order of the text.

    Raises:
      ValueError: if a collective is written in an unknown way.
    """
    computations = dict(_computations(text))
    times = _times(computations)
    fused = {name for lines in computations.values() for line in lines
             if " fusion(" in line for name in _FUSED.findall(line)}  # fmt: skip
    found, channels = [], set()
    for name, lines in computations.items():
        for line in lines:
            collective = _parse(line, mesh, times.get(name))
            channel = _CHANNEL.search(line)
            # A collective's start, steps and end can be fused into separate computations.
            again = name in fused and channel is not None and channel[0] in channels
            if collective is not None and not again:
                found.append(collective)
                channels.add(channel and channel[0])
    return found


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.+?) ({'|'.join(KINDS)})(-start)?\((.*)$")
_CALLED = re.compile(
    r"(?:condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=\{?(%?[\w.\-]+(?:, %?[\w.\-]+)*)\}?"
)
_FUSED = re.compile(r"\bcalls=%?([\w.\-]+)")
_CHANNEL = re.compile(r"\bchannel_id=\d+")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_CONTEXT = (("u32", ()), ("s32", ()))
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields name and lines of each computation; the entry's name begins with ``ENTRY``."""
    name: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            name, lines = ("ENTRY " if line.startswith("ENTRY") else "") + head[1], []
        elif line.startswith("}") and name is not None:
            yield name, lines
            name = None
        elif name is not None:
            lines.append(line)


def _times(computations: dict[str, list[str]]) -> dict[str, int | None]:
    """Returns how often one run of the program runs each computation; None if unknown."""
    callers: dict[str, list[tuple[str, int | None]]] = {}
    for caller, lines in computations.items():
        for line in lines:
            body = _BODY.search(line)
            if body is not None:
                callers.setdefault(body[1], []).append((caller, _trips(line, computations)))
            for names in _CALLED.findall(line):
                for name in names.replace("%", "").split(", "):
                    callers.setdefault(name, []).append((caller, 1))

    @functools.cache
    def count(name: str) -> int | None:
        if name.startswith("ENTRY"):
            return 1
        parts = [(count(caller), trips) for caller, trips in callers.get(name, [])]
        if any(outer is None or trips is None for outer, trips in parts):
            return None
        return sum((outer or 0) * (trips or 0) for outer, trips in parts)

    return {name: count(name) for name in computations}


def _trips(line: str, computations: dict[str, list[str]]) -> int | None:
    """Returns a loop's trip count, from the compiler or else its condition; None if unknown.

    A loop of jax counts from 0 by 1, and its condition is that the count is less than a constant.
    """
    known = _TRIPS.search(line)
    if known is not None:
        return int(known[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", line)
    lines = computations.get(condition[1], []) if condition else []
    root = next((x for x in lines if x.lstrip().startswith("ROOT")), "")
    bound = re.search(r" compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", root)
    for x in lines:
        constant = re.match(r"\s*%?([\w.\-]+) = s32\S* constant\((\d+)\)", x)
        if bound and constant and constant[1] == bound[1]:
            return int(constant[2])
    return None


def _parse(line: str, mesh: Any, times: int | None) -> Collective | None:
    match = _OPERATION.match(line)
    if match is None:
        return None
    result, kind, started, rest = match.groups()
    groups = _groups(rest, line, None if mesh is None else mesh.size)
    if all(len(set(group)) < 2 for group in groups):
        return None
    shapes = _shapes(result)
    if started and kind != "all-reduce":
        # The result of a start is (operands, results), followed by context in some cases.
        shapes = tuple(x for x in shapes if x not in _CONTEXT)
        shapes = shapes[len(shapes) // 2 :]
    name = re.search(r'op_name="([^"]*)"', line)
    return Collective(
        kind=kind,
        shapes=shapes,
        groups=groups,
        axes=None if mesh is None else _axes(groups, mesh),
        times=times,
        name=name[1] if name else "",
    )


def _shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (dtype, tuple(int(n) for n in sizes.split(",") if n))
        for dtype, sizes in _SHAPE.findall(text)
    )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.search(r"\d+", dtype)
    if number is None:
        raise ValueError(f"a collective of an unknown type {dtype!r}")
    return int(number[0])


def _groups(rest: str, line: str, devices: int | None) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that work together, or the pairs of a permutation."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", rest)
    if listed is not None and listed[1]:
        return tuple(
            tuple(int(n) for n in group.split(",") if n)
            for group in re.findall(r"\{([\d,]*)\}", listed[1])
        )
    if listed is not None and devices is not None:
        return (tuple(range(devices)),)
    named = _NAMED_GROUPS.search(rest)
    if named is not None:
        return _groups_of_axes(*named.groups())
    iota = re.search(rf"replica_groups=\[([\d,]+)\]<={_COUNT}", rest)
    if iota is None:
        raise ValueError(f"a collective whose groups of devices cannot be read: {line.strip()}")
    shape, *source = iota.groups()
    return tuple(map(tuple, _iota(*source).reshape(_numbers(shape)).tolist()))


# Groups as [number, size] of a transposed count, and as axes of a mesh or parts of them.
_COUNT = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_COUNTED = re.compile(_COUNT)
_NAMED_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? ?\{(.*?)\}")
_PART_OF_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(shape: str, transpose: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids if transpose is None else ids.transpose(_numbers(transpose))


def _groups_of_axes(mesh: str, order: str | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh such as ``'a'=2,'b'=4``; ``'b':(1)2`` is the outer half of b."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    count = math.prod(sizes.values())
    counted = _COUNTED.fullmatch(order or f"[{count}]")
    ids = _iota(*counted.groups()) if counted else np.array(_numbers(order or ""))
    # Each axis in three: before, inside and after the part along which devices work together.
    parts = {name: (1, 1, size) for name, size in sizes.items()}
    for name, before, size in _PART_OF_AXIS.findall(axes):
        inside = int(size) if size else sizes[name]
        outside = int(before) if before else 1
        parts[name] = (outside, inside, sizes[name] // (outside * inside))
    ids = ids.reshape([size for part in parts.values() for size in part])
    together = range(1, ids.ndim, 3)
    apart = [n for n in range(ids.ndim) if n not in together]
    width = math.prod(ids.shape[n] for n in together)
    return tuple(map(tuple, ids.transpose(*apart, *together).reshape(-1, width).tolist()))


def _axes(groups: tuple[tuple[int, ...], ...], mesh: Any) -> tuple[str, ...]:
    """Returns mesh axes along which the devices of some group differ."""
    sizes = tuple(mesh.shape.values())
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.array(group), sizes))
        differ |= (places != places[:, :1]).any(1)
    return tuple(name for name, d in zip(mesh.shape, differ, strict=True) if d)
