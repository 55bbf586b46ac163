"""The commands of ``python -m train.main``, one file each.

They import slow modules in ``run``, so that wrong arguments fail at once.
"""
