"""What a test asserts about an error: its class, and the field, the value or the file that its message names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from apexrl.core.errors import ConfigError


class Refusal(NamedTuple):
    """A configuration that is refused, and what the message names."""

    preset: str
    overrides: dict[str, str]
    """On top of the preset, as on the command line."""
    error: type[BaseException]
    field: str
    value: str
    """As the message prints it."""

    def __str__(self) -> str:
        return " ".join([self.preset, *(f"{name}={text}" for name, text in self.overrides.items())])

    def words(self) -> list[str]:
        """Return the arguments of ``apexrl`` that ask for it."""
        return ["train", self.preset, *(f"--{name}={text}" for name, text in self.overrides.items())]


@contextmanager
def refused(error: type[BaseException], *named: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message names all of these; the wording around them is free to change."""
    with pytest.raises(error) as caught:
        yield caught
    missing = [str(what) for what in named if not names(str(caught.value), str(what))]
    assert not missing, f"{missing} not in: {caught.value}"


def names(message: str, what: str) -> bool:
    """Return whether a message names it: a number or a word as a whole, not as a part of another."""
    return re.search(rf"(?<!\w){re.escape(what)}(?!\w)", message) is not None


REFUSALS = (
    # The task, and what a run needs of it.
    Refusal("lift_ppo", {"task.num_envs": "many"}, ConfigError, "task.num_envs", "'many'"),
    Refusal("lift_ppo", {"task.num_envs": "2.5"}, ConfigError, "task.num_envs", "2.5"),
    Refusal("lift_ppo", {"task.num_envs": "true"}, ConfigError, "task.num_envs", "True"),
    Refusal("lift_ppo", {"task.num_envs": "0"}, ConfigError, "task.num_envs", "0"),
    Refusal("lift_ppo", {"task.num_envs": "10000000000"}, ConfigError, "task.num_envs", "10000000000"),
    Refusal("lift_ppo", {"task.num_envs": "2", "task.num_workers": "3"}, ConfigError, "task.num_workers", "3"),
    Refusal("lift_ppo", {"task.kwargs": "{3: 4}"}, ConfigError, "task.kwargs", "{3: 4}"),
    Refusal(
        "lift_ppo", {"task.kwargs.when": "2024-01-01"}, ConfigError, "task.kwargs.when", "datetime.date(2024, 1, 1)"
    ),
    Refusal("lift_ppo", {"task.metrics": "[distance]"}, ConfigError, "task.metrics", "['distance']"),
    Refusal("lift_ppo", {"task.metrics.distance": "median"}, ConfigError, "task.metrics.distance", "'median'"),
    Refusal("lift_ppo", {"task.metrics.distance": "3"}, ConfigError, "task.metrics.distance.reduce", "3"),
    Refusal("lift_ppo", {"task.metrics.x.event": "1"}, ConfigError, "task.metrics.x.event", "1"),
    Refusal("lift_ppo", {"task.metrics.x.redcue": "sum"}, ConfigError, "task.metrics.x", "'redcue'"),
    Refusal("lift_ppo", {"task.metrics.return": "sum"}, ConfigError, "task.metrics.return", "'return'"),
    Refusal("lift_ppo", {"algo.name": "rloo"}, ConfigError, "algo.name", "'lift'"),
    Refusal("lift_ppo", {"task.benchmark_name": "mt10"}, ConfigError, "algo.name", "'mt10'"),
    Refusal(
        "lift_ppo",
        {"training.collector": "ray", "training.num_collectors": "3", "task.num_envs": "256"},
        ConfigError,
        "task.num_envs",
        "256",
    ),
    # A suite of tasks.
    Refusal(
        "stage11_ript_vla", {"task.task_names_to_use": "reach-v3"}, ConfigError, "task.task_names_to_use", "'reach-v3'"
    ),
    Refusal("stage11_ript_vla", {"task.cameras": "{a: 1}"}, ConfigError, "task.cameras", "{'a': 1}"),
    Refusal("stage11_ript_vla", {"task.num_parallel_envs": "0"}, ConfigError, "task.num_parallel_envs", "0"),
    Refusal(
        "stage11_ript_vla",
        {"task.num_parallel_envs": "4", "task.num_workers": "9"},
        ConfigError,
        "task.num_workers",
        "9",
    ),
    Refusal(
        "stage11_ript_vla", {"task.max_episode_length": "short"}, ConfigError, "task.max_episode_length", "'short'"
    ),
    Refusal("stage11_ript_vla", {"task.chunk_size": "0"}, ConfigError, "task.chunk_size", "0"),
    Refusal("stage11_ript_vla", {"task.num_demos": "-1"}, ConfigError, "task.num_demos", "-1"),
    Refusal("stage11_ript_vla", {"task.num_demos": "0"}, ConfigError, "algo.imitation_updates", "got 0"),
    Refusal("stage11_ript_vla", {"training.collector": "ray"}, ConfigError, "training.collector", "'ray'"),
    Refusal("mt10_bc", {"training.collector": "async"}, ConfigError, "training.collector", "'async'"),
    # Networks.
    Refusal("lift_ppo", {"policy.hidden_dims": "64,64"}, ConfigError, "policy.hidden_dims", "'64,64'"),
    Refusal("lift_ppo", {"policy.hidden_dims": "[64, x]"}, ConfigError, "policy.hidden_dims", "[64, 'x']"),
    Refusal("lift_ppo", {"policy.hidden_dims": "[64, 0]"}, ConfigError, "policy.hidden_dims", "[64, 0]"),
    Refusal("lift_ppo", {"policy.hidden_dims": "[10000000000]"}, ConfigError, "policy.hidden_dims", "[10000000000]"),
    Refusal("lift_ppo", {"policy.rnn_hidden_dim": "0"}, ConfigError, "policy.rnn_hidden_dim", "0"),
    Refusal("lift_ppo", {"policy.rnn_hidden_dim": "10000000000"}, ConfigError, "policy.rnn_hidden_dim", "10000000000"),
    Refusal("lift_ppo", {"policy.actor_groups": "[]"}, ConfigError, "policy.actor_groups", "[]"),
    Refusal("lift_ppo", {"policy.critic_groups": "[]"}, ConfigError, "policy.critic_groups", "[]"),
    Refusal("lift_ppo", {"policy.init_std": "20"}, ConfigError, "policy.init_std", "20.0"),
    Refusal("lift_ppo", {"policy.kind": "lstm"}, ConfigError, "policy.kind", "'lstm'"),
    Refusal(
        "lift_ppo",
        {"policy.kind": "gru", "policy.critic_hidden_dims": "[8]"},
        ConfigError,
        "policy.critic_hidden_dims",
        "[8]",
    ),
    Refusal("pendulum_sac", {"policy.kind": "gru"}, ConfigError, "policy.kind", "'gru'"),
    Refusal("stage11_ript_vla", {"policy.kind": "gru"}, ConfigError, "policy.kind", "'gru'"),
    # The vision-language-action policy.
    Refusal("stage11_ript_vla", {"policy.width": "0"}, ConfigError, "policy.width", "0"),
    Refusal("stage11_ript_vla", {"policy.depth": "1000000"}, ConfigError, "policy.depth", "1000000"),
    Refusal("stage11_ript_vla", {"policy.num_heads": "-2"}, ConfigError, "policy.num_heads", "-2"),
    Refusal("stage11_ript_vla", {"policy.lora_rank": "-1"}, ConfigError, "policy.lora_rank", "-1"),
    Refusal("stage11_ript_vla", {"policy.lora_rank": "1000000"}, ConfigError, "policy.lora_rank", "1000000"),
    Refusal("stage11_ript_vla", {"policy.init_std": "0.001"}, ConfigError, "policy.init_std", "0.001"),
    Refusal("stage11_ript_vla", {"policy.init_std": "2.5"}, ConfigError, "policy.init_std", "2.5"),
    Refusal("stage11_ript_vla", {"policy.denoising_steps": "0"}, ConfigError, "policy.denoising_steps", "0"),
    Refusal("stage11_ript_vla", {"policy.noise_level": "0"}, ConfigError, "policy.noise_level", "0"),
    Refusal("stage11_ript_vla", {"policy.guidance": "-0.5"}, ConfigError, "policy.guidance", "-0.5"),
    Refusal("stage11_ript_vla", {"policy.freeze": "[txt]"}, ConfigError, "policy.freeze", "'txt'"),
    # PPO.
    Refusal("lift_ppo", {"algo.name": "pppo"}, ConfigError, "algo.name", "'pppo'"),
    Refusal("lift_ppo", {"algo.name": "[1]"}, ConfigError, "algo.name", "[1]"),
    Refusal("lift_ppo", {"algo.clip_coef": "0"}, ConfigError, "algo.clip_coef", "0"),
    Refusal("lift_ppo", {"algo.clip_coef": "1"}, ConfigError, "algo.clip_coef", "1"),
    Refusal("lift_ppo", {"algo.clip_coef": "a"}, ConfigError, "algo.clip_coef", "'a'"),
    Refusal("lift_ppo", {"algo.gamma": "1.1"}, ConfigError, "algo.gamma", "1.1"),
    Refusal("lift_ppo", {"algo.gamma": "-0.1"}, ConfigError, "algo.gamma", "-0.1"),
    Refusal("lift_ppo", {"algo.gae_lambda": "-0.1"}, ConfigError, "algo.gae_lambda", "-0.1"),
    Refusal("lift_ppo", {"algo.num_epochs": "0"}, ConfigError, "algo.num_epochs", "0"),
    Refusal("lift_ppo", {"algo.num_epochs": "true"}, ConfigError, "algo.num_epochs", "True"),
    Refusal("lift_ppo", {"algo.num_steps": "2.5"}, ConfigError, "algo.num_steps", "2.5"),
    Refusal("lift_ppo", {"algo.learning_rate": "0"}, ConfigError, "algo.learning_rate", "0"),
    Refusal("lift_ppo", {"algo.learning_rate": "fast"}, ConfigError, "algo.learning_rate", "'fast'"),
    Refusal("lift_ppo", {"algo.learning_rate": ".nan"}, ConfigError, "algo.learning_rate", "nan"),
    Refusal("lift_ppo", {"algo.max_grad_norm": "0"}, ConfigError, "algo.max_grad_norm", "0"),
    Refusal("lift_ppo", {"algo.max_grad_norm": ".inf"}, ConfigError, "algo.max_grad_norm", "inf"),
    Refusal("lift_ppo", {"algo.max_grad_norm": "inf"}, ConfigError, "algo.max_grad_norm", "'inf'"),
    Refusal("lift_ppo", {"algo.target_kl": "0"}, ConfigError, "algo.target_kl", "0"),
    Refusal("lift_ppo", {"algo.target_kl": "a"}, ConfigError, "algo.target_kl", "'a'"),
    Refusal("lift_ppo", {"algo.value_clip_coef": "-1"}, ConfigError, "algo.value_clip_coef", "-1"),
    Refusal("lift_ppo", {"algo.entropy_coef": "-0.1"}, ConfigError, "algo.entropy_coef", "-0.1"),
    Refusal("lift_ppo", {"algo.final_std": "0"}, ConfigError, "algo.final_std", "0"),
    Refusal("lift_ppo", {"algo.schedule": "liner"}, ConfigError, "algo.schedule", "'liner'"),
    Refusal("lift_ppo", {"algo.normalize_advantage": "null"}, ConfigError, "algo.normalize_advantage", "None"),
    Refusal("lift_ppo", {"algo.normalize_reward": "2"}, ConfigError, "algo.normalize_reward", "2"),
    Refusal(
        "lift_ppo",
        {"algo.num_minibatches": "99", "algo.num_steps": "2", "task.num_envs": "3"},
        ConfigError,
        "algo.num_minibatches",
        "99",
    ),
    Refusal(
        "lift_ppo",
        {"algo.num_minibatches": "4", "task.num_envs": "3", "policy.kind": "gru"},
        ConfigError,
        "algo.num_minibatches",
        "4",
    ),
    # PPO-ROA.
    Refusal("payload_roa", {"algo.adapt_epochs": "0"}, ConfigError, "algo.adapt_epochs", "0"),
    Refusal("payload_roa", {"algo.adapt_epochs": "1.5"}, ConfigError, "algo.adapt_epochs", "1.5"),
    Refusal("payload_roa", {"algo.adapt_minibatches": "0"}, ConfigError, "algo.adapt_minibatches", "0"),
    Refusal("payload_roa", {"algo.adapt_minibatches": "1000000"}, ConfigError, "algo.adapt_minibatches", "1000000"),
    Refusal("payload_roa", {"algo.min_frames": "0"}, ConfigError, "algo.min_frames", "0"),
    Refusal("payload_roa", {"algo.adapt_learning_rate": "0"}, ConfigError, "algo.adapt_learning_rate", "0"),
    Refusal("payload_roa", {"algo.finetune_learning_rate": "-1"}, ConfigError, "algo.finetune_learning_rate", "-1"),
    Refusal("payload_roa", {"algo.finetune_target_kl": "0"}, ConfigError, "algo.finetune_target_kl", "0"),
    Refusal("payload_roa", {"algo.train_share": "0"}, ConfigError, "algo.train_share", "0"),
    Refusal("payload_roa", {"algo.train_share": "1.5"}, ConfigError, "algo.train_share", "1.5"),
    Refusal("payload_roa", {"algo.ema_tau": "1.1"}, ConfigError, "algo.ema_tau", "1.1"),
    Refusal("payload_roa", {"algo.encoder_penalty": "-0.1"}, ConfigError, "algo.encoder_penalty", "-0.1"),
    Refusal("payload_roa", {"algo.phase": "fintune"}, ConfigError, "algo.phase", "'fintune'"),
    Refusal("payload_roa", {"algo.clip_coef": "2"}, ConfigError, "algo.clip_coef", "2"),
    # SAC.
    Refusal("pendulum_sac", {"algo.num_steps": "0"}, ConfigError, "algo.num_steps", "0"),
    Refusal("pendulum_sac", {"algo.batch_size": "0"}, ConfigError, "algo.batch_size", "0"),
    Refusal("pendulum_sac", {"algo.batch_size": "2.5"}, ConfigError, "algo.batch_size", "2.5"),
    Refusal("pendulum_sac", {"algo.buffer_size": "0"}, ConfigError, "algo.buffer_size", "0"),
    Refusal(
        "pendulum_sac",
        {"algo.buffer_size": "200", "algo.learning_starts": "300"},
        ConfigError,
        "algo.learning_starts",
        "300",
    ),
    Refusal("pendulum_sac", {"algo.n_step": "0"}, ConfigError, "algo.n_step", "0"),
    Refusal("pendulum_sac", {"algo.policy_delay": "0"}, ConfigError, "algo.policy_delay", "0"),
    Refusal("pendulum_sac", {"algo.num_critics": "0"}, ConfigError, "algo.num_critics", "0"),
    Refusal("pendulum_sac", {"algo.utd_ratio": "0"}, ConfigError, "algo.utd_ratio", "0"),
    Refusal("pendulum_sac", {"algo.learning_rate": "-1"}, ConfigError, "algo.learning_rate", "-1"),
    Refusal("pendulum_sac", {"algo.temperature": "0"}, ConfigError, "algo.temperature", "0"),
    Refusal("pendulum_sac", {"algo.reward_scale": "0"}, ConfigError, "algo.reward_scale", "0"),
    Refusal("pendulum_sac", {"algo.adam_eps": "0"}, ConfigError, "algo.adam_eps", "0"),
    Refusal("pendulum_sac", {"algo.max_grad_norm": "0"}, ConfigError, "algo.max_grad_norm", "0"),
    Refusal("pendulum_sac", {"algo.learning_starts": "-1"}, ConfigError, "algo.learning_starts", "-1"),
    Refusal("pendulum_sac", {"algo.learning_starts": "1000001"}, ConfigError, "algo.learning_starts", "1000001"),
    Refusal("pendulum_sac", {"algo.priority_exponent": "-0.1"}, ConfigError, "algo.priority_exponent", "-0.1"),
    Refusal("pendulum_sac", {"algo.importance_exponent": "1.1"}, ConfigError, "algo.importance_exponent", "1.1"),
    Refusal("pendulum_sac", {"algo.gamma": "1.1"}, ConfigError, "algo.gamma", "1.1"),
    Refusal("pendulum_sac", {"algo.tau": "0"}, ConfigError, "algo.tau", "0"),
    Refusal("pendulum_sac", {"algo.dropout": "1"}, ConfigError, "algo.dropout", "1"),
    Refusal("pendulum_sac", {"algo.target_subset": "3"}, ConfigError, "algo.target_subset", "3"),
    Refusal("pendulum_sac", {"algo.target_subset": "0"}, ConfigError, "algo.target_subset", "0"),
    Refusal("pendulum_sac", {"algo.actor_value": "max"}, ConfigError, "algo.actor_value", "'max'"),
    Refusal("pendulum_sac", {"algo.replay_device": "cuda"}, ConfigError, "algo.replay_device", "'cuda'"),
    Refusal("pendulum_sac", {"algo.schedule": "adaptive"}, ConfigError, "algo.schedule", "'adaptive'"),
    Refusal("pendulum_sac", {"algo.save_replay": "perhaps"}, ConfigError, "algo.save_replay", "'perhaps'"),
    Refusal("pendulum_sac", {"algo.learn_temperature": "null"}, ConfigError, "algo.learn_temperature", "None"),
    Refusal("pendulum_sac", {"algo.layer_norm": "2"}, ConfigError, "algo.layer_norm", "2"),
    Refusal("pendulum_sac", {"algo.target_entropy": "a"}, ConfigError, "algo.target_entropy", "'a'"),
    # RLOO.
    Refusal("stage11_ript_vla", {"algo.rloo_batch_size": "1"}, ConfigError, "algo.rloo_batch_size", "1"),
    Refusal("stage11_ript_vla", {"algo.rloo_batch_size": "many"}, ConfigError, "algo.rloo_batch_size", "'many'"),
    Refusal("stage11_ript_vla", {"algo.num_groups": "2.5"}, ConfigError, "algo.num_groups", "2.5"),
    Refusal("stage11_ript_vla", {"algo.num_epochs": "0"}, ConfigError, "algo.num_epochs", "0"),
    Refusal("stage11_ript_vla", {"algo.micro_batch_size": "0"}, ConfigError, "algo.micro_batch_size", "0"),
    Refusal("stage11_ript_vla", {"algo.clip_coef": "1.0"}, ConfigError, "algo.clip_coef", "1.0"),
    Refusal("stage11_ript_vla", {"algo.clip_coef_high": "0"}, ConfigError, "algo.clip_coef_high", "0"),
    Refusal("stage11_ript_vla", {"algo.learning_rate": "0"}, ConfigError, "algo.learning_rate", "0"),
    Refusal("stage11_ript_vla", {"algo.kl_coef": "-0.1"}, ConfigError, "algo.kl_coef", "-0.1"),
    Refusal("stage11_ript_vla", {"algo.collapse_ratio": "1.0"}, ConfigError, "algo.collapse_ratio", "1.0"),
    Refusal("stage11_ript_vla", {"algo.baseline": "groups"}, ConfigError, "algo.baseline", "'groups'"),
    Refusal(
        "stage11_ript_vla", {"algo.loss": "weighted_flow", "algo.kl_coef": "0.1"}, ConfigError, "algo.kl_coef", "0.1"
    ),
    Refusal(
        "stage11_ript_vla", {"algo.imitation_learning_rate": "0"}, ConfigError, "algo.imitation_learning_rate", "0"
    ),
    Refusal("stage11_ript_vla", {"algo.imitation_coef": "-1"}, ConfigError, "algo.imitation_coef", "-1"),
    # Behaviour cloning.
    Refusal("mt10_bc", {"algo.num_updates": "0"}, ConfigError, "algo.num_updates", "0"),
    Refusal("mt10_bc", {"algo.min_std": "0"}, ConfigError, "algo.min_std", "0"),
    Refusal("mt10_bc", {"algo.weight_decay": "-1"}, ConfigError, "algo.weight_decay", "-1"),
    Refusal("mt10_bc", {"algo.loss": "nll"}, ConfigError, "algo.loss", "'nll'"),
    Refusal("mt10_bc", {"algo.image_shift": "-1"}, ConfigError, "algo.image_shift", "-1"),
    Refusal("mt10_bc", {"algo.loss": "mse", "algo.learn_std": "true"}, ConfigError, "algo.loss", "got mse"),
    # Training, logging and features.
    Refusal("lift_ppo", {"training.total_timesteps": "0"}, ConfigError, "training.total_timesteps", "0"),
    Refusal("lift_ppo", {"training.total_timesteps": "10:30"}, ConfigError, "training.total_timesteps", "'10:30'"),
    Refusal("lift_ppo", {"training.total_timesteps": "1:30.5"}, ConfigError, "training.total_timesteps", "'1:30.5'"),
    Refusal("lift_ppo", {"training.seed": "-1"}, ConfigError, "training.seed", "-1"),
    Refusal(
        "lift_ppo",
        {"training.seed": "1000000000000000000000000000000"},
        ConfigError,
        "training.seed",
        "1000000000000000000000000000000",
    ),
    Refusal("lift_ppo", {"training.num_threads": "5000"}, ConfigError, "training.num_threads", "5000"),
    Refusal("lift_ppo", {"training.save_minutes": "-1"}, ConfigError, "training.save_minutes", "-1"),
    Refusal("lift_ppo", {"logging.log_interval": "0"}, ConfigError, "logging.log_interval", "0"),
    Refusal("lift_ppo", {"logging.wandb": "'on'"}, ConfigError, "logging.wandb", "'on'"),
    Refusal("lift_ppo", {"features.save_video": "perhaps"}, ConfigError, "features.save_video", "'perhaps'"),
)
"""Every configuration that is known to be refused when it is loaded, before anything is built or written."""
