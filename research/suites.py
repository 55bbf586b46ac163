"""The suites: studies, the questions asked of them, and the words of their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from research import arena, claims, place_claims, studies
from research.claims import Claim
from research.studies import RECENT
from research.study import Design

# What is compared, by its name on both pages: TAPE, whole or with a part changed; and all else.
TAPE = {
    "tape_head_scale": (
        'TAPE; heads are mixed as in the published code, `attention_mix="head_scale"`'
    ),
    "tape": 'TAPE; heads are mixed as the paper writes, `"heads"`, which is the default',
    "tape_head_scale_alibi": "`tape_head_scale` with ALiBi's bias on the same logits",
    "tape_alibi": "`tape` with ALiBi's bias on the same logits",
    "tape_demo": (
        '`tape_alibi` with `alpha=8` and `norm="rms"`, the form of `make demo`: it was chosen on '
        "addressing, where its verdicts are of a form that was fitted to the task"
    ),
    "tape_fox": "`tape` with FoX's decay",
    "tape_fox_open": "`tape_fox` with gates that start at 0.993, `bias=5.0`, not at 1/2",
    "tape_fox_open_alibi": "`tape_fox_open` with ALiBi's bias beside the decay",
    "tape_chosen": (
        "`tape_demo` with stretched positions in training, chosen among twelve options on [four "
        "further tasks](../benchmarks/results/2026-11-24-remedies.md)"
    ),
    "tape_shift": "`tape_demo` in which each head's states start a token later than the last one's",
    "tape_phases": "`tape_demo` whose heads start apart by phases of each frequency, drawn once",
    "tape_polar": "`tape_demo` whose states start in PoPE's polar form: `tape_pope`",
    "tape_late_alibi": "`tape_alibi` in the second and third of three layers, RoPE in the first",
    "place_weights": "`tape_head_scale` with weights of the update that depend on a token's place",
    "early": (
        "`tape_head_scale` in which the first and the second of six layers update, and no other"
    ),
    "late": (
        "`tape_head_scale` in which the fourth and the fifth of six layers update, and no other"
    ),
    "separate_cos_sin": "`tape_head_scale` with weights of their own for cosines and for sines",
    "mix_head_dim": "`tape_head_scale` that mixes along the dimensions of a head, not over heads",
    "no_equivariance": "`tape_head_scale` that mixes all heads and dimensions by one matrix",
}
OTHERS = {
    "rope_alibi": "RoPE with ALiBi's bias: TAPE with that bias, without its update",
    "rope_fox": "RoPE with FoX's decay: `tape_fox` without its update",
    "rope_fox_open": "`tape_fox_open` without its update",
    "rope_fox_open_alibi": "`tape_fox_open_alibi` without its update",
    "chosen_no_update": (
        "`tape_chosen` without its update: RoPE with ALiBi's bias and stretched positions"
    ),
    "no_update": "`tape_head_scale` without its update, which is RoPE",
    "rope": "RoPE: queries and keys are rotated by their positions",
    "alibi": "ALiBi: a bias in proportion to the distance",
    "fire": "FIRE: a bias that is learned, by distance and length",
    "none": "no encoding",
    "sinusoidal": "sines and cosines of the position, added to the embeddings",
    "learned": "a learned vector for each position, added to the embeddings",
    "random_rope": "RoPE with positions drawn at random from a longer range",
    "fox": "contextual: FoX, a decay by gates of the tokens in between",
    "path": "contextual: PaTH, keys rewritten by the tokens in between",
    "cope": "contextual: CoPE, positions counted by gates of queries and keys",
    "selective_rope": "contextual: RoPE with angles that are sums over the tokens so far",
    "fox_alibi": "contextual: `fox` with ALiBi's bias on the same logits",
    "path_alibi": "contextual: `path` with that bias",
    "cope_alibi": "contextual: `cope` with that bias",
    "selective_rope_alibi": "contextual: `selective_rope` with that bias",
    "pope": "PoPE: lengths by content, angles by position",
    "dda_per_row": "contextual: a decay by gates of each query and the tokens in between",
    "wall": "contextual: Wall, a decay of each channel by gates of the tokens in between",
    "inkling": "contextual: Inkling's global layers, a bias that a token mixes of a learned table",
    "dapev2_kerple": "contextual: DAPE v2, KERPLE's bias changed by all logits nearby",
    **{f"{name}_alibi": f"`{name}` with ALiBi's bias on the same logits" for name in RECENT},
    "rope_none": "RoPE in two of three layers, no encoding in the last",
    "rope_windows": "RoPE, and in the first two of three layers a window of 16 tokens",
    "mapformer_wm": "contextual: MapFormer, RoPE along a path of learned moves",
    "lora": "tuned by low-rank terms",
    "longlora": "tuned as LongLoRA does: by low-rank terms and shifted sparse attention",
    "theta": "tuned with another base of RoPE's frequencies",
    "full": "tuned in all parameters",
}


class Suite(NamedTuple):
    """Studies that have one page.

    Attributes:
      name: of the page.
      designs: the studies, in the order in which they are made.
      claims: the claims that they judge.
      title: of the page.
      introduction: its first paragraph.
      order: of the runs, in words.
      make: the command of the Makefile.
      command: the command for a part.
      subject: what a claim is called.
      closing: what the introduction ends with, if anything.
      overview: whether the page has a table and a picture of all studies of exact match.
      read: studies of another page that also judge its claims, by page name.
    """

    name: str
    designs: Sequence[Design]
    claims: Sequence[Claim]
    title: str
    introduction: str
    order: str
    make: str
    command: str
    subject: str = "claim"
    closing: str = ""
    overview: bool = False
    read: Mapping[str, Sequence[Design]] = {}

    @property
    def names(self) -> dict[str, str]:
        """The names of the forms and rivals that its studies compare, with descriptions."""
        found = {
            name
            for design in self.designs
            for name in getattr(design, "rivals", getattr(design, "variants", ()))
        }
        return {name: what for name, what in {**TAPE, **OTHERS}.items() if name in found}

    @property
    def asked(self) -> dict[str, str]:
        """The titles of its claims by name; claims with several studies include the test."""
        return {
            claim.name: claim.title + (f". {claim.test}" if len(claim.studies) > 1 else "")
            for claim in self.claims
        }

    def headed(self, study: str) -> str:
        """Returns a heading for a study's pictures: the claim that it alone tests, or its name."""
        alone = [
            f"{self.subject.capitalize()} {number}: {claim.title}"
            for number, claim in enumerate(self.claims, 1)
            if claim.studies == (study,)
        ]
        return alone[0] if len(alone) == 1 else study


SUITES: dict[str, Suite] = {
    "claims": Suite(
        name="evidence",
        designs=studies.STUDIES,
        claims=claims.CLAIMS,
        title="Does TAPE do what is claimed?",
        introduction=(
            "Every claim that the paper makes of TAPE, or others make of it, tested by experiments "
            "that fit on two CPU cores, by [a protocol](protocol.md) that was written before them. "
            "They are small: a verdict holds at the size that was trained, and each names the "
            "larger test that would settle it."
        ),
        order="claims first",
        make="make evidence",
        command="python -m research.main evidence",
        closing=(
            "The records of what was found before the protocol are in "
            "[records_before.jsonl](records_before.jsonl), and decide nothing here."
        ),
    ),
    "places": Suite(
        name="places",
        designs=place_claims.STUDIES,
        claims=place_claims.CLAIMS,
        title="Where is TAPE ahead, and where is it not?",
        introduction=(
            "Tasks in which a place is to be found by content, or positions are to count what the "
            "content says, and two controls that need neither, `flip_flop` and `recall`; then "
            "text, sums and keys, with the runs of [the claims](evidence.md); then whether one "
            "form is ahead in all of it. All are small, and fit on two CPU cores. [What was found, "
            "in words](findings.md).\n\n"
            "* A form of TAPE is *ahead* if it is clearly better than RoPE, ALiBi, FIRE and no "
            "encoding, and, with a bias, than the same without its update; *behind* if it is "
            "clearly worse than one of them. Contextual rivals are judged apart.\n"
            "* [The protocol](protocol.md) and its addenda [for these "
            "tasks](protocol.md#addendum-tasks-of-places), [for one "
            "TAPE](protocol.md#addendum-one-tape-for-all) and [for longer "
            "trainings](protocol.md#addendum-longer-trainings-at-places) were written before any "
            "run of the tasks that they judge, but for [what walks "
            "ask](protocol.md#what-was-changed-in-place), and say what was known then.\n"
            "* `address_4x_again` is a second try against three of these rivals alone, by [version "
            "2](protocol.md#version-2-addressing-asked-again), which was written when the first "
            "had told nothing apart; [an addendum](protocol.md#addendum-its-contextual-rivals), "
            "written when that had been judged, sets contextual rivals beside it, and "
            "[another](protocol.md#addendum-the-same-bias-for-all-and-none) asks of TAPE and of "
            "them with the same bias, and without any.\n"
            "* [Three more](protocol.md#addendum-a-decay-on-text), written with results of others "
            "seen, ask of text, sums and keys with FoX's decay in TAPE, and of all tasks with "
            "gates that start open, by themselves and with ALiBi's bias beside them.\n"
            "* [The last](protocol.md#addendum-counting-and-copying) asks `counting` and "
            "`selective_copy`, which one form was chosen on, and says what simple rules get there."
        ),
        order="a task after the other",
        make="make evidence-places",
        command="python -m research.main evidence --suite=places",
        subject="task",
        overview=True,
        read={"evidence": place_claims.OF_CLAIMS},
    ),
    "arena": Suite(
        name="arena",
        designs=arena.STUDIES,
        claims=arena.CLAIMS,
        title="Encodings of recent models, schedules, and TAPE without RoPE's start",
        introduction=(
            "Tasks of [the other pages](places.md), asked of five encodings that recent models "
            "have, alone and with ALiBi's bias, and of three schedules; and of TAPE whose states "
            "start otherwise than RoPE's. [The "
            "protocol](protocol.md#addendum-recent-encodings-schedules-and-other-starts) was "
            "written before any of these runs. *Ahead*: clearly better than RoPE and TAPE with "
            "ALiBi's bias; a start: than the same with RoPE's, and the same without the update; "
            "*behind*: clearly worse than one of them."
        ),
        order="from the cheapest task to the dearest",
        make="make evidence-arena",
        command="python -m research.main evidence --suite=arena",
        subject="task",
        overview=True,
    ),
}
