"""Where the tests find things."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
# Recordings beside the repository, too large to ship.
BESIDE = ROOT.parent / "shared" / "golden_contextual"
