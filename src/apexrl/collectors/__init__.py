"""Collectors: they call ``rollout`` and keep what continues between calls."""

from apexrl.collectors.async_ import AsyncCollector
from apexrl.collectors.base import BaseCollector, SyncCollector
from apexrl.collectors.demonstrations.collector import DemoCollector
from apexrl.collectors.episodes import SuiteRunner
from apexrl.collectors.groups import RolloutGenerator
from apexrl.collectors.init_states import InitStateDataset, InitStateSampler, RolloutStats
from apexrl.collectors.ray.collector import RayCollector

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
