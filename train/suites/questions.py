"""Questions of a suite, fitted to a number of tokens.

As in RULER, length counts the prompt and the room for the answer. With bytes, a prompt fills its
room to the last byte if its text is endless; other tokenizers leave one token in a hundred, and
lists end before a word that would not fit.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import numpy as np

from train.checks import require
from train.data.synthetic import generator
from train.data.tokenizers import Tokenizer
from train.suites import SuiteQuestion, SuiteTask
from train.suites.background import Background

# How often a question is rewritten, a little longer or shorter, and the share that may stay empty.
_TRIES = 4
_SLACK = 0.01


class AskedSample(NamedTuple):
    """A question in tokens.

    Attributes:
      question: in writing.
      tokens: of the prompt, int32 [P].
    """

    question: SuiteQuestion
    tokens: np.ndarray


def ask(
    name: str,
    task: SuiteTask,
    codec: Tokenizer,
    background: Background,
    length: int,
    index: int,
    *,
    seed: int = 0,
    form: str = "long",
) -> AskedSample:
    """Question number ``index`` of a task at one length.

    It depends only on the arguments, not on which other questions are asked.

    Args:
      name: of the task; it decides the draw.
      task: writes questions.
      codec: of the model.
      background: what the facts are hidden in.
      length: tokens of the prompt and of the answer's room together.
      index: from 0 on.
      seed: of the draw.
      form: of :data:`train.suites.FORMS`.

    Raises:
      ValueError: a length that is too small, or a background too small for it.
    """
    start = [] if codec.bos is None else [codec.bos]
    room = length - task.answer_tokens[form] - len(start)
    require(
        room > 0,
        f"{name}: a length of {length:,} tokens leaves no room for a question: its answer may take "
        f"{task.answer_tokens[form]}",
    )
    size, best = int(room * _characters_per_token(codec, background)), None
    for _ in range(_TRIES):
        rng = generator(seed, zlib.crc32(name.encode()), length, index)
        try:
            question = task.ask(rng, background, size, form)
        except ValueError as error:
            if best is not None:
                break
            raise ValueError(f"{name}, {length:,} tokens: {error}") from None
        tokens = codec.encode_all([question.prompt])[0]
        left = room - len(tokens)
        if left >= 0 and (best is None or len(tokens) > len(best.tokens)):
            best = AskedSample(question, np.array([*start, *tokens.tolist()], np.int32))
        written = len(question.prompt)
        # Longer texts would also leave empty what the task itself leaves empty.
        if 0 <= left <= _SLACK * room or (left > 0 and size - written > left):
            break
        step = left * written / max(len(tokens), 1)
        size += int(np.floor(step)) - (left < 0)
    require(
        best is not None,
        f"{name}: no question fits into {length:,} tokens with this tokenizer and background: ask "
        "for a larger length",
    )
    assert best is not None
    return best


@functools.lru_cache(maxsize=8)
def _characters_per_token(codec: Tokenizer, background: Background) -> float:
    """Returns the mean number of characters of a token in the background's first part."""
    sample = background.text[: 1 << 16]
    tokens = len(codec.encode_all([sample])[0])
    return len(sample) / tokens if tokens else 1.0
