"""The commands of ``python -m train.main``, one file each.

They import what takes long in ``run``, so that arguments are answered at once.
"""
