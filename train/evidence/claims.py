"""What is claimed of TAPE (arXiv:2501.00712, and what others wrote of it), and how it is tested."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.comparison.report import by_seed
from train.evidence import suite
from train.evidence.overhead import PlannedCost
from train.evidence.stability import PlannedGrowth
from train.evidence.suite import BEYOND, INSIDE
from train.evidence.trainings import PlannedTrainings
from train.evidence.verdicts import Kind, Verdict, compare, every, keeps, unfinished, wins

Studies = Mapping[str, Any]

# A step may take so many times that of RoPE, a model have so many times its parameters.
MOST_TIME, MOST_PARAMETERS = 1.15, 1.05
# What may be lost from the trained length to longer ones: keys in per cent, or a share of
# perplexity.
KEYS_LOST, PERPLEXITY_GAINED = 5.0, 0.05
# A state that grew so many times its start has left it.
GROWTH = 10.0


class Claim(NamedTuple):
    """A claim and its test.

    Attributes:
      title: what is claimed.
      test: how it is tested, and what counts as confirmed.
      needs: what a test at the published scale would take.
      studies: names of those that it uses.
      judge: says what came out.
    """

    title: str
    test: str
    needs: str
    studies: tuple[str, ...]
    judge: Callable[[Studies], Verdict]


def _ablation(variant: str, *, name: str = "tape") -> Callable[[Studies], Verdict]:
    """Whether a variant is clearly worse than another, at sorting longer words and on text."""

    def judge(studies: Studies) -> Verdict:
        words = wins(studies["ablations"], BEYOND, [variant], name=name)
        text = wins(studies["ablations-text"], "perplexity_1x", [variant], name=name)
        return every(words, text)

    return judge


def _retrieval(studies: Studies) -> Verdict:
    kept = keeps(studies["passkey"], INSIDE, BEYOND, loss=KEYS_LOST)
    rivals = [n for n in studies["passkey"].design.rivals if not n.startswith("tape")]
    return every(kept, wins(studies["passkey"], BEYOND, rivals))


def _longer_text(studies: Studies) -> Verdict:
    kept = keeps(studies["text"], "perplexity_1x", "perplexity_8x", loss=PERPLEXITY_GAINED)
    return every(kept, wins(studies["text"], "perplexity_8x", ["rope", "alibi", "sinusoidal"]))


def _tuning(studies: Studies) -> Verdict:
    rivals = ["lora", "longlora", "theta", "full"]
    text = wins(studies["context"], "perplexity_overlapping_1x", rivals)
    return every(text, wins(studies["context"], "passkey_1x", rivals))


def _overhead(studies: Studies) -> Verdict:
    study: PlannedCost = studies["overhead"]
    state = study.state
    if state.unfinished:
        return Verdict(Kind.UNFINISHED, f"overhead: {len(state.unfinished)} measurements missing.")
    within, parts = True, []
    for length, found in study.measured().items():
        mean = {key: statistics.fmean(x[key] for x in found) for key in found[0]}
        within &= mean["time"] <= MOST_TIME and mean["parameters"] <= MOST_PARAMETERS
        parts.append(
            f"at {length:,} tokens {mean['time']:.3f} times RoPE's step (RoPE against itself "
            f"{mean['noise']:.3f}), {mean['parameters']:.3f} times its parameters"
        )
    kind = Kind.CONFIRMED if within else Kind.NOT_CONFIRMED
    return Verdict(kind, f"{'; '.join(parts)}."[0].upper() + f"{'; '.join(parts)}."[1:])


def _orthogonal(studies: Studies) -> Verdict:
    study: PlannedGrowth = studies["stability"]
    state = study.state
    if state.unfinished:
        missing = f"stability: {len(state.finished)} of {state.total} measurements."
        return Verdict(Kind.UNFINISHED, missing)
    counts: dict[str, list[bool]] = {}
    for trace in study.traces():
        bad = trace.diverged is not None or trace.trained.growth > GROWTH
        counts.setdefault(trace.variant, []).append(bad)
    broken = ("separate_cos_sin", "mix_head_dim", "no_equivariance")
    words = ", ".join(f"{n} {sum(counts[n])} of {len(counts[n])}" for n in ("tape", *broken))
    stable = not any(counts["tape"]) and all(any(counts[name]) for name in broken)
    kind = Kind.CONFIRMED if stable else Kind.NOT_CONFIRMED
    return Verdict(
        kind, f"Trainings that diverged, or whose states grew {GROWTH:g} times: {words}."
    )


def _algorithms(studies: Studies) -> Verdict:
    """TAPE must clearly lead somewhere, and clearly trail nowhere."""
    names = [f"length-{problem}" for problem in suite.PROBLEMS]
    waiting = unfinished(*(studies[name] for name in names))
    if waiting:
        return waiting
    leads, trails = [], []
    for name in names:
        study: PlannedTrainings = studies[name]
        score = study.scores[0]
        values = {
            rival: by_seed(runs, score)
            for rival, runs in study.results().items()
            if rival not in suite.CANDIDATES
        }
        standing = compare(values, "tape", score)
        if len(standing.worse) == len(values) - 1:
            leads.append(name.removeprefix("length-"))
        if standing.better:
            trails.append(f"{name.removeprefix('length-')} ({', '.join(standing.better)})")
    kind = Kind.CONFIRMED if leads and not trails else Kind.NOT_CONFIRMED
    return Verdict(
        kind,
        f"Beyond the trained length tape clearly leads on {', '.join(leads) or 'none'} of "
        f"{len(names)} problems, and is clearly behind on {'; '.join(trails) or 'none'}.",
    )


GPU = "`python -m train.main evidence --config.scale=gpu`"

CLAIMS = (
    Claim(
        "The lowest perplexity, against RoPE, ALiBi and absolute positions",
        "Perplexity of held-out bytes at the trained length; clearly below that of `rope`, "
        "`alibi`, `sinusoidal` and `learned`.",
        "C4, 155 million parameters, 5 billion tokens: `configs/c4_pretrain.py`",
        ("text",),
        lambda s: wins(s["text"], "perplexity_1x", ["rope", "alibi", "sinusoidal", "learned"]),
    ),
    Claim(
        "The best at sums longer than those trained on",
        "Exact match of sums with an operand longer than any trained on; clearly above every other "
        "encoding.",
        "operands of 40 digits, 16 layers of width 1,024, 20,000 steps: `configs/addition.py`",
        ("addition",),
        lambda s: wins(
            s["addition"],
            BEYOND,
            [n for n in s["addition"].design.rivals if not n.startswith("tape")],
        ),
    ),
    Claim(
        "Retrieval that does not drop with length",
        f"Keys found beyond the trained length; at most {KEYS_LOST:g} points below those found at "
        "it, and clearly more than with every other encoding.",
        "a model of 7 billion parameters tuned to 8,192 tokens: `configs/context_extension.py`",
        ("passkey",),
        _retrieval,
    ),
    Claim(
        "Longer text without training on it",
        "Perplexity at eight times the trained length; at most "
        f"{100 * PERPLEXITY_GAINED:g} % above that at the trained length, and clearly below that "
        "of `rope`, `alibi` and `sinusoidal`.",
        "C4, judged at 8,192 tokens: `configs/c4_pretrain.py`",
        ("text",),
        _longer_text,
    ),
    Claim(
        "Gains with little fine-tuning and few parameters",
        "A RoPE model tuned to twice its length in 150 steps; perplexity and keys found at that "
        "length clearly better than with LoRA, LongLoRA, another rotary base and full tuning.",
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
        "TAPE with both parts of the update left out (`no_update`); clearly worse at sorting "
        "longer words, and on text.",
        GPU,
        ("ablations", "ablations-text"),
        _ablation("no_update"),
    ),
    Claim(
        "Permutation equivariance matters",
        "Weights of the update that depend on the absolute position (`place_weights`); clearly "
        "worse at sorting longer words, and on text.",
        GPU,
        ("ablations", "ablations-text"),
        _ablation("place_weights"),
    ),
    Claim(
        "Orthogonal equivariance keeps training stable",
        "Updates that break it, at 4 to 48 layers; each broken one diverges, or its states grow "
        f"{GROWTH:g} times, in at least one training, and TAPE in none.",
        GPU,
        ("stability",),
        _orthogonal,
    ),
    Claim(
        "Updates in later layers matter more",
        "Updates in the last layers only (`late`); clearly better at sorting longer words, and on "
        "text, than in the first only (`early`).",
        GPU,
        ("ablations", "ablations-text"),
        _ablation("early", name="late"),
    ),
    Claim(
        "A wider class of algorithms",
        "Seven problems beyond the trained length; TAPE clearly leads on at least one, and is "
        "clearly behind on none. Which depth solves the words of which group is listed below.",
        GPU,
        tuple(f"length-{problem}" for problem in suite.PROBLEMS),
        _algorithms,
    ),
)
