"""The studies of the suite, in the order in which they are made: those of claims first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from research.choosing import Curve
from research.configs import places
from research.configs.ablations import VARIANTS
from research.overhead import Cost
from research.stability import Growth
from research.states import StateUse
from research.study import Base, Design, Fields
from research.trainings import BEYOND, INSIDE, Trainings

CONFIGS, OWN = Path("configs"), Path("research/configs")
# A regular and a context-free problem.
PROBLEMS = ("parity", "reverse")
CONTEXTUAL = ("fox", "path", "cope", "selective_rope")
# Options save hours: distances as in texts trained on; fewer tokens at once.
RECENT: dict[str, dict[str, Any]] = {
    "pope": {},
    "dda_per_row": {},
    "inkling": {"model.position.reach": 128},
    "wall": {"model.position.chunk": 16},
    "dapev2_kerple": {},
}
# On a CPU a shallow model compiles and trains faster without a loop over its layers.
SHALLOW = {"cpu": {"model.scan_layers": False}}

KIND, MIX, SHIFT = (f"model.position.{x}" for x in ("kind", "attention_mix", "head_shift"))
# numpy.random.default_rng(0).integers(0, 19869), in tokens: the slowest frequency of heads of 16
# takes 19,869 for a turn.
PHASES = 16901.0
# FoX's gates start at 1/2 by default; here at 0.993, so that half is left 100 tokens back.
OPEN = {"model.position.bias": 5.0}
FORMS: dict[str, dict[str, Any]] = {
    # The published code's form, the paper's, and both with ALiBi's bias on the same logits.
    "tape_head_scale": {KIND: "tape", MIX: "head_scale"},
    "tape": {KIND: "tape", MIX: "heads"},
    "tape_head_scale_alibi": {KIND: "tape+alibi", MIX: "head_scale"},
    "tape_alibi": {KIND: "tape+alibi", MIX: "heads"},
    # From configs/addressing_demo.py: it was chosen on addressing.
    "tape_demo": places.VARIANTS["base"],
    # The best of several options on four other tasks.
    "tape_chosen": places.CHOSEN,
    "chosen_no_update": places.NO_UPDATE,
    "tape_fox": {KIND: "tape+fox", MIX: "heads"},
    "tape_fox_open": {KIND: "tape+fox", MIX: "heads", **OPEN},
    "tape_fox_open_alibi": {KIND: "tape+fox+alibi", MIX: "heads", **OPEN},
    "rope_alibi": {KIND: "rope+alibi"},
    "rope_fox": {KIND: "rope+fox"},
    "rope_fox_open": {KIND: "rope+fox", **OPEN},
    "rope_fox_open_alibi": {KIND: "rope+fox+alibi", **OPEN},
    **{f"{name}_alibi": {KIND: f"{name}+alibi"} for name in CONTEXTUAL},
    **{name: {KIND: name, **own} for name, own in RECENT.items()},
    **{f"{name}_alibi": {KIND: f"{name}+alibi", **own} for name, own in RECENT.items()},
    # Schedules of three layers.
    "rope_none": {KIND: "rope/rope/none"},
    "rope_windows": {KIND: "rope+window/rope+window/rope", "model.position.size": 15},
    "tape_late_alibi": {KIND: "rope+alibi/tape+alibi/tape+alibi", MIX: "heads"},
    # The demo's form with other start states: each head one token later than the one before; so
    # much later that each frequency's phase is as good as random; in PoPE's polar form.
    "tape_shift": {**places.VARIANTS["base"], SHIFT: 1.0},
    "tape_phases": {**places.VARIANTS["base"], SHIFT: PHASES},
    "tape_polar": {**places.VARIANTS["base"], KIND: "tape_pope+alibi"},
    # Each question's positions are drawn for its own length, whatever questions are asked with it.
    "random_rope": {KIND: "random_rope", "evaluation.shapes": 100_000},
}


def encodings(*names: str) -> dict[str, Fields]:
    """Returns rivals by the names of their encodings, or of :data:`FORMS`."""
    return {name: FORMS.get(name, {KIND: name}) for name in names}


_MADE: tuple[Design, ...] = (
    Trainings(
        name="text",
        config=CONFIGS / "bytes_demo.py",
        rivals=encodings(
            *("tape_head_scale", "tape", "rope", "alibi", "sinusoidal", "learned"),
            *("tape_alibi", "rope_alibi", *CONTEXTUAL),
        ),
        fields={
            "evaluation.protocols": ("disjoint",),
            "evaluation.factors": (1, 2, 8),
            "evaluation.tokens": 65_536,
        },
        by_scale={**SHALLOW, "gpu": {"evaluation.tokens": 131_072}},
        scores=("perplexity_1x", "perplexity_8x"),
        shown=("perplexity_2x",),
        curve=Curve("perplexity_1x", most=4),
        minutes=0.75,
        quick=("rope",),
    ),
    Trainings(
        name="addition",
        config=CONFIGS / "addition_demo.py",
        rivals=encodings(
            *(
                "tape_head_scale",
                "tape",
                "rope",
                "alibi",
                "sinusoidal",
                "none",
                "fire",
                "random_rope",
            ),
        ),
        by_scale={"cpu": {**SHALLOW["cpu"], "train.steps": 1500}},
        scores=(BEYOND,),
        shown=(INSIDE,),
        curve=Curve(INSIDE, most=1),
        minutes=0.7,
    ),
    Trainings(
        name="passkey",
        config=CONFIGS / "passkey_demo.py",
        rivals=encodings("tape_head_scale", "tape", "rope", "alibi", "sinusoidal", "none"),
        by_scale=SHALLOW,
        scores=(BEYOND,),
        shown=(INSIDE,),
        curve=Curve(INSIDE, most=1),
        minutes=0.8,
        quick=("tape_head_scale",),
    ),
    Trainings(
        name="context",
        config=CONFIGS / "context_extension_demo.py",
        rivals={
            "tape_head_scale": {"adapt.method": "tape", MIX: "head_scale"},
            "tape": {"adapt.method": "tape", MIX: "heads"},
            **{name: {"adapt.method": name} for name in ("lora", "longlora", "theta", "full")},
        },
        first={"cpu": "1e-3", "gpu": "3e-4"},
        scores=("perplexity_overlapping_1x", "passkey_1x"),
        shown=("perplexity_overlapping_2x", "passkey_2x", "perplexity_overlapping_0.5x"),
        base=Base(
            CONFIGS / "bytes_demo.py",
            fields={KIND: "rope", "task.passkeys": 0.5, "task.passkey_form": "short"},
            by_scale={
                "cpu": {
                    "task.sequence_length": 64,
                    "train.steps": 1200,
                    "train.batch_size": 32,
                },
                "gpu": {"task.sequence_length": 512},
            },
        ),
        minutes=0.7,
    ),
    Cost(
        name="overhead",
        config=CONFIGS / "bytes_demo.py",
        fields={
            "cpu": {
                "model.hidden_size": 256,
                "model.num_layers": 6,
                "model.intermediate_size": 1024,
            }
        },
        lengths={"cpu": (256, 1024), "gpu": (1024, 8192)},
        tokens={"cpu": 2048, "gpu": 65_536},
        rivals=encodings("tape_head_scale", "tape"),
    ),
    Trainings(
        name="ablations",
        config=OWN / "ablations.py",
        rivals={
            "tape_head_scale": VARIANTS["tape_head_scale"],
            "tape": VARIANTS["tape"],
            # TAPE that updates nothing is RoPE, step for step.
            "no_update": VARIANTS["rope"],
            **{name: VARIANTS[name] for name in ("place_weights", "early", "late")},
        },
        by_scale={"cpu": {"train.steps": 1000}},
        scores=(BEYOND,),
        shown=(INSIDE,),
        curve=Curve(INSIDE, most=1, rivals=("tape_head_scale", "no_update")),
        minutes=1.1,
    ),
    Growth(
        name="stability",
        config=OWN / "ablations.py",
        variants=("tape_head_scale", "separate_cos_sin", "mix_head_dim", "no_equivariance"),
        depths=(16, 48),
        steps=60,
    ),
    *(
        Trainings(
            name=f"length-{problem}",
            config=OWN / "length_suite.py",
            rivals=encodings("tape_head_scale", "tape", "rope", "alibi", "fire", "none"),
            fields={"task.problem": problem},
            by_scale={"cpu": {**SHALLOW["cpu"], "train.steps": 1000}},
            scores=(BEYOND,),
            shown=(INSIDE,),
            curve=Curve(INSIDE, most=1),
            minutes=0.4,
        )
        for problem in PROBLEMS
    ),
)

_TRAININGS = [one for one in _MADE if isinstance(one, Trainings)]
STUDIES: tuple[Design, ...] = (
    *_MADE,
    # Text, whose runs take longest, comes last.
    StateUse("states", sorted(_TRAININGS, key=lambda one: one.name == "text")),
)
