"""RULER's human-written questions about paragraphs (arXiv:2404.06654): SQuAD and HotpotQA.

The paragraphs that a question needs stand among others of the same file, which replaces the
background. You provide the file with questions, paragraphs and answers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.checks import require
from train.suites import SuiteQuestion
from train.suites.background import Background, room

_LONG = (
    "Answer the question from the documents below with as few words as possible.\n",
    "\nDocument {number}:\n{paragraph}\n",
    "\nAnswer the question from the documents above with as few words as possible.\n"
    "Question: {question}\nAnswer:",
)
_SHORT = ("", "{paragraph}\n", "Question: {question}\nAnswer:")
# The most questions drawn until one fits.
DRAWS = 1000


class FileQuestion(NamedTuple):
    """A question of a file.

    Attributes:
      question: in writing.
      answers: each of them is right.
      needed: numbers of the paragraphs that hold the answer.
      near: numbers of others that come with the question, the first distractors.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


class Collection(NamedTuple):
    """The paragraphs and questions of a file.

    Attributes:
      paragraphs: each once.
      sizes: int [P], their characters.
      asked: the questions.
      fingerprint: equal for equal files.
    """

    paragraphs: list[str]
    sizes: np.ndarray
    asked: list[FileQuestion]
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Reading:
    """A kind of question about paragraphs.

    Attributes:
      kind: of file, one of :data:`FORMATS`.
      path: of the file; None: not given yet.
    """

    kind: str
    path: str | None = None

    rule = "part"
    # RULER's for both.
    answer_tokens = {"long": 32, "short": 32}

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the file; None if none is given."""
        return None if self.path is None else read(self.path, self.kind).fingerprint

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """A question after as many whole paragraphs as fit; see :class:`train.suites.SuiteTask`.

        It takes first the paragraphs that the question needs, then those that come with it, then
        any, and shuffles them. If a question does not fit, another is drawn.
        """
        assert self.path is not None
        file = read(self.path, self.kind)
        start, paragraph, end = _LONG if form == "long" else _SHORT
        around = len(paragraph.format(number=len(file.paragraphs), paragraph=""))

        def draw() -> FileQuestion:
            return file.asked[int(rng.random() * len(file.asked))]

        def fits(asked: FileQuestion) -> bool:
            texts = start + end.format(question=asked.question)
            return len(texts) + sum(around + file.sizes[i] for i in asked.needed) <= size

        asked = next(filter(fits, (draw() for _ in range(DRAWS))), None) or draw()
        turn, place = rng.random((2, len(file.paragraphs)))
        turn[[*asked.near]] -= 1
        turn[[*asked.needed]] -= 2
        end = end.format(question=asked.question)
        needed = [" " * around + file.paragraphs[i] for i in asked.needed]
        left = room(size, start, end, *needed) + sum(map(len, needed))
        most = min(len(turn), left // int(file.sizes.min() + around) + 1)
        first = np.argpartition(turn, most - 1)[:most]
        order = first[np.argsort(turn[first])]
        count = int(np.searchsorted(np.cumsum(file.sizes[order] + around), left, "right"))
        require(
            count < len(turn),
            f"all paragraphs of {self.path} together are shorter than the {size:,} characters of a "
            "question: name a larger file, or ask for smaller lengths",
        )
        chosen = order[:count][np.argsort(place[order[:count]])]
        text = "".join(
            paragraph.format(number=number, paragraph=file.paragraphs[i])
            for number, i in enumerate(chosen.tolist(), start=1)
        )
        return SuiteQuestion(start + text + end, asked.answers)


SQUAD = Reading("squad")
HOTPOTQA = Reading("hotpotqa")


@functools.lru_cache(maxsize=4)
def read(path: str, kind: str) -> Collection:
    """The paragraphs and questions of a file.

    Args:
      path: of the file, JSON.
      kind: one of :data:`FORMATS`.

    Raises:
      ValueError: if there is none, it is something else, or it has no question with an answer.
    """
    file = Path(path).expanduser()
    require(file.is_file(), f"there is no file {path} with questions of {FORMATS[kind].name}")
    content = file.read_bytes()
    numbers: dict[str, int] = {}

    def number(paragraph: str) -> int:
        return numbers.setdefault(str(paragraph), len(numbers))

    try:
        asked = FORMATS[kind].parse(json.loads(content), number)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of {FORMATS[kind].name}, {FORMATS[kind].form} "
            f"({type(error).__name__}: {error})"
        ) from None
    require(bool(asked), f"{path} has no question with an answer")
    sizes = np.array([len(paragraph) for paragraph in numbers])
    return Collection([*numbers], sizes, asked, hashlib.sha256(content).hexdigest()[:16])


def _squad(content: Any, number: Callable[[str], int]) -> list[FileQuestion]:
    """Questions with an answer; those of version 2 that have none are skipped."""
    asked = []
    for article in content["data"]:
        own = [number(paragraph["context"]) for paragraph in article["paragraphs"]]
        for place, paragraph in zip(own, article["paragraphs"], strict=True):
            near = tuple(sorted({*own} - {place}))
            for entry in paragraph["qas"]:
                if answers := _different(answer["text"] for answer in entry["answers"]):
                    asked.append(
                        FileQuestion(str(entry["question"]).strip(), answers, (place,), near)
                    )
    return asked


def _hotpotqa(content: Any, number: Callable[[str], int]) -> list[FileQuestion]:
    """Questions that need the paragraphs of their supporting facts."""
    asked = []
    for entry in content:
        places = {
            title: number(f"{title}\n{''.join(sentences)}") for title, sentences in entry["context"]
        }
        needed = _different(places[title] for title, _ in entry["supporting_facts"])
        near = tuple(sorted({*places.values()} - {*needed}))
        answers = _different([entry["answer"]])
        if answers and needed:
            asked.append(FileQuestion(str(entry["question"]).strip(), answers, needed, near))
    return asked


def _different(values: Any) -> tuple[Any, ...]:
    """Values that are not empty, each once."""
    return tuple(dict.fromkeys(value for value in values if value != ""))


class Format(NamedTuple):
    """A format of files.

    Attributes:
      name: as people call it.
      form: its contents in words.
      parse: gives its questions from its content and a function that numbers paragraphs.
    """

    name: str
    form: str
    parse: Callable[[Any, Callable[[str], int]], list[FileQuestion]]


FORMATS: dict[str, Format] = {
    "squad": Format(
        "SQuAD v1.1",
        "an object with data, articles with paragraphs with context and qas",
        _squad,
    ),
    "hotpotqa": Format(
        "HotpotQA",
        "a list of question, answer, context and supporting_facts",
        _hotpotqa,
    ),
}
