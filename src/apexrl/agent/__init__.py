"""The training loop and what surrounds it: callbacks, checkpoints, evaluation, logs."""

from apexrl.agent.on_policy_runner import OnPolicyRunner
from apexrl.agent.trainer import Trainer, TrainingConfig

__all__ = ["OnPolicyRunner", "Trainer", "TrainingConfig"]
