"""``apexrl report``: run directories as one page that anyone can open, without a network.

``runs`` reads, ``curves`` sums up, ``figures`` describes the plots, ``page`` writes.
"""

from apexrl.experiments.report.page import write_report

__all__ = ["write_report"]
