"""The claims about TAPE (by arXiv:2501.00712, and others who wrote about it), and their tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from research.overhead import PlannedCost
from research.protocol import KEYS_LOST, MOST_PARAMETERS, MOST_TIME, PERPLEXITY_GAINED
from research.stability import PlannedGrowth
from research.studies import CONTEXTUAL, PROBLEMS
from research.trainings import BEYOND, INSIDE
from research.verdicts import Kind, Verdict, best_of, every, keeps, limited, together, wins
from train.statistics import estimate

Studies = Mapping[str, Any]

FORMS = ("tape_head_scale", "tape")
WITH_BIAS = (*FORMS, "tape_alibi")


class Claim(NamedTuple):
    """A claim and its test.

    Attributes:
      title: what is claimed.
      test: how it is tested, and what counts as confirmed.
      needs: what a test at the published scale would take.
      studies: names of the studies that it uses.
      judge: returns the verdict on one of the forms.
      forms: forms that are judged, each separately.
      beside: a study, one of its scores, and contextual rivals that the forms are compared with.
      cut: a study and a form in which all layers update: the page says beside the verdict what it
        loses without each layer's update.
      name: a word or two, for tables with a row for each claim.
      words: names of verdicts, if they differ from their values.
    """

    title: str
    test: str
    needs: str
    studies: tuple[str, ...]
    judge: Callable[[Studies, str], Verdict]
    forms: tuple[str, ...] = FORMS
    beside: tuple[str, str, tuple[str, ...]] | None = None
    cut: tuple[str, str] | None = None
    name: str = ""
    words: Mapping[Kind, str] = {}

    def word(self, kind: Kind) -> str:
        """Returns the name of a verdict on this claim."""
        return self.words.get(kind, kind.value)


def _against(form: str, *rivals: str) -> list[str]:
    """Returns a form's rivals; for a form with a bias, also RoPE with that bias."""
    return [*rivals, *(["rope_alibi"] if form == "tape_alibi" else [])]


def _text(studies: Studies, form: str) -> Verdict:
    rivals = _against(form, "rope", "alibi", "sinusoidal", "learned")
    return wins(studies["text"], "perplexity_1x", rivals, name=form)


def _sums(studies: Studies, form: str) -> Verdict:
    rivals = ["rope", "alibi", "sinusoidal", "none", "fire", "random_rope"]
    return wins(studies["addition"], BEYOND, rivals, name=form)


def _retrieval(studies: Studies, form: str) -> Verdict:
    study, rivals = studies["passkey"], ["rope", "alibi", "sinusoidal", "none"]
    kept = keeps(study, INSIDE, BEYOND, name=form, loss=KEYS_LOST)
    return every(wins(study, BEYOND, rivals, name=form), kept)


def _longer_text(studies: Studies, form: str) -> Verdict:
    study, rivals = studies["text"], _against(form, "rope", "alibi", "sinusoidal")
    ends = "perplexity_1x", "perplexity_8x"
    kept = keeps(study, *ends, name=form, loss=PERPLEXITY_GAINED)
    return every(wins(study, "perplexity_8x", rivals, name=form), kept)


def _tuning(studies: Studies, form: str) -> Verdict:
    rivals = ["lora", "longlora", "theta", "full"]
    keys = "perplexity_overlapping_1x", "passkey_1x"
    return every(*(wins(studies["context"], key, rivals, name=form) for key in keys))


def _overhead(studies: Studies, form: str) -> Verdict:
    study: PlannedCost = studies["overhead"]
    unfinished = [name for name in study.state.unfinished if name.startswith(f"{form}-")]
    if unfinished:
        return Verdict(Kind.UNFINISHED, [], (f"overhead: {', '.join(unfinished)}",))
    parts = []
    for length, found in study.measured(form).items():
        for what, label, most in (
            ("time", "time of a step", MOST_TIME),
            ("parameters", "parameters", MOST_PARAMETERS),
        ):
            saved = estimate([1 - x[what] for x in found])
            score = f"{label} over RoPE's, at {length:,} tokens"
            part = limited(saved, 1 - most, name=form, against="rope", score=score, multiple=True)
            parts.append(part)
    return every(*parts)


def _updates(studies: Studies, form: str) -> Verdict:
    words = wins(studies["ablations"], BEYOND, ["no_update"], name=form)
    return every(words, wins(studies["text"], "perplexity_1x", ["rope"], name=form))


def _ablation(variant: str) -> Callable[[Studies, str], Verdict]:
    """Returns the test that a variant is worse at sorting longer words."""
    return lambda studies, form: wins(studies["ablations"], BEYOND, [variant], name=form)


def _orthogonal(studies: Studies, form: str) -> Verdict:
    study: PlannedGrowth = studies["stability"]
    broken, depth = ("separate_cos_sin", "mix_head_dim", "no_equivariance"), study.design.depths[-1]
    found = {}
    for name in (form, *broken):
        growths = study.growths(name, depth)
        if growths is None:
            return Verdict(Kind.UNFINISHED, [], (f"stability: {name} at {depth} layers",))
        found[name] = {seed: -math.log(x) for seed, x in growths.items()}
    score = f"growth of a state, {depth} layers"
    return best_of(found.pop(form), found, name=form, score=score)


def _algorithms(studies: Studies, form: str) -> Verdict:
    """Judges, as one family, whether a form leads at one problem at least and trails nowhere."""
    of_problems = [studies[f"length-{problem}"] for problem in PROBLEMS]
    rivals = ("rope", "alibi", "fire", "none")
    return together(form, [[(study, BEYOND, rival) for rival in rivals] for study in of_problems])


def standing(studies: Studies, claim: Claim) -> Sequence[Verdict]:
    """Returns the forms' verdicts against contextual rivals that the claim does not name."""
    if claim.beside is None:
        return ()
    study, key, rivals = claim.beside
    return [wins(studies[study], key, rivals, name=form) for form in claim.forms]


GPU = "`python -m research.main evidence --config.scale=gpu`"

CLAIMS = (
    Claim(
        "The lowest perplexity, against RoPE, ALiBi and absolute positions",
        "Perplexity of held-out bytes at the trained length; below that of `rope`, `alibi`, "
        "`sinusoidal` and `learned`.",
        "C4, 162 million parameters (155 by the paper), 5 billion tokens: `configs/c4_pretrain.py`",
        ("text",),
        _text,
        WITH_BIAS,
        ("text", "perplexity_1x", CONTEXTUAL),
    ),
    Claim(
        "The best at sums longer than those trained on",
        "Exact match of sums with an operand longer than any trained on; above `rope`, `alibi`, "
        "`sinusoidal`, `none`, `fire` and `random_rope`.",
        "operands of 40 digits, 16 layers of width 1,024, 20,000 steps: `configs/addition.py`",
        ("addition",),
        _sums,
    ),
    Claim(
        "Retrieval that does not drop with length",
        f"Keys found beyond the trained length: at most {KEYS_LOST:g} points fewer than at it, and "
        "more than with `rope`, `alibi`, `sinusoidal` and `none`.",
        "a model of 7 billion parameters tuned to 8,192 tokens: `configs/context_extension.py`",
        ("passkey",),
        _retrieval,
    ),
    Claim(
        "Longer text without training on it",
        "Perplexity at eight times the trained length: at most "
        f"{100 * PERPLEXITY_GAINED:g} % above that at the trained length, and below that of "
        "`rope`, `alibi` and `sinusoidal`.",
        "C4, judged at 8,192 tokens: `configs/c4_pretrain.py`",
        ("text",),
        _longer_text,
        WITH_BIAS,
        ("text", "perplexity_8x", CONTEXTUAL),
    ),
    Claim(
        "Gains with little fine-tuning and few parameters",
        "RoPE models of 64 bytes tuned to 128 in 150 steps; perplexity and keys found at 128, "
        "twice the length of the base and 1x below, better than with LoRA, LongLoRA, another "
        "rotary base and full tuning.",
        "Llama 2 7B, 1,000 steps of 64 sequences of 8,192 tokens: `configs/context_extension.py`",
        ("context",),
        _tuning,
    ),
    Claim(
        "Minimal overhead",
        f"A training step in turns with RoPE's; at most {MOST_TIME:g} times its time and "
        f"{MOST_PARAMETERS:g} times its parameters at every length.",
        "the same on a GPU: `python -m benchmarks.gpu`",
        ("overhead",),
        _overhead,
    ),
    Claim(
        "Contextual updates matter",
        "Without updates, which is RoPE: worse at sorting longer words, and on text.",
        GPU,
        ("ablations", "text"),
        _updates,
    ),
    Claim(
        "Permutation equivariance matters",
        "Weights of the update that depend on the absolute position (`place_weights`): worse at "
        "sorting longer words.",
        GPU,
        ("ablations",),
        _ablation("place_weights"),
        ("tape_head_scale",),
    ),
    Claim(
        "Orthogonal equivariance keeps training stable",
        "Updates that break it: the largest state of a trained model of 48 layers, relative to its "
        "start, is larger with each of them.",
        GPU,
        ("stability",),
        _orthogonal,
        ("tape_head_scale",),
    ),
    Claim(
        "Updates in later layers matter more",
        "Where only two of six layers update, the fourth and the fifth (`late`) or the first two "
        "(`early`), each at its own rate: the late ones better at sorting longer words. That says "
        "nothing of a model in which all layers update; `states` measures that.",
        GPU,
        ("ablations",),
        _ablation("early"),
        ("late",),
        cut=("ablations", "tape_head_scale"),
    ),
    Claim(
        "A wider class of algorithms",
        "A regular and a context-free problem, parity and reversal, beyond the trained length: "
        "ahead of `rope`, `alibi`, `fire` and `none` at one of them at least, behind nowhere.",
        GPU,
        tuple(f"length-{problem}" for problem in PROBLEMS),
        _algorithms,
    ),
)
