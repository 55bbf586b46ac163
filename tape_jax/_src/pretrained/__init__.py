"""Llama checkpoints: the parts of :mod:`tape_jax.pretrained`."""
