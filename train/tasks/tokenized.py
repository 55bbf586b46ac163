"""What tasks over text have in common: their tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from train.checks import require
from train.data import tokenizers
from train.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """The tokenizer of a task.

    Making one does not read the tokenizer's content if ``vocab_size`` is given, so that configs can
    be checked where it is not.

    Attributes:
      tokenizer: ``bytes``, or the path of a tokenizer (see :mod:`train.data.tokenizers`).
      tokenizer_fingerprint: that of the tokenizer; filled in if the tokenizer is there. A run
        records it, and a different tokenizer is then an error.
      vocab_size: number of token ids; 0: the tokenizer's.
    """

    tokenizer: str = "bytes"
    tokenizer_fingerprint: str | None = None
    vocab_size: int = 0

    def __post_init__(self):
        found = tokenizers.fingerprint(self.tokenizer)
        require(
            found is None or self.tokenizer_fingerprint in (None, found),
            f"the tokenizer {self.tokenizer!r} has the fingerprint {found}, but "
            f"{self.tokenizer_fingerprint} was used: it is another tokenizer",
        )
        if found is not None:
            object.__setattr__(self, "tokenizer_fingerprint", found)
        if not self.vocab_size:
            object.__setattr__(self, "vocab_size", self.codec.vocab_size)

    @property
    def codec(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          ValueError: if there is none, or it has more tokens than ``vocab_size``.
        """
        codec = tokenizers.load(self.tokenizer)
        require(
            codec.vocab_size <= (self.vocab_size or codec.vocab_size),
            f"vocab_size = {self.vocab_size} is too small for the tokenizer {self.tokenizer!r}, "
            f"which has {codec.vocab_size} tokens",
        )
        return codec

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, after the token that starts a document if there is one."""
        codec = self.codec
        return [*([] if codec.bos is None else [codec.bos]), *codec.encode(text)]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text, special ones by name."""
        return self.codec.decode(tokens)
