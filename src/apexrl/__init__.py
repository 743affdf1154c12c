"""ApexRL: train robot policies with one rollout, one trainer and one batch for every algorithm."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apexrl.agent import OnPolicyRunner as OnPolicyRunner
    from apexrl.agent import Trainer as Trainer
    from apexrl.agent import TrainingConfig as TrainingConfig
    from apexrl.algorithms import BC as BC
    from apexrl.algorithms import PPO as PPO
    from apexrl.algorithms import PPOROA as PPOROA
    from apexrl.algorithms import RLOO as RLOO
    from apexrl.algorithms import SAC as SAC
    from apexrl.algorithms import AlgorithmConfig as AlgorithmConfig
    from apexrl.algorithms import BaseAlgorithm as BaseAlgorithm
    from apexrl.algorithms import BCConfig as BCConfig
    from apexrl.algorithms import PPOConfig as PPOConfig
    from apexrl.algorithms import PPOROAConfig as PPOROAConfig
    from apexrl.algorithms import RLOOConfig as RLOOConfig
    from apexrl.algorithms import SACConfig as SACConfig
    from apexrl.algorithms import register_algorithm as register_algorithm
    from apexrl.algorithms.replay import ReplayBuffer as ReplayBuffer
    from apexrl.collectors import AsyncCollector as AsyncCollector
    from apexrl.collectors import BaseCollector as BaseCollector
    from apexrl.collectors import InitStateDataset as InitStateDataset
    from apexrl.collectors import InitStateSampler as InitStateSampler
    from apexrl.collectors import RayCollector as RayCollector
    from apexrl.collectors import RolloutGenerator as RolloutGenerator
    from apexrl.collectors import RolloutStats as RolloutStats
    from apexrl.collectors import SuiteRunner as SuiteRunner
    from apexrl.collectors import SyncCollector as SyncCollector
    from apexrl.collectors.demonstrations.record import record_demos as record_demos
    from apexrl.collectors.demonstrations.samples import load_demos as load_demos
    from apexrl.core.errors import ApexRLError as ApexRLError
    from apexrl.core.metrics import EpisodeMetrics as EpisodeMetrics
    from apexrl.core.metrics import MetricSpec as MetricSpec
    from apexrl.core.metrics import aggregate_metrics as aggregate_metrics
    from apexrl.core.types import EnvStep as EnvStep
    from apexrl.core.types import PolicyOutput as PolicyOutput
    from apexrl.deploy.load import load_policy as load_policy
    from apexrl.envs import GymVecEnv as GymVecEnv
    from apexrl.envs import MujocoVecEnv as MujocoVecEnv
    from apexrl.envs import RslVecEnv as RslVecEnv
    from apexrl.envs import VecEnv as VecEnv
    from apexrl.envs import check_env as check_env
    from apexrl.envs import get_metric_specs_from_env as get_metric_specs_from_env
    from apexrl.envs import make_env as make_env
    from apexrl.envs.suites import TaskSuite as TaskSuite
    from apexrl.envs.suites import make_suite as make_suite
    from apexrl.envs.suites.env import SuiteVecEnv as SuiteVecEnv
    from apexrl.envs.tasks import register_task as register_task
    from apexrl.evaluation.evaluate import EvaluationResult as EvaluationResult
    from apexrl.evaluation.evaluate import evaluate as evaluate
    from apexrl.evaluation.video import record_video as record_video
    from apexrl.policies import ActorCritic as ActorCritic
    from apexrl.policies import PI0_CFG_Adapter as PI0_CFG_Adapter
    from apexrl.policies import Policy as Policy
    from apexrl.policies import RecurrentActorCritic as RecurrentActorCritic
    from apexrl.policies import ROAPolicy as ROAPolicy
    from apexrl.policies import SACPolicy as SACPolicy
    from apexrl.policies import VLAPolicy as VLAPolicy
    from apexrl.policies.config import register_policy as register_policy
    from apexrl.policies.networks import MLPActor as MLPActor
    from apexrl.policies.networks import MLPCritic as MLPCritic
    from apexrl.policies.networks import QEnsemble as QEnsemble
    from apexrl.run.config import Config as Config
    from apexrl.run.loading import load_config as load_config

__version__ = "0.1.0"

# Names are imported when first used, so that `apexrl --help` does not wait for PyTorch.
_HOME = {
    "agent": "OnPolicyRunner Trainer TrainingConfig",
    "algorithms": "AlgorithmConfig BC BCConfig BaseAlgorithm PPO PPOConfig PPOROA PPOROAConfig RLOO RLOOConfig SAC "
    "SACConfig register_algorithm",
    "algorithms.replay": "ReplayBuffer",
    "collectors": "AsyncCollector BaseCollector InitStateDataset InitStateSampler RayCollector "
    "RolloutGenerator RolloutStats SuiteRunner SyncCollector",
    "run.config": "Config",
    "run.loading": "load_config",
    "collectors.demonstrations.samples": "load_demos",
    "collectors.demonstrations.record": "record_demos",
    "deploy.load": "load_policy",
    "envs": "GymVecEnv MujocoVecEnv RslVecEnv VecEnv check_env get_metric_specs_from_env make_env",
    "envs.suites.env": "SuiteVecEnv",
    "envs.tasks": "register_task",
    "policies.config": "register_policy",
    "envs.suites": "TaskSuite make_suite",
    "core.result": "EvaluationResult",
    "evaluation.evaluate": "evaluate",
    "evaluation.video": "record_video",
    "core.errors": "ApexRLError",
    "core.metrics": "EpisodeMetrics MetricSpec aggregate_metrics",
    "policies.networks": "MLPActor MLPCritic QEnsemble",
    "policies": "ActorCritic PI0_CFG_Adapter Policy ROAPolicy RecurrentActorCritic SACPolicy VLAPolicy",
    "core.types": "EnvStep PolicyOutput",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'apexrl' has no attribute '{name}'")
    return getattr(importlib.import_module(f"apexrl.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
