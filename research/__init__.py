"""What judges encodings: claims, the studies that test them, their records and pages.

Importing it makes its tasks known to ``train``.
"""

from research.tasks import register

register()
