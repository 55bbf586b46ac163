"""Aggregation (RULER): the words that occur most often in a list, and in a coded text."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.special

from train.checks import require
from train.suites import SuiteQuestion
from train.suites.background import Background

_TOO_SMALL = "{size:,} characters are too few for a question about the words of a text"


@dataclasses.dataclass(frozen=True)
class Common:
    """Common words extraction: a numbered list in which a few words occur most often.

    Attributes:
      count: common words, by form.
      times: how often a common and any other word occur, by form; the first pair with which the
        common words take at most half of the list is used.
    """

    count: tuple[int, int] = (10, 3)
    times: tuple[tuple[tuple[int, int], ...], ...] = (((30, 3), (10, 1), (4, 1)), ((8, 2), (4, 1)))

    rule = "all"
    # RULER's 120 if long.
    answer_tokens = {"long": 120, "short": 40}

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """Writes the list; see :class:`train.suites.SuiteTask`."""
        short = form == "short"
        count = self.count[short]
        start = "" if short else "Some words stand more often than others in this numbered list.\n"
        end = (
            "\nMost common:"
            if short
            else f"\nQuestion: which {count} words stand most often in the list above?\nAnswer: "
            f"the {count} words that stand most often in the list are:"
        )
        common = background.words(rng, count, different=True)
        room = size - len(start) - len(end)
        # A number, a full stop and two spaces stand beside each word.
        extra = 3 + len(str(max(room // 8, 1)))
        taken = sum(len(word) + extra for word in common)
        often, rarely = next(
            (pair for pair in self.times[short] if pair[0] * taken <= room / 2), (0, 0)
        )
        require(often > 0, _TOO_SMALL.format(size=size))
        left = room - often * taken
        most = min(left // (rarely * (4 + extra)) + count + 1, len(background.vocabulary))
        known = set(common)
        others = [w for w in background.words(rng, most, different=True) if w not in known]
        costs = rarely * (np.array([len(word) for word in others]) + extra)
        fitting = int(np.searchsorted(np.cumsum(costs), left, "right"))
        require(
            fitting < len(others),
            f"the background {background.name} has {len(background.vocabulary):,} different words "
            f"of four to eight letters, too few for a list of {size:,} characters: name a text "
            "with more words, or ask for smaller lengths",
        )
        words = common * often + others[:fitting] * rarely
        order = rng.permutation(len(words)).tolist()
        text = " ".join([f"{n}. {words[i]}" for n, i in enumerate(order, start=1)])
        return SuiteQuestion(start + text + end, tuple(common))


@dataclasses.dataclass(frozen=True)
class Frequent:
    """Frequent words extraction: coded words whose frequencies fall by Zipf's law.

    The k-th word makes up a share k^-alpha / zeta(alpha) of the text. The first is dots, which do
    not count; the three after it are asked for.

    Attributes:
      alpha: how fast frequencies fall.
    """

    alpha: float = 2.0

    rule = "all"
    # RULER's 50 if long.
    answer_tokens = {"long": 50, "short": 24}

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """Writes the coded text; see :class:`train.suites.SuiteTask`."""
        short = form == "short"
        width = 4 if short else 6
        start = "" if short else "Count how often each coded word stands in this text.\n"
        end = (
            "\nMost frequent:"
            if short
            else "\nQuestion: which three coded words stand most often in the text above? Leave "
            "the dots out.\nAnswer: the three coded words that stand most often in the text are:"
        )
        total = (size - len(start) - len(end)) // (width + 1)
        share = 1 / scipy.special.zeta(self.alpha)
        ranks = np.arange(2, 2 + max(4, total // 50))
        counts = (total * share * ranks**-self.alpha).astype(int)
        require(total > 0 and counts[2] > 0, _TOO_SMALL.format(size=size))
        # Rounding must not let another word occur as often as the third.
        counts[3:] = np.minimum(counts[3:], counts[2] - 1)
        letters = rng.integers(97, 123, size=(len(ranks) + 16, width), dtype=np.uint8)
        coded = [letters[i].tobytes().decode() for i in range(len(letters))]
        words = list(dict.fromkeys(coded))[: len(ranks)]
        counts = counts[: len(words)]
        numbers = np.repeat(np.arange(1, len(words) + 1), counts)
        numbers = np.pad(numbers, (total - len(numbers), 0))
        known = ["." * width, *words]
        text = " ".join([known[i] for i in rng.permutation(numbers).tolist()])
        return SuiteQuestion(start + text + end, tuple(words[:3]))


COMMON = Common()
FREQUENT = Frequent()
