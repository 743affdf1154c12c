"""Collectors: they call ``rollout`` and keep what goes on between calls."""

from apexrl.collectors.async_ import AsyncCollector
from apexrl.collectors.base import BaseCollector
from apexrl.collectors.sync import SyncCollector

__all__ = ["AsyncCollector", "BaseCollector", "SyncCollector"]
