"""Measurements of which implementation is the fastest on the machine at hand.

``records`` keeps measurements in a file and finds the best implementation for a call, ``measure``
checks and times, and ``command`` is ``python -m tape_jax.tune``.
"""
