"""Print how many parameters each ``policy.size`` of a ``VLAPolicy`` has: ``python benchmarks/vla_sizes.py``."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from apexrl.policies.vla.model import SIZES
from apexrl.policies.vla.policy import VLAPolicy


def count_parameters(size: str, *, num_cameras: int, lora_rank: int = 0) -> tuple[int, int]:
    """Return the parameters of a flow policy for a 39-number state, 128² cameras and chunks of 5 times 4; and how many
    of them are trained.
    """
    spaces: dict[str, gym.Space[object]] = {
        "state": gym.spaces.Box(-1, 1, (39,), np.float32),
        "instruction": gym.spaces.Box(0, 255, (96,), np.uint8),
    }
    for i in range(num_cameras):
        spaces[f"camera_{i}"] = gym.spaces.Box(0, 255, (128, 128, 3), np.uint8)
    actions = gym.spaces.Box(-1, 1, (20,), np.float32)
    # On the meta device nothing is stored, so the largest takes no time.
    with torch.device("meta"):
        policy = VLAPolicy(gym.spaces.Dict(spaces), actions, chunk=5, head="flow", size=size, lora_rank=lora_rank)
    parameters = list(policy.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def main() -> None:
    print("| size | width | depth | heads | expert width | state only | one camera | trained with `lora_rank: 8` |")
    print("|---|---|---|---|---|---|---|---|")
    for name, size in SIZES.items():
        state_only, _ = count_parameters(name, num_cameras=0)
        camera, _ = count_parameters(name, num_cameras=1)
        _, adapters = count_parameters(name, num_cameras=1, lora_rank=8)
        columns = [name, size.width, size.depth, size.num_heads, size.expert_width]
        counts = [f"{count / 1e6:.2f} M" for count in (state_only, camera, adapters)]
        print("| " + " | ".join(map(str, [*columns, *counts])) + " |")


if __name__ == "__main__":
    main()
