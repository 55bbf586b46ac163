"""Questions and answers in digits and a few signs: vocabulary and writing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from train.checks import require
from train.tasks.questions import QuestionTask, Written


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Characters as token ids: PAD 0, UNK 1, BOS 2, EOS 3, then ``characters`` in order."""

    characters: str = "0123456789+-x= "

    SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
    PAD, UNK, BOS, EOS = range(4)

    @property
    def size(self) -> int:
        """The number of token ids."""
        return len(self.SPECIAL) + len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without BOS and EOS.

        Raises:
          ValueError: a character outside the vocabulary.
        """
        for position, character in enumerate(text):
            require(
                character in self.characters,
                f"character {character!r} at position {position} of {text!r} is not in the "
                f"vocabulary {self.characters!r}",
            )
        return [len(self.SPECIAL) + self.characters.index(c) for c in text]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of ``tokens``; special tokens appear by name, such as ``<eos>``.

        An id outside the vocabulary, which a wider model may produce, appears as ``<unk>``.
        """
        symbols = dict(enumerate((*self.SPECIAL, *self.characters)))
        return "".join(symbols.get(int(t), self.SPECIAL[self.UNK]) for t in tokens)


VOCABULARY = Vocabulary()

Part = int | np.ndarray


def write(prompt: Sequence[Part], answer: Sequence[Part], width: int) -> Written:
    """Joins the parts of prompts and their answers.

    Args:
      prompt: each part is tokens [B, W], possibly with ``PAD`` in between, or one token for all.
      answer: likewise.
      width: tokens of a row of the result.

    Returns:
      tokens uint8 [B, width], padded at the end; the length [B] of each prompt; and that of prompt
      and answer together.
    """
    parts = [*prompt, *answer]
    count = next(len(part) for part in parts if not isinstance(part, int))
    columns = [np.full((count, 1), p, np.uint8) if isinstance(p, int) else p for p in parts]
    spread = np.concatenate(columns, axis=1)
    prompt_width = sum(column.shape[1] for column in columns[: len(prompt)])
    present = spread != VOCABULARY.PAD
    lengths = present.sum(axis=1)
    tokens = np.full((count, width), VOCABULARY.PAD, np.uint8)
    tokens[np.arange(width) < lengths[:, None]] = spread[present]
    return tokens, present[:, :prompt_width].sum(axis=1), lengths


class DigitQuestions(QuestionTask):
    """Questions in the characters of :data:`VOCABULARY`, answered by digits and EOS."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return VOCABULARY.size

    @property
    def digit_ids(self) -> tuple[int, ...]:
        """Token ids of the digits 0..9, for encodings that count places inside a number."""
        return tuple(VOCABULARY.encode("0123456789"))

    @property
    def writing(self) -> dict[str, int | bool]:
        """Fields of an encoding that couples the positions of numbers."""
        plus, equals = VOCABULARY.encode("+=")
        return {"plus": plus, "equals": equals, "reverse_operands": True}

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text, special ones by name."""
        return VOCABULARY.decode(tokens)

    def ordinary_answer(self, digits: str) -> str:
        """The ordinary writing of an answer from its digits in trained order."""
        return digits[::-1]

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the answer of the tokens after ``=``, in ordinary writing.

        Raises:
          ValueError: not digits followed by EOS.
        """
        written = VOCABULARY.decode(tokens)
        match = re.match(rf"([0-9]+){VOCABULARY.SPECIAL[VOCABULARY.EOS]}", written)
        if match is None:
            raise ValueError(f"the answer is not a number followed by <eos>: {written!r}")
        return self.ordinary_answer(match[1])


def read_operands(text: str, pattern: str, expected: str) -> re.Match[str]:
    """Matches a question with ``pattern``, allowing spaces around it and a final ``=``.

    Raises:
      ValueError: a character outside the vocabulary, or a text other than ``expected``.
    """
    VOCABULARY.encode(text)
    match = re.fullmatch(rf" *{pattern} *=? *", text)
    if match is None:
        raise ValueError(f"expected {expected}; got {text!r}")
    return match
