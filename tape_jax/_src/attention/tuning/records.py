"""Keeps this machine's measurements in the user's cache folder, and chooses by them.

One file holds the measurements for one kind of device and one state of everything that may
change the outcome: versions, the driver, compiler flags, the code of the implementations.
A process reads it only at its first call, so that all its programs agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention.request import Request
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import (
    FLOATS,
    choose,
    instance,
    number,
    positive,
    real,
    require,
    truth,
)
from tape_jax._src.core.files import cache_folder, write_atomically
from tape_jax._src.core.processes import broadcast_text

Array = jax.Array

COMMAND = "python -m tape_jax.tune"
FORMAT = "tape-jax attention measurements 3"
# Packages other than jax whose kernels, or whose compiler, are measured.
LIBRARIES = (
    "tokamax",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
)
# Variables that change what is compiled or how it computes; of XLA's flags these do not.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
WITHOUT_EFFECT = r"--xla_(?:dump|force_host_platform_device_count)\S*"
# What beats the default takes at most this much of its time in either direction. Between processes
# on a CPU times differ by more than one process shows: 0.83 in one was 1.13 in the next.
GAIN, CPU_GAIN = 0.95, 0.8
# How many times the logits of the measured case ``reference`` may have where it is not the default,
# and how many bytes they may take: every layer of a model keeps its own for the backward pass,
# which one call does not show.
REACH, MOST_BYTES = 2, 2**26
# The reason for leaving out an implementation without time left.
LATE = "not measured: no time left"


@dataclasses.dataclass(frozen=True, order=True)
class CallShape:
    """The shape of a causal call of attention with as many queries as keys.

    Attributes:
      head_dim: of queries, keys and values.
      length: queries, and keys.
      dtype: name of the type of queries, keys and values.
      state: whether a state is attended; it is in the rotary form.
      batch, heads, kv_heads: sequences, and heads of queries and of keys.
    """

    head_dim: int
    length: int
    dtype: str
    state: bool
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1

    @property
    def rows(self) -> int:
        """Query heads in all sequences."""
        return self.batch * self.heads

    @property
    def logits(self) -> int:
        """Query-key pairs of all heads and sequences."""
        return self.rows * self.length**2

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the type of the call."""
        return jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return (
            f"D {self.head_dim}, T {self.length}, {self.dtype}, {self.batch} x {heads} heads, "
            f"{'state' if self.state else 'no state'}"
        )

    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of q, k, v, and with a state e, which models keep in float32."""
        lead = (self.batch, self.length)
        found = [
            jax.ShapeDtypeStruct((*lead, heads, self.head_dim), self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]
        if self.state:
            kind = algebra.at_least_float32(self.dtype)
            found.append(jax.ShapeDtypeStruct(found[1].shape, kind))
        return tuple(found)

    def arrays(self, seed: int = 0) -> tuple[Array, ...]:
        """Random q, k, v, and with a state e: complex numbers of length about 1."""
        rng = np.random.default_rng(seed)
        found = [rng.normal(size=x.shape).astype(np.float32) for x in self.structs()]
        if self.state:
            radius, angle = np.split(found[3], 2, axis=-1)
            radius, angle = 1 + radius / 10, 3 * angle
            found[3] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], -1)
        return tuple(jnp.asarray(x, y.dtype) for x, y in zip(found, self.structs(), strict=True))

    @classmethod
    def of(cls, request: Request) -> CallShape | None:
        """Return the shape of a call on one device; None if it has far more keys than queries.

        The shares that a mesh gives to a device are counted by the rules of the call's sharding.
        """
        queries, keys = request.query_length, request.key_length
        if max(queries, keys) > 2 * min(queries, keys):
            return None
        shards = {"batch": 1, "heads": 1}
        if request.sharding is not None:
            shards = {name: request.sharding.shards(name) for name in shards}
        heads = max(1, request.query_heads // shards["heads"])
        return cls(
            head_dim=request.q.shape[-1],
            length=math.isqrt(queries * keys),
            dtype=request.q.dtype.name,
            state=request.state is not None and request.attend_state,
            batch=max(1, request.q.shape[0] // shards["batch"]),
            heads=heads,
            kv_heads=max(1, heads // request.groups),
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """The outcome of measuring an implementation at a shape.

    Attributes:
      implementation: its name.
      forward: seconds of the forward pass; infinite if it was not timed.
      gradients: seconds of the forward and backward pass; likewise.
      spreads: half the distance of the quartiles of both, relative to them.
      error: the largest error against the reference; None if it was not compared.
      struck: why it must not, or need not, be taken; None if it may.
      wrong: whether that is because it disagrees with the reference.
    """

    implementation: str
    forward: float = math.inf
    gradients: float = math.inf
    spreads: tuple[float, float] = (0.0, 0.0)
    error: float | None = None
    struck: str | None = None
    wrong: bool = False

    @property
    def timed(self) -> bool:
        """True if the implementation was timed both ways and may be taken."""
        return math.isfinite(self.score) and self.struck is None

    def clearly_faster(self, other: Measured, gain: float) -> bool:
        """Return whether it takes at most ``gain`` of another's time, both ways, and not by noise.

        The medians are further apart than the quartiles are from them.
        """
        mine, theirs = ((x.forward, x.gradients) for x in (self, other))
        return all(
            a <= gain * b and a * (1 + x) <= b * (1 - y)
            for a, b, x, y in zip(mine, theirs, self.spreads, other.spreads, strict=True)
        )

    @property
    def score(self) -> float:
        """The geometric mean of both times: the smaller is better.

        A trace does not know whether it will be differentiated, so that one choice serves both. A
        quotient of two scores gives each direction the same say, however long it takes.
        """
        return math.sqrt(self.forward * self.gradients)


Table = dict[CallShape, list[Measured]]


def finished(results: Iterable[Measured]) -> bool:
    """Return whether there was time for all implementations."""
    return all(result.struck != LATE for result in results)


def telling(table: Table) -> Table:
    """Return the cases by which calls may go: not those in which time ended before any timing."""
    return {
        shape: results
        for shape, results in table.items()
        if finished(results) or any(result.timed for result in results)
    }


def folder() -> Path:
    """Return the folder of the files with measurements."""
    return cache_folder() / "attention"


def path() -> Path:
    """Return this machine's file, which may not exist."""
    digest = hashlib.sha256(json.dumps(key(), sort_keys=True).encode()).hexdigest()
    return folder() / f"{_slug()}-{digest[:12]}.json"


@functools.cache
def key() -> dict[str, Any]:
    """Return everything that may change the outcome of measurements."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    flags = {name: re.sub(WITHOUT_EFFECT, "", os.environ.get(name, "")) for name in VARIABLES}
    return {
        "device": device(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "libraries": versions,
        "driver": _first_match("/proc/driver/nvidia/version", r"^NVRM version:\s*(.+)$"),
        "cudnn": _cudnn(),
        "runtime": jax.local_devices()[0].client.platform_version,
        "flags": {name: sorted(given.split()) for name, given in flags.items()},
        "64-bit types": jax.dtypes.canonicalize_dtype(np.int64) == np.int64,
        "precision of products": str(getattr(jax.config, "jax_default_matmul_precision", None)),
        "kernels": source_hash(),
    }


@functools.cache
def device() -> str:
    """The kind of device; of a CPU the model and the cores that this process may use."""
    kind = jax.local_devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = _first_match("/proc/cpuinfo", r"^(?:model name|CPU part)\s*:\s*(.+)$")
    return f"{kind} {found or platform.processor() or platform.machine()}, {cores} cores"


def _cudnn() -> str:
    """The version of the cuDNN that jax has loaded; empty without one."""
    try:
        from jax._src.lib import cuda_versions

        return "" if cuda_versions is None else str(cuda_versions.cudnn_get_version())
    except (ImportError, AttributeError, RuntimeError):
        return ""


def _first_match(file: str, pattern: str) -> str:
    """Return the first match of a pattern in a file; empty if there is none."""
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def _slug() -> str:
    return "-".join(re.findall(r"\w+", device())).lower()


@functools.cache
def source_hash() -> str:
    """A hash of the code of all implementations."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def write(table: Table) -> Path:
    """Replaces this machine's file."""
    to = path()
    to.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(to, dumps(table))
    return to


def read() -> tuple[Table | None, dict[Path, str]]:
    """Read the measurements of this machine, or None, and by file why others are not used."""
    ignored: dict[Path, str] = {}
    table = None
    try:
        files = sorted(folder().glob(f"{_slug()}-*.json"))
    except OSError:  # There is no such folder, or it is somebody else's.
        return None, ignored
    for file in files:
        try:
            found = loads(file.read_text(encoding="utf-8"))
            require(file == path(), "its name is another file's")
        except (ValueError, OSError) as error:
            ignored[file] = str(error)
        else:
            table = found
    return table, ignored


def dumps(table: Table) -> str:
    """The content of a file."""
    cases = [
        {"shape": dataclasses.asdict(shape), "results": [_record(x) for x in results]}
        for shape, results in sorted(table.items())
    ]
    return json.dumps({"format": FORMAT, "key": key(), "cases": cases}, indent=1) + "\n"


def loads(text: str, *, check: bool = True) -> Table:
    """The measurements in the content of a file.

    Args:
      text: the content.
      check: whether they must be of this machine as it is now.

    Raises:
      ValueError: if it is damaged, not of this format, or not of this machine (if ``check``).
    """
    try:
        record = json.loads(text)
        require(
            isinstance(record, dict) and record.get("format") == FORMAT,
            f"not a file of this format, {FORMAT!r}",
        )
        for name, here in key().items() if check else ():
            theirs = record["key"].get(name)
            require(theirs == here, f"of another {name}: {str(theirs)[:60]}, here {str(here)[:60]}")
        return _table(record["cases"])
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"damaged: {error}") from error


def _table(cases: Any) -> Table:
    try:
        return {_shape(each["shape"]): [*map(_result, each["results"])] for each in cases}
    except ValueError as error:
        raise ValueError(f"damaged: {error}") from error


def _shape(record: Mapping[str, Any]) -> CallShape:
    shape = CallShape(**record)
    choose("dtype", shape.dtype, FLOATS)
    truth("state", shape.state)
    for name in ("head_dim", "length", "batch", "heads", "kv_heads"):
        positive(name, getattr(shape, name))
    return shape


def _record(result: Measured) -> dict[str, Any]:
    """A result in JSON types, which have no infinity."""
    record = dataclasses.asdict(result)
    return {name: None if value == math.inf else value for name, value in record.items()}


def _result(record: Mapping[str, Any]) -> Measured:
    def seconds(name: str) -> float:
        given = number(name, record[name], optional=True)
        return math.inf if given is None else given

    first, second = (real("spreads", x) for x in record["spreads"])
    return Measured(
        instance("implementation", record["implementation"], str),
        seconds("forward"),
        seconds("gradients"),
        (first, second),
        number("error", record["error"], optional=True),
        instance("struck", record["struck"], str, optional=True),
        truth("wrong", record["wrong"]),
    )


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keeps other processes from measuring on this kind of device at the same time."""
    try:
        import fcntl
    except ImportError:  # Not on Windows.
        yield
        return
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / f"{_slug()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_agreed: str | None = None


class Known(NamedTuple):
    """The measurements by which calls go.

    Attributes:
      table: cases that tell something (:func:`telling`), without what is wrong.
      wrong: by the bytes of a type, what disagrees in any measured call of types of that width,
        and why, by name.
      note: for calls that are not near any of them.
    """

    table: Table
    wrong: dict[int, dict[str, str]]
    note: str


@functools.cache
def known() -> Known:
    """Return the measurements, read once.

    A warning names files that do not count.
    """
    if _agreed is not None:
        return _known(loads(_agreed, check=False) if _agreed else None)
    if jax.process_count() > 1:
        return Known({}, {}, "nothing is read where several processes might not agree")
    table, ignored = read()
    for file, why in ignored.items() if table is None else ():
        warnings.warn(f"{file} is ignored: {why}. {COMMAND} measures again", stacklevel=2)
    return _known(table)


def _known(table: Table | None) -> Known:
    what = "no shape near this one" if table else "nothing"
    wrong: dict[int, dict[str, str]] = {}
    for shape, results in (table or {}).items():
        found = {x.implementation: x.struck or "" for x in results if x.wrong}
        wrong.setdefault(shape.itemsize, {}).update(found)
    right = {
        shape: [x for x in results if x.implementation not in wrong[shape.itemsize]]
        for shape, results in telling(table or {}).items()
    }
    return Known(right, wrong, f"{what} was measured here ({COMMAND} does)")


def forget() -> None:
    """Lets the next call read the file again. Compiled programs do not change."""
    adopt(None)


def agree() -> None:
    """Lets all processes use the measurements of the first one.

    Call it in all processes, before their first attention call and outside ``jax.jit``. Without
    it, several processes use no measurements: if their programs differed, they would wait for each
    other forever.
    """
    if jax.process_count() == 1:
        return
    text = ""
    if jax.process_index() == 0:
        table, _ = read()
        text = dumps(table) if table else ""
    adopt(broadcast_text(text or " ").strip())


def adopt(text: str | None) -> None:
    """Uses the given content instead of the file; empty content means no measurements."""
    global _agreed
    _agreed = text
    known.cache_clear()


class Ranking(NamedTuple):
    """The measurements at the shape nearest to a call's.

    Attributes:
      shape: that shape.
      order: what may be taken, the best first.
      struck: why others were not timed, by name, apart from what is wrong (:class:`Known`).
    """

    shape: CallShape
    order: list[Measured]
    struck: dict[str, str]


def ranking(request: Request, default: Callable[[Request], str]) -> Ranking | None:
    """Return the measurements at the shape nearest to a call's; None if nothing near was measured.

    Args:
      request: the call.
      default: the implementation that a call takes without measurements.
    """
    shape = CallShape.of(request)
    near = None if shape is None else nearest(shape, known().table)
    if shape is None or near is None:
        return None
    results, usual = known().table[near], default(request)
    size = shape.logits * request.accumulator_dtype.itemsize
    untried = shape.logits > REACH * near.logits or size > MOST_BYTES
    if untried and usual != "reference":
        results = [x for x in results if x.implementation != "reference"]
    struck = {x.implementation: x.struck for x in results if x.struck is not None}
    return Ranking(near, ranked(results, usual), struck)


def nearest(shape: CallShape, table: Iterable[CallShape]) -> CallShape | None:
    """Return the nearest measured shape; None if all are of another kind or much longer.

    Only shapes of the same type width, and alike with or without a state, compare. Of
    these, those of the nearest head dimension count, and then the nearest in length; four
    times the heads count as much as twice the length. A call shorter than half of all these is
    unknown, because other costs dominate it.
    """

    def apart(other: CallShape, name: str) -> float:
        return abs(math.log2(getattr(shape, name) / getattr(other, name)))

    def distance(other: CallShape) -> tuple[float, CallShape]:
        return apart(other, "length") + apart(other, "rows") / 2, other

    alike = [x for x in table if x.state == shape.state and x.itemsize == shape.itemsize]
    least = min((apart(x, "head_dim") for x in alike), default=0.0)
    alike = [x for x in alike if apart(x, "head_dim") == least]
    if not alike or 2 * shape.length < min(x.length for x in alike):
        return None
    return min(alike, key=distance)


def ranked(results: Iterable[Measured], default: str) -> list[Measured]:
    """Return the implementations that were timed, best first.

    Only those faster in both directions, by more than noise, precede the default.
    """
    timed = sorted((x for x in results if x.timed), key=lambda x: (x.score, x.implementation))
    base = next((x for x in timed if x.implementation == default), None)
    if base is None:
        return timed
    gain = CPU_GAIN if jax.default_backend() == "cpu" else GAIN
    first = [x for x in timed if x.clearly_faster(base, gain)]
    return [*first, base, *(x for x in timed if x is not base and x not in first)]
