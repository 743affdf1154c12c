"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from apexrl.agent.loggers.base import Logger
from apexrl.core.errors import ConfigError


class WandbLogger(Logger):
    """Sends numbers to a W&B run, or with ``mode="offline"`` to files that ``wandb sync`` can send later."""

    def __init__(
        self,
        directory: Path,
        *,
        project: str,
        mode: Literal["offline", "online"],
        run_id: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logging.wandb needs the wandb package: pip install 'apexrl[wandb]', or set logging.wandb to disabled."
            ) from error
        try:
            self.run = wandb.init(
                project=project,
                mode=mode,
                dir=str(directory),
                id=run_id,
                name=name,
                resume="allow",
                config=dict(config or {}),
            )
        except Exception as error:
            raise ConfigError(
                f"logging.wandb is {mode}, but Weights & Biases could not start: {error} "
                "Log in with 'wandb login', or set logging.wandb to offline or disabled."
            ) from error

    def log(self, values: Mapping[str, float]) -> None:
        """Send the numbers, over environment steps."""
        self.run.log(dict(values), step=int(values["total_steps"]))

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()
