"""Experiments that judge encodings: claims, the studies that test them, records and pages.

Importing it makes its tasks known to ``train``.
"""

from research.tasks import register

register()
