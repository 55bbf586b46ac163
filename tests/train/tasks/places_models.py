"""What an evaluation needs of a trained model."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Model(NamedTuple):
    model: Any
    variables: Any
    apply: Callable
    max_length: int | None
