"""Perplexities, for the tests of everything that shows one."""

from train.evaluation.perplexity import Measurement, Perplexity


def result(*losses, trained=4, **changes):
    """Perplexities of two blocks each at 1x and 2x in two ways."""
    measurements = [
        Measurement(protocol, length, (loss - 0.1, loss + 0.1), (loss,) * length)
        for (protocol, length), loss in zip(
            [("disjoint", 4), ("disjoint", 8), ("windowed", 4), ("windowed", 8)],
            losses,
            strict=True,
        )
    ]
    fields = {"stride": 2, "bin": 1, "targets": 16, "fingerprint": "a", "text_bytes": None}
    return Perplexity(trained=trained, measurements=tuple(measurements), **{**fields, **changes})
