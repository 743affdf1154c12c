"""Evaluation: episodes with quotas, pinned starts, comparisons, tables and videos."""
