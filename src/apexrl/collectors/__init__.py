"""Collectors: they call ``rollout`` and keep what goes on between calls."""

from apexrl.collectors.async_ import AsyncCollector
from apexrl.collectors.base import BaseCollector
from apexrl.collectors.demos import DemoCollector
from apexrl.collectors.init_states import InitStateDataset, InitStateSampler, RolloutStats
from apexrl.collectors.ray_ import RayCollector
from apexrl.collectors.rollout_generator import RolloutGenerator
from apexrl.collectors.suite_runner import SuiteRunner
from apexrl.collectors.sync import SyncCollector

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "DemoCollector",
    "InitStateDataset",
    "InitStateSampler",
    "RayCollector",
    "RolloutGenerator",
    "RolloutStats",
    "SuiteRunner",
    "SyncCollector",
]
