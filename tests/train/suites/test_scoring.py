import pytest

from train.suites import SuiteQuestion
from train.suites.scoring import score


@pytest.mark.parametrize(
    ("rule", "answer", "wanted"),
    [
        ("all", " 12, 34 and 56.", 1),
        ("all", "34", 1 / 3),
        ("all", "", 0),
        ("part", "the 56", 1),
        ("part", "the 5", 0),
    ],
)
def test_string_matches(rule, answer, wanted):
    assert score(rule, answer, SuiteQuestion("", ("12", "34", "56"))) == wanted


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (" Yes.", 1),
        ("yes, she is\nNo.", 1),
        ("yes or no", 0),
        ("nobody", 0),
        ("", 0),
        (". Yes", 0),
    ],
)
def test_labels(answer, wanted):
    assert score("label", answer, SuiteQuestion("", ("yes",), ("yes", "no"))) == wanted


def test_capitals_do_not_count():
    assert score("all", "abcde", SuiteQuestion("", ("ABCDE",))) == 1
