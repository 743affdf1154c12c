"""The data that flows between the parts, and the names of its keys.

Shapes: ``T`` time steps, ``N`` environments, ``B`` flat samples, ``A`` action dimensions, ``P`` groups,
``G`` rollouts a group. A batch is a ``TensorDict`` with batch size ``[T, N]``; scalars in it are ``[T, N, 1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tensordict import TensorDict
from torch import Tensor

OBSERVATION = "observation"
NEXT_OBSERVATION = "next_observation"
ACTION = "action"
REWARD = "reward"
TERMINATED = "terminated"
TRUNCATED = "truncated"
DONE = "done"
VALUE = "value"
NEXT_VALUE = "next_value"
SAMPLE_LOG_PROB = "sample_log_prob"
PRE_TANH = "pre_tanh"
"""Key of batches of squashed actions, ``[T, N, A]``: what ``tanh`` was applied to, which an action near its bounds no
longer says; batches of other actions lack it."""
POLICY_VERSION = "policy_version"
"""Key of batches of collectors that run ahead, ``[T, N, 1]`` int64: which weights chose each action."""
ADVANTAGE = "advantage"
RETURN = "return"
METRIC = "metric"
INFO = "info"
GROUP = "group"
VALID = "valid"
SAMPLED_SUCCESS = "sampled_success"

# Observation groups with a meaning of their own (a plain Box observation is one tensor and has no groups).
OBS_KEY = "policy"
OBS_PRIV_KEY = "priv"
CMD_KEY = "command"
OBJECT_KEY = "object"

# Observation groups of task suites: proprioception, and the instruction as UTF-8 bytes padded with zeros.
STATE_KEY = "state"
INSTRUCTION_KEY = "instruction"

# Control data of task suites, in ``EnvStep.info``.
EPISODE_ID = "episode_id"
"""Number of the episode; -1 where none runs."""
TASK_ID = "task_id"
LOST = "lost"
"""Whether the episode ended because its worker died."""
CONTROL_STEPS = "control_steps"
"""Actions of the chunk that were really taken."""

# What the actors of PPO-ROA are told, or guess, of the privileged group.
PRIV_FEATURE_KEY = "priv_feature"
PRIV_PRED_KEY = "priv_pred"

Observation: TypeAlias = Tensor | TensorDict
"""What a policy sees: one tensor, or named groups of tensors."""

Carry: TypeAlias = dict[str, Any]
"""What one step hands to the next, ``[N]``: ``observation`` and the policy's recurrent state.

A plain dictionary: a TensorDict is created once per rollout, not once per step.
"""

Actor: TypeAlias = Callable[[Carry], dict[str, Tensor]]
"""Maps a carry to ``action``, the next recurrent state, and whatever else the caller wants stored."""


class EnvStep(NamedTuple):
    """What one step of a ``VecEnv`` returns."""

    obs: Observation
    """``[N]`` what the policy sees next, already reset where an episode ended."""
    reward: Tensor
    """``[N, 1]`` float32."""
    terminated: Tensor
    """``[N, 1]`` bool: the task itself ended (success, failure)."""
    truncated: Tensor
    """``[N, 1]`` bool: a time limit cut the episode; its state still has a value."""
    final_obs: Observation | None = None
    """``[N]`` the true successor where an episode ended (other rows are free); None when nothing ended."""
    metric: Mapping[str, Tensor] = {}
    """``[N, 1]`` float32 for each declared metric, of the step itself, not of the state after a reset."""
    log: Mapping[str, Tensor | float] = {}
    """Free-form numbers of the simulator, logged under ``env/``."""
    info: Mapping[str, Tensor] = {}
    """``[N, 1]`` control data of the step, which says nothing about how good it was: which episode and task it belongs
    to, whether the episode was lost. The same entries at every step; stored, never averaged or logged."""


class PolicyOutput(NamedTuple):
    """What ``Policy.forward`` returns."""

    action: Tensor
    """``[..., A]``"""
    log_prob: Tensor
    """``[..., 1]`` of the returned action under the policy."""
    value: Tensor
    """``[..., 1]``"""


class Evaluation(NamedTuple):
    """What ``Policy.evaluate`` returns for a batch of stored actions; each is ``[..., 1]``."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
