"""The studies of the suite, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from configs.ablations import VARIANTS
from train.evidence.overhead import Cost
from train.evidence.stability import Growth
from train.evidence.studies import Design, Fields
from train.evidence.trainings import Base, Trainings

SECTIONS = ("claims", "ablations", "length suite", "word problems", "stability")

CONFIGS = Path("configs")
RATES = {"cpu": ("train.learning_rate=1e-3,3e-3",), "gpu": ("train.learning_rate=1e-4,3e-4,1e-3",)}
# How far the rates of a rival go on where the best of them is the last.
FURTHER = {
    "cpu": "train.learning_rate=1e-4,3e-4,1e-3,3e-3,1e-2,3e-2",
    "gpu": "train.learning_rate=1e-5,3e-5,1e-4,3e-4,1e-3,3e-3,1e-2",
}
BEYOND, INSIDE = "exact_match_outside", "exact_match_inside"
PROBLEMS = ("multiply", "copy", "reverse", "sort", "parity", "majority", "modular_sum")
GROUPS = ("Z60", "A4xZ5", "A5", "S5")
DEPTHS = (1, 2, 4)
# On a CPU a shallow model compiles and trains faster without a loop over its layers.
SHALLOW = {"cpu": {"model.scan_layers": False}}
# Variants of the ablations that claims are about, and those that are also trained on text.
CLAIMED = ("tape", "rope", "no_update", "place_weights", "early", "late")
# TAPE that updates nothing is RoPE.
WITHOUT_UPDATES = {"no_update": "rope"}
ON_TEXT = (
    *CLAIMED,
    *("attention_only", "mlp_only", "heads", "no_equivariance", "norm_rms", "norm_unit"),
)


class Candidate(NamedTuple):
    """An option of TAPE that may mend what it lacks, as a rival of its defaults.

    Attributes:
      fields: of the config.
      reason: why it was thought to help.
      chosen_by: studies whose scores it was chosen by, and which therefore cannot recommend it.
    """

    fields: dict[str, Any]
    reason: str
    chosen_by: tuple[str, ...] = ()


CANDIDATES = {
    "tape_rms": Candidate(
        {"model.position.kind": "tape", "model.position.norm": "rms"},
        "states that grow with the layers are kept at their norm",
    ),
    "tape_alpha": Candidate(
        {"model.position.kind": "tape", "model.position.alpha": 10.0},
        "on text the default moves a state by a few per cent of its norm only",
        chosen_by=("text",),
    ),
    "tape_partial": Candidate(
        {"model.position.kind": "tape", "model.position.partial_rotary_factor": 0.5},
        "half of a head's dimensions compare content whatever the distance",
    ),
}


def encodings(*names: str) -> dict[str, dict[str, Any]]:
    """Rivals by the names of their encodings, or of candidates."""
    return {
        name: CANDIDATES[name].fields if name in CANDIDATES else {"model.position.kind": name}
        for name in names
    }


def methods(*names: str) -> dict[str, Fields]:
    """Rivals by the names of methods of adaptation."""
    return {name: {"adapt.method": name} for name in names}


def by_depth(rivals: Mapping[str, Fields]) -> dict[str, Fields]:
    """Each rival at each depth."""
    return {
        f"{name}-{depth}": {**fields, "model.num_layers": depth}
        for depth in DEPTHS
        for name, fields in rivals.items()
    }


STUDIES: tuple[Design, ...] = (
    Trainings(
        name="text",
        section="claims",
        config=CONFIGS / "bytes_demo.py",
        rivals=encodings("tape", *CANDIDATES, "rope", "alibi", "sinusoidal", "learned"),
        by_scale={"cpu": {"train.steps": 700}},
        sweep=RATES,
        scores=("perplexity_1x", "perplexity_2x", "perplexity_8x", "perplexity_windowed_8x"),
    ),
    Trainings(
        name="addition",
        section="claims",
        config=CONFIGS / "addition_demo.py",
        rivals=encodings(
            *("tape", *CANDIDATES),
            *("rope", "alibi", "sinusoidal", "none", "fire", "random_rope"),
        ),
        sweep=RATES,
        scores=(BEYOND, INSIDE),
        quick=("tape", "rope"),
    ),
    Trainings(
        name="passkey",
        section="claims",
        config=CONFIGS / "passkey_demo.py",
        rivals=encodings("tape", *CANDIDATES, "rope", "alibi", "sinusoidal", "none"),
        sweep=RATES,
        scores=(BEYOND, INSIDE),
    ),
    Trainings(
        name="context",
        section="claims",
        config=CONFIGS / "context_extension_demo.py",
        rivals=methods("tape", "lora", "longlora", "theta", "full", "base"),
        sweep={**RATES, "cpu": ("train.learning_rate=3e-4,1e-3,3e-3,1e-2",)},
        wider=FURTHER,
        scores=(
            "perplexity_overlapping_1x",
            "passkey_1x",
            "perplexity_overlapping_2x",
            "passkey_2x",
            "perplexity_overlapping_0.5x",
        ),
        base=Base(
            CONFIGS / "bytes_demo.py",
            fields={
                "model.position.kind": "rope",
                "task.passkeys": 0.5,
                "task.passkey_form": "short",
            },
            by_scale={
                "cpu": {
                    "task.sequence_length": 64,
                    "train.steps": 1200,
                    "train.batch_size": 32,
                },
                "gpu": {"task.sequence_length": 512},
            },
        ),
    ),
    Cost(
        name="overhead",
        section="claims",
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
    ),
    Trainings(
        name="ablations",
        section="ablations",
        config=CONFIGS / "ablations.py",
        rivals={name: VARIANTS[name] for name in (*CLAIMED, *VARIANTS)},
        same=WITHOUT_UPDATES,
        scores=(BEYOND, INSIDE),
    ),
    Trainings(
        name="ablations-text",
        section="ablations",
        config=CONFIGS / "bytes_demo.py",
        rivals={name: VARIANTS[name] for name in ON_TEXT},
        by_scale={"cpu": {"model.num_layers": 6}},
        same=WITHOUT_UPDATES,
        scores=("perplexity_1x", "perplexity_2x", "perplexity_8x"),
    ),
    *(
        Trainings(
            name=f"length-{problem}",
            section="length suite",
            config=CONFIGS / "length_suite.py",
            rivals=encodings("tape", "tape_partial", "rope", "alibi", "fire", "none"),
            fields={"task.problem": problem},
            by_scale=SHALLOW,
            sweep=RATES,
            # Parity is learned at once or not at all: one seed says little of a rate.
            choosing=3 if problem == "parity" else 1,
            scores=(BEYOND, INSIDE),
        )
        for problem in PROBLEMS
    ),
    *(
        Trainings(
            name=f"words-{group}",
            section="word problems",
            config=CONFIGS / "word_problems.py",
            rivals=by_depth(encodings("tape", "rope", "none")),
            fields={"task.group": group},
            by_scale=SHALLOW,
            # The last layer never updates.
            same={"tape-1": "rope-1"},
        )
        for group in GROUPS
    ),
    Growth(
        name="stability",
        section="stability",
        config=CONFIGS / "ablations.py",
        variants=(
            *("tape", "rope", "norm_rms", "norm_unit", "separate_cos_sin"),
            *("mix_head_dim", "no_equivariance", "place_weights"),
        ),
        depths=(4, 16, 48),
        steps=60,
    ),
)
