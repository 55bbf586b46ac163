"""Which implementation is the fastest on the machine at hand, by measurement.

``cases`` says what is measured, ``measure`` checks and times it, ``store`` keeps it in a file,
``choice`` reads that file once in a process and finds what a call should take, ``session`` goes
through many cases, and ``command`` is ``python -m tape_jax.tune``.
"""
