"""Recorded runs of published code, compared number by number with this library."""
