"""What a report says of language models."""

import math

import numpy as np
import pytest

from tests.train.perplexities import result
from train.compare.tasks.text import compare
from train.tasks.text import Text
from train.tasks.text_evaluation import TextResult


class TestCompare:
    def test_sections_and_figures(self):
        results = {
            "tape": [TextResult(result(x, 1.0, 1.0, 1.0)) for x in (math.log(10), math.log(20))],
            "rope": [TextResult(result(x, 2.0, 1.0, 1.0)) for x in (math.log(30), math.log(30))],
        }
        compared = compare(Text(), results)
        rows = compared.sections["Perplexity, disjoint windows"].splitlines()
        cells = [[c.strip() for c in row.strip("|").split("|")] for row in rows]
        assert cells[0] == ["tokens", "of trained", "tape", "rope"]
        assert cells[2] == ["4", "1x", "15.00 ± 7.07", "30.00 ± 0.00"]
        assert (
            "± is the standard deviation over seeds." in compared.sections["Perplexity by length"]
        )
        assert [score.key for score in compared.scores][:4] == [
            *("perplexity_1x", "perplexity_2x"),
            *("perplexity_windowed_1x", "perplexity_windowed_2x"),
        ]
        assert list(compared.figures) == ["perplexity.png", "loss_by_position.png"]
        disjoint, windowed = compared.figures["perplexity.png"].axes
        assert disjoint.get_title() == "disjoint windows"
        assert windowed.get_title() == "sliding attention window"
        line = disjoint.lines[0]
        np.testing.assert_allclose(line.get_xydata(), [[4, 15], [8, math.e]])
        assert "trained length" in {h.get_label() for h in disjoint.lines}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"fingerprint": "b"}, "'a' and 'b' were not judged alike: fingerprint is a and b"),
            ({"trained": 2}, "trained is 4 and 2"),
            ({"stride": 3}, "stride is 2 and 3"),
        ],
    )
    def test_other_targets(self, changes, message):
        other = TextResult(result(1.0, 1.0, 1.0, 1.0, **changes))
        with pytest.raises(ValueError, match=message):
            compare(Text(), {"a": [TextResult(result(1.0, 1.0, 1.0, 1.0))], "b": [other]})
