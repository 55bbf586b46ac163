"""What the tests read in a Markdown page: its code, its commands, its links and headings."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator

FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n?)+)")
SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[[^][]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PROGRAMS = ("make", "pip", "python")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      language: as the page says; empty for output.
      code: its lines.
      reason: why it is not run, or None.
      line: number of its first line in the page.
      output: for Python what it prints, as the page shows it in the block that follows.
    """

    language: str
    code: str
    reason: str | None
    line: int
    output: str = ""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; output is part of the Python block that it follows."""
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        block = Block(match["language"], match["code"], match["reason"], line)
        follows = not text[end : match.start()].strip() and bool(found)
        if follows and not block.language and found[-1].language == "python":
            found[-1] = dataclasses.replace(found[-1], output=block.code)
        else:
            found.append(block)
        end = match.end()
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """What stands between backticks in prose."""
    return [span.replace("\n", " ") for _, span in SPAN.findall(prose(text))]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command: in blocks that are no Python, indented ones too, and in prose."""
    shells = [block.code for block in blocks(text) if block.language != "python"]
    shells += INDENTED.findall(prose(text))
    lines = [line for shell in shells for line in shell.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans(text)]:
        if line.split()[:1] and line.split()[0] in PROGRAMS:
            yield shlex.split(line, comments=True)


def links(text: str) -> list[str]:
    """Targets of links and pictures."""
    return LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get."""
    plain = (re.sub(r"[`*\[\]]|\(.*?\)", "", heading) for heading in HEADING.findall(prose(text)))
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in plain}
