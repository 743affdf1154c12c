"""Where numbers go: JSON lines always; TensorBoard, Weights & Biases and the console on request."""

from apexrl.agent.loggers.base import Logger
from apexrl.agent.loggers.console import ConsoleLogger
from apexrl.agent.loggers.jsonl import JsonlLogger
from apexrl.agent.loggers.tensorboard import TensorBoardLogger
from apexrl.agent.loggers.wandb import WandbLogger

__all__ = [
    "ConsoleLogger",
    "JsonlLogger",
    "Logger",
    "TensorBoardLogger",
    "WandbLogger",
]
