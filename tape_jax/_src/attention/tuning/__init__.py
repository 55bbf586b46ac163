"""Measurements of which implementation is the fastest on the machine at hand.

``records`` keeps what was measured in a file and finds what a call should take, ``measure`` checks
and times, and ``command`` is ``python -m tape_jax.tune``.
"""
