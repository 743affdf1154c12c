"""What the LeRobot adapter does where LeRobot is not needed; tests/lerobot has the rest."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from tests.refusals import refused

from apexrl.core.errors import ConfigError
from apexrl.policies.vla import LeRobotPolicy, instruction_tensor
from apexrl.policies.vla.lerobot import instructions

SPACE = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (4,)), "instruction": gym.spaces.Box(0, 255, (96,), np.uint8)})


def test_without_lerobot_the_message_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with refused(ConfigError, "smolvla", "LeRobot", "make test-lerobot"):
        LeRobotPolicy.load(SPACE, gym.spaces.Box(-1, 1, (10,)), path="nowhere")


def test_an_unknown_kind_names_the_nearest() -> None:
    with refused(ConfigError, "'smolvl'", "Did you mean 'smolvla'"):
        LeRobotPolicy.load(SPACE, gym.spaces.Box(-1, 1, (10,)), path="nowhere", kind="smolvl")


def test_instructions_come_back_as_text() -> None:
    texts = ["open the drawer", "öffne", ""]
    assert instructions(torch.stack([instruction_tensor(text) for text in texts])) == texts
