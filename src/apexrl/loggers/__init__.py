"""Where numbers go: JSON lines always; TensorBoard, Weights & Biases and the console on request."""

from apexrl.loggers.base import Logger
from apexrl.loggers.console import ConsoleLogger
from apexrl.loggers.jsonl import JsonlLogger, append_json_line, cut_json_lines, parse_json_lines, read_json_lines
from apexrl.loggers.tensorboard import TensorBoardLogger
from apexrl.loggers.wandb import WandbLogger

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
