"""The model that :mod:`train.harness` adds; importing this needs ``lm_eval``."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tape_jax.sharding import ShardingConfig
from train.checks import positive, require
from train.evaluation import few_widths
from train.evaluation.continuations import Continuer
from train.evaluation.likelihoods import Given, Scorer
from train.training import runs
from train.training.generation import load
from train.training.metrics import Progress

# The harness's own values: the token limit of a model that names none, and of an answer.
MAX_LENGTH = 2048
MAX_NEW_TOKENS = 256
# Options of answers, with the values that leave them greedy.
GREEDY = {
    **{"do_sample": False, "temperature": 0, "num_beams": 1},
    **{"repetition_penalty": 1, "no_repeat_ngram_size": 0},
}
_SHAPES = 2


class TapeJax(TemplateLM):
    """A run or a Hugging Face Llama folder that the lm-evaluation-harness can ask.

    Requests are sorted by length and asked in batches of few shapes, each compiled once. A batch's
    answers go to the harness's cache (``--use_cache``) at once, so that a stopped evaluation
    can continue.
    """

    def __init__(
        self,
        run: str | None = None,
        model: str | None = None,
        adapter: str | None = None,
        tokenizer: str | None = None,
        batch_size: int | str = 16,
        max_length: int | None = None,
        chunk: int | None = None,
        add_bos_token: bool | None = None,
        data: int = 1,
        fsdp: int = 1,
        tensor: int = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        """
        Args:
          run: the run folder, or
          model: a Hugging Face Llama folder.
          adapter: for the Llama folder.
          tokenizer: of the Llama folder, if it is not in there.
          batch_size: requests at once; ``auto``: 16.
          max_length: tokens at most; None: those that the model takes or, if a Llama folder takes
            any number, those of its config; else 2,048.
          chunk: prompt tokens that are run at a time before an answer is written; None: all.
          add_bos_token: whether the token that starts a document starts a text, if there is one;
            None: for a run yes, for a Llama folder as its tokenizer does.
          data, fsdp, tensor: devices along mesh axes; one may be -1: all that are left.
          max_batch_size, device: given by the harness, and not used.

        Raises:
          ValueError: not exactly one of a run and a model, or one without a tokenizer, or invalid
            limits.
        """
        super().__init__()
        require(
            (run is None) != (model is None),
            "tape_jax: --model_args takes run=FOLDER or model=FOLDER; got "
            f"run={run}, model={model}",
        )
        folder = Path(str(model if run is None else run))
        alone = (data, fsdp, tensor) == (1, 1, 1)
        mesh = None if alone else ShardingConfig(data=int(data), fsdp=int(fsdp), tensor=int(tensor))
        speaker = load(folder, None if adapter is None else Path(adapter), tokenizer, mesh)
        require(
            speaker.codec is not None,
            f"tape_jax: {folder} was trained on a task without a tokenizer, and cannot read text",
        )
        assert speaker.codec is not None
        self.codec = speaker.codec
        if add_bos_token is None:
            add_bos_token = model is None or self.codec.adds_bos
        self._adds_bos = add_bos_token and self.codec.bos is not None
        limit = runs.max_length(speaker.model.config)
        positive("tape_jax: max_length", max_length, optional=True)
        require(
            max_length is None or limit is None or max_length <= limit,
            f"tape_jax: the model takes at most {limit} tokens; got max_length={max_length}",
        )
        self.max_length = max_length or limit or _usual_length(folder)
        size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        given, pad = (speaker.model, speaker.variables), self.codec.padding
        self._scorer = Scorer(*given, pad=pad, batch_size=size)
        self._continuer = Continuer(
            *given, pad=pad, stops=speaker.ends, batch_size=size, chunk=chunk
        )

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, else the one that starts it.

        Raises:
          ValueError: if the tokenizer has neither.
        """
        found = self.codec.bos if self.codec.eos is None else self.codec.eos
        if found is None:
            raise ValueError(f"tape_jax: the tokenizer {self.codec.name!r} has no bos and no eos")
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: a text's start token, else its end token."""
        return self.eot_token_id if self.codec.bos is None else self.codec.bos

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return f"tape_jax-{self.codec.fingerprint[:16]}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns a text's tokens, after a document's start token unless told otherwise."""
        with_bos = self._adds_bos if add_special_tokens is None else add_special_tokens
        start = [self.codec.bos] if with_bos and self.codec.bos is not None else []
        return [*start, *self.codec.encode(string)]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for rows, found in self._scored([(request[1], request[2]) for request in requests]):
            for row, likelihood in zip(rows, found, strict=True):
                answers[row] = tuple(likelihood)
                if requests[row][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[row][0], answers[row])
        return answers

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[Any, Any]]:
        """Scores continuations of contexts; a text that is too long loses its start."""
        given, places = [], []
        for place, (context, continuation) in enumerate(pairs):
            require(
                len(continuation) <= self.max_length,
                f"tape_jax: a continuation of {len(continuation)} tokens is longer than the "
                f"{self.max_length} that the model takes",
            )
            context = context or [self.prefix_token_id]
            tokens = np.array([*context, *continuation][-(self.max_length + 1) :])
            if continuation:
                given.append(Given(tokens, len(tokens) - len(continuation)))
                places.append(place)
        if not given:
            return
        done = 0
        with Progress.of("log-likelihoods") as progress:
            for rows, found in self._scorer.run(given):
                done += len(rows)
                progress(done, len(given))
                yield [places[row] for row in rows], found
        _report("log-likelihoods", self._scorer)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Returns the log-likelihoods of whole texts.

        Each token is scored once, with as much context as fits.
        """
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        sums = [0.0] * len(requests)
        left = np.bincount(owners, minlength=len(requests))
        for rows, found in self._scored(pairs):
            for row, likelihood in zip(rows, found, strict=True):
                number = owners[row]
                sums[number] += likelihood.sum
                left[number] -= 1
                if not left[number]:
                    args = requests[number].args
                    self.cache_hook.add_partial("loglikelihood_rolling", args, sums[number])
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns greedy continuations, up to the first text that ends them."""
        groups = defaultdict(list)
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1], MAX_NEW_TOKENS)
            if any(options.get(name) not in (None, off) for name, off in GREEDY.items()):
                raise NotImplementedError(
                    "tape_jax answers greedily, and cannot sample, search or penalise; got "
                    f"{request.args[1]}"
                )
            groups[tuple(options["until"]), int(options["max_gen_toks"])].append(number)
        answers, done = [""] * len(requests), 0
        with Progress.of("answers") as progress:
            for (until, new), numbers in groups.items():
                prompts = self._prompts([requests[n].args[0] for n in numbers], new)
                for rows, found in self._continued(prompts, new, until):
                    for row, tokens in zip(rows, found, strict=True):
                        number = numbers[row]
                        text = self._text(tokens)
                        answers[number] = postprocess_generated_text(text, list(until), None)
                        args = requests[number].args
                        self.cache_hook.add_partial("generate_until", args, answers[number])
                    done += len(rows)
                    progress(done, len(requests))
        _report("answers", self._continuer)
        return answers

    def _prompts(self, texts: Sequence[str], new: int) -> list[np.ndarray]:
        """Returns the tokens of contexts, cut at the start to leave room for the answer."""
        room = self.max_length - new
        require(
            room > 0,
            f"tape_jax: an answer of {new} tokens leaves no room for a question in the "
            f"{self.max_length} that the model takes: give a smaller max_gen_toks",
        )
        encoded = (self.tok_encode(text)[-room:] or [self.prefix_token_id] for text in texts)
        return [np.array(tokens) for tokens in encoded]

    def _continued(
        self, prompts: Sequence[np.ndarray], new: int, until: tuple[str, ...]
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        widths = few_widths([len(prompt) for prompt in prompts], _SHAPES)

        stops = set(self._continuer.stops)

        def enough(rows: np.ndarray) -> bool:
            return all(
                not stops.isdisjoint(row) or any(end in self._text(row) for end in until if end)
                for row in rows.tolist()
            )

        self._continuer.enough = enough if any(until) else None
        return self._continuer.run(prompts, new, widths)

    def _text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Decodes tokens, and leaves special ones out."""
        special = set(self.codec.specials.values())
        return self.codec.decode([i for i in map(int, tokens) if i not in special])


def _report(what: str, worker: Scorer | Continuer) -> None:
    """Says how fast it went, and how much memory was planned."""
    print(f"{what}: {worker.programs.speed}; {worker.programs.memory}", file=sys.stderr, flush=True)


def _usual_length(folder: Path) -> int:
    """Returns the token limit in a folder's ``config.json``, else :data:`MAX_LENGTH`."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return int(config.get("max_position_embeddings", MAX_LENGTH))
