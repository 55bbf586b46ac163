import json

import pytest

from train.tasks.scrolls_files import ScrollsRecord
from train.tasks.scrolls_metrics import (
    Outcome,
    exact_match,
    f1,
    normalise,
    outputs_by_id,
    read_predictions,
    require_same_questions,
    score,
)


def test_normalise():
    assert normalise("  The U.S. and\tan  Apple-pie, a theatre!") == "us and applepie theatre"


@pytest.mark.parametrize(
    ("prediction", "output", "match", "overlap"),
    [
        ("The red house.", "red house", 1, 1),
        ("red red door", "red house", 0, 2 * 1 / (3 + 2)),
        ("big red house", "house red", 0, 2 * 2 / (3 + 2)),
        ("green", "red house", 0, 0),
        ("", "red", 0, 0),
        # Nothing is left of either, and they share no word, as in SQuAD's evaluation.
        ("the", "a", 1, 0),
    ],
)
def test_of_words(prediction, output, match, overlap):
    assert exact_match(prediction, output) == match
    assert f1(prediction, output) == pytest.approx(overlap)


PREDICTIONS = {"x": "boats sail north", "y": "two gulls", "z": "old men mend nets"}
OUTPUTS = {
    "x": ["boats sail north"],
    "y": ["gulls", "many gulls"],
    "z": ["nets mend old men", "old nets"],
}


def test_the_best_output_counts_and_examples_are_averaged():
    assert score("qasper", PREDICTIONS, OUTPUTS) == {"f1": pytest.approx((1 + 2 / 3 + 1) / 3)}
    assert score("contract_nli", PREDICTIONS, OUTPUTS) == {"exact_match": pytest.approx(1 / 3)}


def test_rouge():
    # z: ROUGE-1 and ROUGE-2 are largest for its first output, which shares all words and of the
    # three pairs "old men"; ROUGE-L for its second, 2 * 2 / (4 + 2) against 2 * 2 / (4 + 4).
    rouge1 = (1 + 2 / 3 + 1) / 3
    rouge2 = (1 + 0 + 2 * 1 / (3 + 3)) / 3
    rouge_l = (1 + 2 / 3 + 2 / 3) / 3
    scores = score("gov_report", PREDICTIONS, OUTPUTS)
    assert scores == {
        "rouge1": pytest.approx(rouge1),
        "rouge2": pytest.approx(rouge2),
        "rougeL": pytest.approx(rouge_l),
        "rouge": pytest.approx((rouge1 * rouge2 * rouge_l) ** (1 / 3)),
    }


def test_rouge_without_stemming_and_without_a_common_pair():
    scores = score("qmsum", {"x": "ships sailing"}, {"x": ["ships sail"]})
    assert scores == {"rouge": 0, "rouge1": 0.5, "rouge2": 0, "rougeL": 0.5}


@pytest.mark.parametrize(
    ("predictions", "outputs", "message"),
    [
        ({"y": "", "q": "", "p": ""}, OUTPUTS, r"missing: 'x', 'z'; unknown: 'q', 'p'$"),
        (PREDICTIONS, OUTPUTS | {"y": []}, "the right outputs of 'y' are not in the data"),
        ({}, {}, "nothing to score"),
    ],
)
def test_what_cannot_be_scored(predictions, outputs, message):
    with pytest.raises(ValueError, match=message):
        score("qasper", predictions, outputs)


def test_outputs_by_id():
    records = [
        ScrollsRecord("", *x) for x in [("a", "", "", "1"), ("b", "", "", None), ("a", "", "", "2")]
    ]
    assert outputs_by_id(records) == {"a": ["1", "2"], "b": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file of predictions"),
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        ('{"a": "1", "b": "", "a": "2"}', "given more than once: 'a'"),
        ('{"a": 1, "b": "", "c": null}', "the predictions of 'a', 'c' are not text"),
    ],
)
def test_predictions_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "predictions.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_predictions(path)


def test_an_outcome():
    outcome = Outcome("qasper", "validation", PREDICTIONS, {"f1": 0.891})
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert "| qasper | 89.10 |" in outcome.table()
    assert json.loads(outcome.files()["predictions.json"]) == PREDICTIONS
    with pytest.raises(ValueError, match="expected a record of format"):
        Outcome.from_json({"format": "other"})
    unscored = Outcome("qasper", "test", PREDICTIONS, {})
    assert "not published" in unscored.table()
    with pytest.raises(ValueError, match="outcomes of different examples"):
        require_same_questions({"a": [outcome], "b": [unscored]})
