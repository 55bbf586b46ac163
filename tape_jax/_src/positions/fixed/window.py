"""A window as an encoding, which combines with others and may differ from layer to layer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tape_jax._src.core.checks import set_field, window
from tape_jax._src.positions.protocol import Encoding


def narrower(one: Any, other: Any) -> int | tuple[int, int] | None:
    """Returns the window that two, each an integer, a pair or None, leave together."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    left, right = zip(*(x if isinstance(x, tuple) else (x, x) for x in (one, other)), strict=True)
    return min(left), min(right)


@dataclasses.dataclass(frozen=True)
class Window(Encoding):
    """Tokens see only those nearby (sliding-window attention, Beltagy et al. 2020).

    Alone it tells positions apart by where windows end; usually you combine it: ``"rope+window"``.

    Attributes:
      size: as ``local_window_size`` of :class:`tape_jax.ModelConfig`: how many tokens before and
        after its own a token sees, an integer or a pair ``(left, right)``.
    """

    kind: ClassVar[str] = "window"
    acts_on: ClassVar[tuple[str, ...]] = ("window",)
    size: Any = 512

    def __post_init__(self):
        size = window(f"{self.kind}: size", self.size)
        if size is None:
            raise ValueError(f"{self.kind}: size must be an integer or a pair of them; got None")
        set_field(self, "size", size)

    @property
    def reads_positions(self) -> bool:
        return False

    @property
    def local_window_size(self) -> int | tuple[int, int] | None:
        return self.size
