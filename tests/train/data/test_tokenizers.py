"""Tokenizers: what goes in comes out, and special tokens only where they are asked for."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.train import tokenizer_files
from train.data import tokenizers

KINDS = ("bytes", "tokenizer.json", "tokenizer.model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer_files.hugging_face(folder / "tokenizer.json")
    tokenizer_files.sentencepiece_model(folder / "tokenizer.model")
    return folder


@pytest.fixture(params=KINDS)
def tokenizer(request, folder):
    return tokenizers.load("bytes" if request.param == "bytes" else str(folder / request.param))


class TestAllKinds:
    @settings(max_examples=40, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")))
    @example("")
    @example("a  b\n\tc ")
    @example(" lead Grün 東京 🦊")
    @example("<s>x</s><pad><eos>y")
    def test_any_text(self, folder, text):
        """Also what is written like a special token is no such token."""
        for kind in KINDS:
            tokenizer = tokenizers.load("bytes" if kind == "bytes" else str(folder / kind))
            ids = tokenizer.encode(text)
            assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
            assert not set(ids) & set(tokenizer.specials.values())
            assert tokenizer.decode(ids) == text

    def test_special_tokens_when_asked(self, tokenizer):
        for name, i in tokenizer.specials.items():
            assert tokenizer.encode(name, special=True) == [i]
            ids = tokenizer.encode(f"a{name}b", special=True)
            assert ids.count(i) == 1
            assert tokenizer.decode([i]) == name

    def test_all_at_once(self, tokenizer):
        texts = ["The fox", "", "jumps <s>"]
        for ids, text in zip(tokenizer.encode_all(texts), texts, strict=True):
            assert ids.tolist() == tokenizer.encode(text)

    def test_ids_of_a_wider_model(self, tokenizer):
        ids = [tokenizer.vocab_size, *tokenizer.encode("fox"), -1]
        assert tokenizer.decode(np.array(ids)) == "\ufffdfox\ufffd"

    def test_document(self, tokenizer):
        parts = tokenizer.document(np.array([5, 6], np.uint16))
        edges = [[i] if i is not None else [] for i in (tokenizer.bos, tokenizer.eos)]
        assert np.concatenate(parts).tolist() == [*edges[0], 5, 6, *edges[1]]


class TestBytes:
    def test_ids(self):
        tokenizer = tokenizers.load("bytes")
        assert tokenizer.encode("aé") == [97, 195, 169]
        assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.pad) == (258, 256, 257)
        assert (tokenizer.bos, tokenizer.unk) == (None, None)
        assert tokenizer.encode("a<eos>", special=True) == [97, 256]
        assert tokenizer.decode([97, 256, 257]) == "a<eos><pad>"
        assert tokenizer.decode([97, 195]) == "a\ufffd", "half a character"


class TestFiles:
    def test_special_ids(self, folder):
        assert tokenizers.load(str(folder / "tokenizer.json")).specials == {
            "<s>": 0,
            "</s>": 1,
            "<pad>": 2,
        }
        model = tokenizers.load(str(folder / "tokenizer.model"))
        assert (model.unk, model.bos, model.eos, model.pad) == (0, 1, 2, None)

    def test_shorter_than_bytes(self, folder):
        """The files really are subword tokenizers, and truncation stored in them is off."""
        text = tokenizer_files.SENTENCES[0]
        for name in ("tokenizer.json", "tokenizer.model"):
            assert 4 < len(tokenizers.load(str(folder / name)).encode(text)) < 0.9 * len(text)

    def test_config_beside(self, tmp_path):
        path = tokenizer_files.hugging_face(tmp_path / "tokenizer.json", ["<a>", "<b>", "</s>"])
        alone = tokenizers.load(str(path))
        assert (alone.bos, alone.eos) == (None, 2)
        config = {"bos_token": "<a>", "eos_token": {"content": "<b>"}, "pad_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        named = tokenizers.load(str(path))
        assert (named.bos, named.eos, named.pad) == (0, 1, None)
        assert named.fingerprint != alone.fingerprint

    @pytest.mark.parametrize("starts", [True, False])
    @pytest.mark.parametrize("said", [None, True, False])
    def test_whether_a_start_token_is_added(self, tmp_path, starts, said):
        path = tokenizer_files.hugging_face(tmp_path / "tokenizer.json", starts=starts)
        if said is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": said}))
        assert tokenizers.load(str(path)).adds_bos == (starts if said is None else said)

    @pytest.mark.parametrize("behind", [False, True])
    def test_a_vocabulary_of_few_words_starts_as_it_says(self, tmp_path, behind):
        """It may have no token for other texts; an end token alone is no start."""
        from tokenizers import Tokenizer, models, processors

        words = Tokenizer(models.WordLevel({"x": 0, "<s>": 1}))
        words.add_special_tokens(["<s>"])
        if not behind:
            words.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
        words.save(str(tmp_path / "tokenizer.json"))
        assert tokenizers.load(str(tmp_path)).adds_bos == (not behind)

    def test_a_start_token_at_the_end_is_none(self, tmp_path):
        from tokenizers import Tokenizer, processors

        path = tokenizer_files.hugging_face(tmp_path / "tokenizer.json", starts=False)
        file = Tokenizer.from_file(str(path))
        file.post_processor = processors.TemplateProcessing("$A <s>", None, [("<s>", 0)])
        file.save(str(path))
        assert not tokenizers.load(str(path)).adds_bos

    @pytest.mark.parametrize("said", [None, True, False])
    def test_whether_sentencepiece_adds_a_start_token(self, folder, tmp_path, said):
        (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
        if said is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": said}))
        assert tokenizers.load(str(tmp_path)).adds_bos == (said is not False)

    def test_a_tokenizer_is_known_by_its_content(self, tmp_path, folder):
        path = tmp_path / "tokenizer.json"
        path.write_bytes((folder / "tokenizer.json").read_bytes())
        first, of_a_folder = tokenizers.load(str(path)), tokenizers.load(str(folder))
        assert first.fingerprint == of_a_folder.fingerprint == tokenizers.fingerprint(str(folder))
        assert len(first.fingerprint) == 64
        tokenizer_files.hugging_face(path, vocab_size=290)
        assert (first.vocab_size, tokenizers.load(str(path)).vocab_size) == (300, 290)
        assert first.fingerprint != tokenizers.fingerprint(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.json", "is not a tokenizer.json"),
        ("x.model", "is not a sentencepiece model"),
        ("x.txt", "is not a tokenizer: expected a name that ends in .json or .model"),
        ("absent.json", "there is no tokenizer '.*absent.json'"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, name, message):
    if name.startswith("x."):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        tokenizers.load(str(tmp_path / name))
    assert tokenizers.fingerprint(str(tmp_path / "absent.json")) is None


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("{", "tokenizer_config.json is not JSON"),
        ("[]", "tokenizer_config.json must hold an object; got list"),
        ('{"eos_token": {"id": 1}}', r"eos_token must be text, or .*; got \{'id': 1\}"),
        ('{"bos_token": 3}', "bos_token must be text, or an object with content; got 3"),
        ('{"add_bos_token": "no"}', "add_bos_token must be true or false; got 'no'"),
    ],
)
def test_what_is_no_description_of_a_tokenizer(tmp_path, roles, message):
    tokenizer_files.hugging_face(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(roles)
    with pytest.raises(ValueError, match=message):
        tokenizers.load(str(tmp_path / "tokenizer.json"))
