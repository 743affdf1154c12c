"""The sections of a configuration that describe logs and features."""

from __future__ import annotations

from typing import Literal

from apexrl.core.validation import Count, NonNegativeInteger, options


@options("logging")
class LoggingConfig:
    """Where numbers go; metrics.jsonl is always written."""

    log_interval: Count = 1
    """Iterations between logged ones; the first and the last are always logged."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Log to Weights & Biases."""
    wandb_project: str = "apexrl"
    """Weights & Biases project."""
    reward_components: bool = True
    """Log what the task declares besides success and failure."""
    log_freq: NonNegativeInteger = 0
    """Iterations between evaluations over all tasks of a suite; 0 leaves it to training.eval_interval."""


@options("features")
class FeaturesConfig:
    """Extras that can be switched."""

    save_step_csv: bool = False
    """Write one table of steps for each environment at every evaluation."""
    save_video: bool = True
    """Write a video of the trained policy at the end."""
    save_plot: bool = True
    """Plot the learning curve at the end."""
    cuda_graphs: bool = True
    """Capture rollout and update as CUDA graphs; without CUDA it does nothing."""
    compile: bool | Literal["auto", "update"] = "auto"
    """update: compile loss, gradient and optimizer; true: also policy and tensor tasks in rollouts; auto: as the number
    of steps of the whole run suggests. Compiled code is kept for later runs; the first takes some seconds longer."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Of matrix products: auto is tf32 on CUDA, else fp32; bf16 also runs the networks of the update in bfloat16."""
