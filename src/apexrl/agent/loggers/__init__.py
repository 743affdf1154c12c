"""Where numbers go: JSON lines always; TensorBoard, Weights & Biases and the console on request."""

from apexrl.agent.loggers.base import Logger
from apexrl.agent.loggers.console import ConsoleLogger
from apexrl.agent.loggers.jsonl import JsonlLogger
from apexrl.agent.loggers.tensorboard import TensorBoardLogger
from apexrl.agent.loggers.wandb import WandbLogger
from apexrl.core.system.json_lines import append_json_line, cut_json_lines, parse_json_lines, read_json_lines

__all__ = [
    "ConsoleLogger",
    "JsonlLogger",
    "Logger",
    "TensorBoardLogger",
    "WandbLogger",
    "append_json_line",
    "cut_json_lines",
    "parse_json_lines",
    "read_json_lines",
]
