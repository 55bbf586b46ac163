"""Tokenizers: text to token ids and back.

``load`` takes the name ``bytes``, a ``tokenizer.json`` (Hugging Face), a sentencepiece ``.model``,
or a folder that holds one of the two. For every kind:

* ``encode`` adds nothing to the text, and text that spells a special token, such as ``<s>``, stays
  text unless ``special=True`` asks for the token.
* ``decode`` shows special tokens by their names.
* ``fingerprint`` changes with everything that ids depend on, so that tokens are only read with the
  tokenizer that made them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from train.checks import require

# The file beside a tokenizer.
CONFIG = "tokenizer_config.json"
_SPECIAL_NAMES = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]"),
    "pad": ("<pad>", "<|pad|>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
      name: under which it was loaded.
      fingerprint: 64 hexadecimal digits; equal only if all ids mean the same.
      vocab_size: number of token ids.
      specials: ids of the special tokens by name.
      bos, eos, pad, unk: ids of the tokens for the start and the end of a document, for padding and
        for unknown text; None if there is no such token.
      adds_bos: whether the tokenizer itself puts ``bos`` before a text.
    """

    name: str
    fingerprint: str
    vocab_size: int
    specials: Mapping[str, int] = MappingProxyType({})
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    adds_bos: bool = True

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text: that of the end of a document, if there is one."""
        return () if self.eos is None else (self.eos,)

    @property
    def padding(self) -> int:
        """The id that pads rows: that of padding, else of the end or the start, else 0."""
        return next((i for i in (self.pad, self.eos, self.bos) if i is not None), 0)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encodes ``text``.

        Args:
          text: any text.
          special: whether the names of special tokens in it stand for those tokens.
        """
        if not (special and self.specials):
            return self.encode_all([text])[0].tolist()
        names = sorted(self.specials, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        encoded = (
            [self.specials[part]] if part in self.specials else self.encode(part)
            for part in parts
            if part
        )
        return list(itertools.chain.from_iterable(encoded))

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ``ids``.

        Special tokens appear by name. An id outside the vocabulary, which a wider model may
        produce, appears as U+FFFD, the replacement character.
        """
        names = {i: name for name, i in self.specials.items()}

        def ordinary(i: int) -> bool:
            return i not in names and 0 <= i < self.vocab_size

        return "".join(
            self._decode(list(run))
            if is_ordinary
            else "".join(names.get(i, "\N{REPLACEMENT CHARACTER}") for i in run)
            for is_ordinary, run in itertools.groupby(map(int, ids), ordinary)
        )

    def document(self, tokens: np.ndarray) -> list[np.ndarray]:
        """The parts of a stored document: ``tokens`` between its start and end tokens."""
        edges = [np.array([] if i is None else [i], tokens.dtype) for i in (self.bos, self.eos)]
        return [edges[0], tokens, edges[1]]

    @abc.abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text, with special tokens as text; one unsigned array each."""

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Decodes ids without special tokens."""


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0..255, then ``<eos>`` 256 (document end) and ``<pad>`` 257."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"UTF-8 bytes, <eos> 256, <pad> 257").hexdigest()
    vocab_size = 258
    eos, pad = 256, 257
    specials = MappingProxyType({"<eos>": eos, "<pad>": pad})

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class _FileTokenizer(Tokenizer):
    """The base class of tokenizers that are read from a file."""

    def __init__(self, name: str):
        self.name = name
        self.fingerprint = _file_fingerprint(_tokenizer_file(name))

    def _name_specials(self, specials: Mapping[str, int], given: Mapping[str, str]) -> None:
        """Finds which special tokens are bos, eos, pad and unk."""
        self.specials = MappingProxyType(dict(specials))
        for role, usual in _SPECIAL_NAMES.items():
            names = [given[role]] if role in given else usual
            setattr(self, role, next((specials[n] for n in names if n in specials), None))

    def _name_start(self, usual: bool) -> None:
        """Finds whether ``bos`` is put before a text."""
        path = _tokenizer_file(self.name)
        adds = _config_beside(path).get("add_bos_token")
        require(
            isinstance(adds, bool | None),
            f"{path.with_name(CONFIG)}: add_bos_token must be true or false; got {adds!r}",
        )
        self.adds_bos = usual if adds is None else adds


class HuggingFaceTokenizer(_FileTokenizer):
    """A ``tokenizer.json``.

    A ``tokenizer_config.json`` beside it says which special token is the start of a document and so
    on, and perhaps whether one is put before a text; without it, the usual names apply, and what
    the file itself does.
    """

    def __init__(self, name: str):
        import tokenizers

        super().__init__(name)
        path = _tokenizer_file(name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._name_specials(
            {token.content: i for i, token in added.items() if token.special}, _roles_beside(path)
        )
        self._name_start(self._starts())

    def _starts(self) -> bool:
        """Returns whether the file puts ``bos`` before a text, rather than only behind it."""
        try:
            ids = self._tokenizer.encode("a").ids
        except Exception:  # The vocabulary lacks the letter.
            ids = self._tokenizer.encode("").ids
        return ids[:1] == [self.bos]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer(_FileTokenizer):
    """A sentencepiece ``.model``; its control symbols are the special tokens."""

    def __init__(self, name: str):
        import sentencepiece

        super().__init__(name)
        path = _tokenizer_file(name)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
        self.vocab_size = self._model.get_piece_size()
        special = [
            i
            for i in range(self.vocab_size)
            if self._model.is_control(i) or self._model.is_unknown(i)
        ]
        roles = {role: getattr(self._model, f"{role}_id")() for role in _SPECIAL_NAMES}
        self._name_specials(
            {self._model.id_to_piece(i): i for i in special},
            {role: self._model.id_to_piece(i) if i >= 0 else "" for role, i in roles.items()},
        )
        self._name_start(True)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.uint32) for ids in self._model.encode(list(texts), num_threads=-1)]

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


def load(name: str) -> Tokenizer:
    """Loads the tokenizer ``name``: ``bytes``, or the path of a file or of a folder with one.

    Raises:
      ValueError: if there is none, or it is damaged.
    """
    found = fingerprint(name)
    require(
        found is not None,
        f"there is no tokenizer {name!r}: expected 'bytes', a tokenizer.json, a sentencepiece "
        "*.model, or a folder that holds one of them (of a model without: --tokenizer=bytes)",
    )
    assert found is not None
    return _load(name, found)


def fingerprint(name: str) -> str | None:
    """The fingerprint of :func:`load` (name), without loading it; None if there is none."""
    if name == ByteTokenizer.name:
        return ByteTokenizer.fingerprint
    path = _tokenizer_file(name)
    return _file_fingerprint(path) if path.is_file() else None


@functools.lru_cache(maxsize=8)
def _load(name: str, _: str) -> Tokenizer:
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    kinds = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    path = _tokenizer_file(name)
    require(
        path.suffix in kinds,
        f"{path} is not a tokenizer: expected a name that ends in {' or '.join(kinds)}",
    )
    return kinds[path.suffix](name)


def _tokenizer_file(name: str) -> Path:
    path = Path(name).expanduser()
    inside = [path / "tokenizer.json", path / "tokenizer.model"]
    return next((file for file in inside if file.is_file()), path)


def _file_fingerprint(path: Path) -> str:
    roles = _roles_beside(path) if path.suffix == ".json" else {}
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([content, roles], sort_keys=True).encode()).hexdigest()


def _config_beside(path: Path) -> dict[str, Any]:
    """Reads the ``tokenizer_config.json`` beside a tokenizer, if there is one."""
    beside = path.with_name(CONFIG)
    if not beside.is_file():
        return {}
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{beside} is not JSON: {error}") from error
    require(isinstance(config, dict), f"{beside} must hold an object; got {type(config).__name__}")
    return config


def _roles_beside(path: Path) -> dict[str, str]:
    """Reads the special tokens that the file beside a ``tokenizer.json`` names."""
    config, found = _config_beside(path), {}
    for role in _SPECIAL_NAMES:
        entry = config.get(f"{role}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        require(
            isinstance(text, str) or entry is None,
            f"{path.with_name(CONFIG)}: {role}_token must be text, or an object with content; got "
            f"{entry!r}",
        )
        if text:
            found[role] = text
    return found


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """The tokenizer of a task.

    If ``vocab_size`` is given, construction does not read the tokenizer's content, so that you can
    check configs without it.

    Attributes:
      tokenizer: ``bytes``, or the path of a tokenizer (see :mod:`train.data.tokenizers`).
      tokenizer_fingerprint: of the tokenizer; filled in if the tokenizer is there. A run records
        it, and a different tokenizer is then an error.
      vocab_size: number of token ids; 0: the tokenizer's.
    """

    tokenizer: str = "bytes"
    tokenizer_fingerprint: str | None = None
    vocab_size: int = 0

    def __post_init__(self):
        found = fingerprint(self.tokenizer)
        require(
            found is None or self.tokenizer_fingerprint in (None, found),
            f"the tokenizer {self.tokenizer!r} has the fingerprint {found}, but "
            f"{self.tokenizer_fingerprint} was used: it is another tokenizer",
        )
        if found is not None:
            object.__setattr__(self, "tokenizer_fingerprint", found)
        if not self.vocab_size:
            object.__setattr__(self, "vocab_size", self.codec.vocab_size)

    @property
    def codec(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          ValueError: if there is none, or it has more tokens than ``vocab_size``.
        """
        codec = load(self.tokenizer)
        require(
            codec.vocab_size <= (self.vocab_size or codec.vocab_size),
            f"vocab_size = {self.vocab_size} is too small for the tokenizer {self.tokenizer!r}, "
            f"which has {codec.vocab_size} tokens",
        )
        return codec

    def encode(self, text: str) -> list[int]:
        """Encodes a text, after the token that starts a document, if any."""
        codec = self.codec
        return [*([] if codec.bos is None else [codec.bos]), *codec.encode(text)]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text, special ones by name."""
        return self.codec.decode(tokens)
