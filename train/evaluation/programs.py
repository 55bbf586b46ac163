"""Runs a model on batches: plans memory, keeps results, measures time."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.evaluation.journal import Journal
from train.process import compile_in_turn
from train.training.metrics import compiling_seconds

# The share of memory that stays free.
RESERVED = 0.08


@dataclasses.dataclass
class Speed:
    """The time that running took, and the tokens that it read and wrote.

    Attributes:
      tokens: that were read and written, padding left out.
      seconds: in all.
      compiling: of these, for tracing and compiling.
    """

    tokens: int = 0
    seconds: float = 0.0
    compiling: float = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Adds the time that the block takes."""
        begun, compiled = time.monotonic(), compiling_seconds()
        yield
        spent = time.monotonic() - begun
        self.seconds += spent
        # Programs that are traced inside others are counted twice.
        self.compiling += min(compiling_seconds() - compiled, spent)

    def __str__(self) -> str:
        running = self.seconds - self.compiling
        if running <= 0:
            return "nothing was left to ask"
        share = self.compiling / self.seconds
        return f"{self.tokens / running:,.0f} tokens/s; {share:.0%} of the time went into compiling"


class Memory(NamedTuple):
    """Bytes on one device while a program runs.

    Attributes:
      parameters: those and all other inputs.
      between: everything made on the way, including the cache.
      limit: what the device has; None: unknown.
    """

    parameters: int
    between: int
    limit: int | None

    @property
    def total(self) -> int:
        """The bytes that the program takes in all."""
        return self.parameters + self.between

    def __str__(self) -> str:
        of = "" if self.limit is None else f" of {self.limit / 1e9:.2f} GB"
        return (
            f"memory of a device: {self.total / 1e9:.2f} GB{of}, {self.parameters / 1e9:.2f} GB of "
            "them parameters"
        )

    def check(self, batch: int, width: int) -> None:
        """Raises ValueError with advice if a batch of texts of this width does not fit."""
        if self.limit is None or self.total <= self.limit * (1 - RESERVED):
            return
        room = max(0.0, self.limit * (1 - RESERVED) - self.parameters)
        advice = int(batch * room / self.between)
        raise ValueError(
            f"{batch} texts of {width:,} tokens at a time do not fit: {self}; take at most "
            f"{max(advice, 1)} at a time, run prompts in chunks, or split the model over more "
            "devices"
        )


@dataclasses.dataclass
class Programs:
    """Compiled programs by shape, each of which fits into the memory.

    Attributes:
      memory: of the largest so far; None: there is none.
      speed: time and tokens so far.
      kept: where :meth:`results` keeps and finds its results; None: nowhere.
    """

    memory: Memory | None = None
    speed: Speed = dataclasses.field(default_factory=Speed)
    kept: KeptResults | None = None
    _compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def run(self, function: Callable[..., Any], *given: Any) -> Any:
        """Calls a hashable function; its second argument is the tokens [B, T] of a batch.

        Raises:
          ValueError: a batch that does not fit into the memory.
        """
        key = function, jax.tree.map(jnp.shape, given[1:])
        if key not in self._compiled:
            program = compile_in_turn(_call.lower(function, *given))
            memory = _memory(program)
            memory.check(*given[1].shape)
            self.memory = max(self.memory or memory, memory, key=lambda found: found.total)
            self._compiled[key] = program
        return self._compiled[key](*given)

    def results(
        self,
        name: str,
        function: Callable[..., Any],
        variables: Any,
        batches: Iterable[tuple[Sequence[np.ndarray], int]],
    ) -> Iterator[np.ndarray]:
        """Yields a function's result for each batch; kept results are not computed again.

        Each batch starts before the previous result is fetched.

        Args:
          name: of the computation; it and the batch identify a kept result.
          function: ``function(variables, *arrays)``, which is hashable.
          variables: of the model.
          batches: arrays, the first of them tokens [B, T], and how many tokens these are without
            padding.

        Raises:
          ValueError: a batch that does not fit into the memory.
        """
        waiting: tuple[str, Any] | None = None
        for arrays, tokens in batches:
            key, found = self.kept_result(name, arrays)
            if found is None:
                with self.speed.measured():
                    found = self.run(function, variables, *arrays)
                self.speed.tokens += tokens
            if waiting is not None:
                yield self._fetched(*waiting)
            waiting = key, found
        if waiting is not None:
            yield self._fetched(*waiting)

    def kept_result(self, name: str, arrays: Sequence[np.ndarray]) -> tuple[str, Any]:
        """Returns the key that identifies a batch's result, and the result, if kept."""
        if self.kept is None:
            return "", None
        key = _digest(name, arrays)
        return key, self.kept.found.get(key)

    def keep(self, key: str, result: np.ndarray) -> None:
        """Keeps a result, if results are kept, and returns when it is on disk."""
        if self.kept is not None and key not in self.kept.found:
            self.kept.add(key, result)

    def _fetched(self, key: str, result: Any) -> np.ndarray:
        if isinstance(result, np.ndarray):
            return result
        with self.speed.measured():
            fetched = np.asarray(result)
        self.keep(key, fetched)
        return fetched

    def __str__(self) -> str:
        planned = "" if self.memory is None else f"\nPlanned {self.memory}."
        return f"Speed: {self.speed}.{planned}"


class KeptResults:
    """Arrays by digest, on the disk.

    Attributes:
      found: what is there.
    """

    def __init__(self, journal: Journal):
        """
        Args:
          journal: where they are.

        Raises:
          ValueError: a damaged line.
        """
        self._journal = journal
        self.found: dict[str, np.ndarray] = dict(journal.read(_kept))

    def add(self, key: str, result: np.ndarray) -> None:
        """Keeps a result, and returns when it is on disk."""
        values = base64.b64encode(np.ascontiguousarray(result).tobytes()).decode()
        shape = list(result.shape)
        self._journal.add(
            [{"batch": key, "dtype": result.dtype.str, "shape": shape, "values": values}]
        )
        self.found[key] = result


def _kept(line: dict[str, Any]) -> tuple[str, np.ndarray]:
    """The digest and the array of a line."""
    values = np.frombuffer(base64.b64decode(line["values"]), line["dtype"])
    return line["batch"], values.reshape(line["shape"])


def _digest(name: str, arrays: Sequence[np.ndarray]) -> str:
    """Returns the digest that identifies the result of a batch."""
    made = hashlib.sha256(name.encode())
    for array in arrays:
        made.update(f"{array.dtype.str}{array.shape}".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()[:32]


# One program for equal functions, whoever calls them.
@functools.partial(jax.jit, static_argnums=0)
def _call(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


def _memory(program: Any) -> Memory:
    """Returns the memory that a compiled program takes, and that of the device."""
    found = program.memory_analysis()
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu":
        # All devices of a CPU share its memory.
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    between = found.temp_size_in_bytes + found.output_size_in_bytes
    return Memory(found.argument_size_in_bytes, between, limit)
