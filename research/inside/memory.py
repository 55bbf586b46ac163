"""The memory that a compiled program takes, by the compiler's plan."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program.

    Attributes:
      arguments, outputs: what it is given and returns.
      shared: part of the outputs that overwrites arguments.
      temporary: in between.
    """

    arguments: int
    outputs: int
    shared: int
    temporary: int

    @property
    def moved(self) -> int:
        """The least that is read and written: arguments and outputs, once each."""
        return self.arguments + self.outputs

    @property
    def total(self) -> int:
        """Everything that is there while the program runs."""
        return self.moved - self.shared + self.temporary

    @classmethod
    def of(cls, program: jax.stages.Compiled) -> Memory | None:
        """The plan of a compiled program; None where the backend has none."""
        plan = program.memory_analysis()
        if plan is None:
            return None
        return cls(
            plan.argument_size_in_bytes,
            plan.output_size_in_bytes,
            plan.alias_size_in_bytes,
            plan.temp_size_in_bytes,
        )
