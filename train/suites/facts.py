"""Facts about people, places and things, hidden in a text, as in BABILong (arXiv:2406.10149).

The questions are of the kinds of bAbI (arXiv:1502.05698): one, two or three facts decide where
somebody or something is, or was; yes or no; how many things somebody carries.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from train.suites import SuiteQuestion
from train.suites.background import Background, room

PEOPLE = ("Anna", "Boris", "Clara", "David")
PLACES = ("attic", "cellar", "garden", "kitchen", "office", "stable")
THINGS = ("apple", "ball", "lamp")
NUMBERS = ("none", "one", "two", "three")
_START = "Some sentences of the text below say where people are and what they carry.\n"


class World:
    """The people and things of a story, and the events so far.

    Attributes:
      events: as sentences.
      at: where people are.
      holder: who carries a thing.
      seen: where things have been, in order.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.seen: dict[str, list[str]] = {}

    def go_on(self, draw: Callable[[int], int], *, things: bool) -> None:
        """Adds one more event.

        Args:
          draw: a random number below a given one.
          things: whether things are taken and put down, too.
        """
        person = PEOPLE[draw(len(PEOPLE))]
        carried = [thing for thing in THINGS if self.holder.get(thing) == person]
        here = self.at.get(person)
        free = [
            thing
            for thing in THINGS
            if thing not in self.holder and self.seen.get(thing, [here])[-1] == here
        ]
        what = draw(4) if things and here else 0
        if what == 1 and carried:
            thing = carried[draw(len(carried))]
            del self.holder[thing]
            self.events.append(f"{person} put the {thing} down. ")
        elif what >= 2 and free:
            thing = free[draw(len(free))]
            self.holder[thing] = person
            self.seen.setdefault(thing, [str(here)])
            self.events.append(f"{person} took the {thing}. ")
        else:
            others = [place for place in PLACES if place != here]
            place = self.at[person] = others[draw(len(others))]
            for thing in carried:
                self.seen[thing].append(place)
            self.events.append(f"{person} went to the {place}. ")

    def carried(self, person: str) -> int:
        """Returns how many things somebody carries."""
        return sum(holder == person for holder in self.holder.values())


# A question and its answer; None: nothing of the kind can be asked yet.
Asked = tuple[str, str] | None


def where_is_somebody(world: World, draw: Callable[[int], int]) -> Asked:
    """Asks where somebody is: one fact decides."""
    people = sorted(world.at)
    person = people[draw(len(people))]
    return f"Where is {person}?", world.at[person]


def where_is_something(world: World, draw: Callable[[int], int]) -> Asked:
    """Asks where a thing is. Two facts decide: who took it, and where that person went then."""
    moved = [thing for thing in THINGS if len(world.seen.get(thing, ())) > 1]
    if not moved:
        return None
    thing = moved[draw(len(moved))]
    return f"Where is the {thing}?", world.seen[thing][-1]


def where_was_something(world: World, draw: Callable[[int], int]) -> Asked:
    """Asks where a thing was. Three facts decide: who took it, and the person's last two places."""
    seen = {x: places for x, places in world.seen.items() if len(places) > 2}
    known = [x for x in THINGS if x in seen and seen[x].count(seen[x][-1]) == 1]
    if not known:
        return None
    thing = known[draw(len(known))]
    *_, before, last = seen[thing]
    return f"Where was the {thing} before the {last}?", before


def is_somebody_there(world: World, draw: Callable[[int], int]) -> Asked:
    """Asks whether somebody is in a place: yes or no, each half of the time."""
    people = sorted(world.at)
    person = people[draw(len(people))]
    others = [place for place in PLACES if place != world.at[person]]
    if draw(2):
        return f"Is {person} in the {world.at[person]}?", "yes"
    return f"Is {person} in the {others[draw(len(others))]}?", "no"


def how_many_things(world: World, draw: Callable[[int], int]) -> Asked:
    """Asks how many things somebody carries; each number that occurs is equally likely."""
    counts = {person: world.carried(person) for person in PEOPLE}
    numbers = sorted(set(counts.values()))
    if len(numbers) < 2:
        return None
    number = numbers[draw(len(numbers))]
    people = [person for person in PEOPLE if counts[person] == number]
    return f"How many things does {people[draw(len(people))]} carry?", NUMBERS[number]


@dataclasses.dataclass(frozen=True)
class Facts:
    """A kind of question about facts.

    Attributes:
      question: what is asked.
      labels: all answers.
      events: number of sentences; worlds that allow no question are skipped.
      things: whether things are taken and put down.
    """

    question: Callable[[World, Callable[[int], int]], Asked]
    labels: tuple[str, ...] = PLACES
    events: int = 6
    things: bool = True

    rule = "label"
    # A word or a short sentence.
    answer_tokens = {"long": 24, "short": 12}

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """Hides the events in their order; see :class:`train.suites.SuiteTask`."""

        def draw(below: int) -> int:
            return int(rng.random() * below)

        asked = None
        while asked is None:
            world = World()
            for _ in range(self.events):
                world.go_on(draw, things=self.things)
            asked = self.question(world, draw)
        question, answer = asked
        known = f" Answer with one of: {', '.join(self.labels)}." if form == "long" else ""
        start = _START if form == "long" else ""
        end = f"\nQuestion: {question}{known}\nAnswer:"
        left = room(size, start, end, *world.events)
        text = background.passage(rng, left).hide(rng, world.events, shuffle=False)
        # As in BABILong, an answer may repeat what the question names.
        labels = tuple(x for x in self.labels if not re.search(rf"\b{x}\b", question))
        return SuiteQuestion(start + text + end, (answer,), labels)


ONE_FACT = Facts(where_is_somebody, things=False)
TWO_FACTS = Facts(where_is_something, events=10)
THREE_FACTS = Facts(where_was_something, events=14)
YES_NO = Facts(is_somebody_there, ("yes", "no"), things=False)
COUNTING = Facts(how_many_things, NUMBERS, events=12)
