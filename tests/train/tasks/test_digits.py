"""Characters as tokens."""

import numpy as np

from train.tasks.digits import VOCABULARY


class TestVocabulary:
    def test_ids(self):
        assert VOCABULARY.size == 19
        assert VOCABULARY.encode("09+-x= ") == [4, 13, 14, 15, 16, 17, 18]
        assert VOCABULARY.decode([2, 5, 14, 4, 17, 3, 0, 1]) == "<bos>1+0=<eos><pad><unk>"

    def test_ids_of_a_wider_model(self):
        assert VOCABULARY.decode(np.array([18, 19, 400, -1])) == " <unk><unk><unk>"
