"""The commands of ``python -m train.main``, one file each."""
