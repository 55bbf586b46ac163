"""The judge of every claim: what confirms it, what contradicts it, and what it reads.

What it should read is in the table of research/protocol.md.
"""

import re
from types import SimpleNamespace

import pytest

from research import protocol
from research.claims import CLAIMS
from research.protocol import KEYS_LOST, MOST_PARAMETERS, MOST_TIME, PERPLEXITY_GAINED
from research.studies import PROBLEMS, STUDIES
from research.trainings import PlannedTrainings
from research.verdicts import Kind
from tests.paths import ROOT
from tests.research.results import BEYOND, INSIDE, MADE

PROTOCOL = ROOT / "research" / "protocol.md"
DESIGNS = {design.name: design for design in STUDIES}
ONCE, TWICE, EIGHT_TIMES = "perplexity_1x", "perplexity_overlapping_1x", "perplexity_8x"
KEYS = "passkey_1x"
OVERHEAD, STABILITY = 6, 9

# By claim, study and score: what a form and all of its rivals have where the claim is confirmed.
CONFIRMED = {
    1: {("text", ONCE): (3.0, 4.0)},
    2: {("addition", BEYOND): (60, 40)},
    3: {("passkey", BEYOND): (60, 40), ("passkey", INSIDE): (62, 62)},
    4: {("text", EIGHT_TIMES): (3.1, 4.0), ("text", ONCE): (3.05, 3.05)},
    5: {("context", TWICE): (3.0, 4.0), ("context", KEYS): (60, 40)},
    7: {("ablations", BEYOND): (60, 40), ("text", ONCE): (3.0, 4.0)},
    8: {("ablations", BEYOND): (60, 40)},
    10: {("ablations", BEYOND): (60, 40)},
    # Ahead at one problem, and like all others at the other.
    11: {("length-parity", BEYOND): (60, 40), ("length-reverse", BEYOND): (50, 50)},
}
# At every change the first form of each claim.
JUDGED = [
    pytest.param(number, form, marks=[pytest.mark.slow] * (i > 0))
    for number in CONFIRMED
    for i, form in enumerate(CLAIMS[number - 1].forms)
]
# By the table of the protocol, the scores of each claim, and its limits.
READ = {
    **{number: [BEYOND] for number in (2, 8, 10, 11)},
    1: [ONCE],
    3: [BEYOND, INSIDE],
    4: [EIGHT_TIMES, ONCE],
    5: [TWICE, KEYS],
    7: [BEYOND, ONCE],
    OVERHEAD: [],
    STABILITY: [],
}
LIMITS = {
    3: f"at most {KEYS_LOST:g} points fewer than at it",
    4: f"at most {100 * PERPLEXITY_GAINED:g} % above that at 1 time",
    6: f"at most {MOST_TIME:g} times RoPE's, parameters {MOST_PARAMETERS:g} times",
}


class Case:
    """What is known of a form and its rivals, and what a judge asks for.

    Attributes:
      values: by study, score and rival; of a rival that is not there ``CONFIRMED`` has it.
      read: the study, the score and the rival of every value that was asked for.
    """

    def __init__(self, number: int, form: str):
        self.number, self.form, self.read = number, form, set()
        self.values = {(*what, form): own for what, (own, _) in CONFIRMED.get(number, {}).items()}

    @property
    def rivals(self):
        """What the form was compared with."""
        return sorted(one for one in self.read if one[2] != self.form)

    def of(self, study, rival, key, shown=None):
        """Values by seed, which differ a little, as those of a study of trainings."""
        what = (study.name, shown or key, rival)
        assert rival in study.design.rivals
        assert key in study.design.scores, "rates are chosen by it"
        self.read.add(what)
        middle = self.values.get(what, CONFIRMED[self.number][what[:2]][1])
        spread = 0.002 if rival == self.form else 0.001
        return {seed: middle * (1 + spread * (seed - 4)) for seed in protocol.REPORTING}


@pytest.fixture
def judge(place, monkeypatch):
    """A function that judges a case."""
    studies = {}

    def judged(case):
        claim = CLAIMS[case.number - 1]
        for name in claim.studies:
            studies.setdefault(name, DESIGNS[name].at(place))
        monkeypatch.setattr(PlannedTrainings, "missing", lambda *_: None)
        monkeypatch.setattr(PlannedTrainings, "values", lambda *given: case.of(*given))
        return claim.judge(studies, case.form)

    return judged


def better(value, key, by=1.25):
    return value / by if key.startswith("perplexity") else value * by


@pytest.mark.parametrize(("number", "form"), JUDGED)
def test_confirmed_and_contradicted(judge, number, form):
    """Ahead of every rival, or behind any one of them; where they are equal it is neither."""
    case = Case(number, form)
    assert judge(case).kind is Kind.CONFIRMED
    for what in case.rivals:
        own = case.values[*what[:2], form]
        case.values[what] = better(own, what[1])
        assert judge(case).kind is Kind.CONTRADICTED, what
        case.values[what] = own
        needed = what[0] != "length-reverse"
        assert judge(case).kind is (Kind.NOT_TOLD if needed else Kind.CONFIRMED), what
        del case.values[what]


@pytest.mark.parametrize(
    ("number", "what", "value", "kind"),
    [
        (3, ("passkey", INSIDE), 60 + KEYS_LOST + 2, Kind.CONTRADICTED),
        (3, ("passkey", INSIDE), 60 + KEYS_LOST - 2, Kind.CONFIRMED),
        (4, ("text", ONCE), 3.1 / (1 + PERPLEXITY_GAINED + 0.02), Kind.CONTRADICTED),
        (4, ("text", ONCE), 3.1 / (1 + PERPLEXITY_GAINED - 0.02), Kind.CONFIRMED),
    ],
)
def test_what_may_be_lost_at_longer_lengths(judge, number, what, value, kind):
    """From the value at the trained length; all rivals are behind in any case."""
    for form in CLAIMS[number - 1].forms:
        case = Case(number, form)
        case.values[*what, form] = value
        assert judge(case).kind is kind


@pytest.mark.parametrize(
    ("time", "parameters", "kind"),
    [
        (MOST_TIME - 0.03, MOST_PARAMETERS - 0.01, Kind.CONFIRMED),
        (MOST_TIME + 0.03, 1.0, Kind.CONTRADICTED),
        (1.0, MOST_PARAMETERS + 0.01, Kind.CONTRADICTED),
    ],
)
def test_overhead(place, time, parameters, kind):
    """One length that is beyond a limit is enough, of the form that is judged."""
    claim, study = CLAIMS[OVERHEAD - 1], DESIGNS["overhead"].at(place)
    longest = study.design.lengths["cpu"][-1]
    assert claim.judge({"overhead": study}, "tape_head_scale").kind is Kind.UNFINISHED
    for item in study.items:
        here = item.rival == "tape_head_scale" and f"-{longest}-" in item.name
        found = {
            "length": item.experiment.task.sequence_length,
            "time": (time if here else 1.0) + 0.005 * (item.experiment.seed - 4),
            "parameters": parameters if here else 1.0,
            **{"milliseconds": 1.0, "noise": 1.0, "operations": 1.0},
        }
        place.store.put(item, found, MADE)
    assert claim.judge({"overhead": study}, "tape_head_scale").kind is kind
    assert claim.judge({"overhead": study}, "tape").kind is Kind.CONFIRMED


def of_growths(growths):
    """What the claim of stability says where states grow so much; and what it asks for."""
    read = []

    def of_seeds(variant, depth):
        read.append((variant, depth))
        middle = growths.get(variant, 10.0)
        return {seed: middle * (1 + 0.01 * (seed - 4)) for seed in protocol.REPORTING}

    claim = CLAIMS[STABILITY - 1]
    study = SimpleNamespace(design=DESIGNS["stability"], growths=of_seeds)
    (form,) = claim.forms
    return claim.judge({"stability": study}, form).kind, read


def test_stability():
    """The less states grow, the better."""
    kind, ((form, _), *rivals) = of_growths({"tape_head_scale": 2.0})
    assert (kind, form) == (Kind.CONFIRMED, "tape_head_scale")
    for rival, _ in rivals:
        assert of_growths({"tape_head_scale": 2.0, rival: 1.0})[0] is Kind.CONTRADICTED
    assert of_growths({"tape_head_scale": 10.0})[0] is Kind.NOT_TOLD


def rows():
    """The table of what is compared: the cells of every row."""
    section = PROTOCOL.read_text().split("\n## What is compared\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("number", READ)
def test_what_is_compared(judge, place, number):
    """Studies, scores and rivals are those that the protocol names, and no others are read."""
    assert [int(cells[0]) for cells in rows()] == [*range(1, len(CLAIMS) + 1)]
    assert READ.keys() == CONFIRMED.keys() | {OVERHEAD, STABILITY}
    _, _, of_studies, score, of_rivals = rows()[number - 1]
    claim, keys = CLAIMS[number - 1], READ[number]
    assert LIMITS.get(number, "") in score
    named = re.findall(r"[a-z]+", re.sub(r"\(.*?\)", "", of_studies))
    studies = [f"length-{name}" if name in PROBLEMS else name for name in named]
    assert list(claim.studies) == studies

    # Rivals of each study, where the page tells them apart.
    parts = of_rivals.split(";") if ";" in of_rivals else [of_rivals] * len(studies)
    expected = {
        (study, rival)
        for study, part in zip(studies, parts, strict=True)
        for rival in re.findall(r"`(\w+)`", part)
    }
    if number == OVERHEAD:
        assert expected == set()
        assert DESIGNS["overhead"].reference == "rope"
        return
    if number == STABILITY:
        _, read = of_growths({})
        asked = expected | {("stability", form) for form in claim.forms}
        assert {("stability", variant) for variant, _ in read} == asked
        assert {depth for _, depth in read} == {int(re.search(r"(\d+) layers", score)[1])}
        return
    for form in claim.forms:
        case = Case(number, form)
        judge(case)
        own = {("text", "rope_alibi")} if form == "tape_alibi" else set()
        assert {(study, rival) for study, _, rival in case.rivals} == expected | own
        assert {key for _, key, _ in case.read} == set(keys)
        if length := re.search(r"beyond (\d+ digits|length \d+)", score):
            for study in {study for study, key, _ in case.read if key == BEYOND}:
                label = DESIGNS[study].at(place).score(BEYOND).label
                assert label == f"{length[0]}, %"
