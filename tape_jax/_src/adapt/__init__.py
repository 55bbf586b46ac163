"""Retrofitting: the parts of :mod:`tape_jax.adapt`."""
