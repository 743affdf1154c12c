"""The one place where states and actions are normalised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from apexrl.core.errors import ConfigError


class Scaling(nn.Module):
    """Shifts and scales states and actions by statistics of demonstrations; before there are any, by nothing.

    s̃ = clip((s − μ_s) / σ_s, ±clip),   ã = (a − μ_a) / σ_a

    Networks, distributions and losses work on s̃ and ã. Densities are those of ã; log π(a) = log π(ã) − Σ log σ_a
    differs by a constant, which ratios of probabilities do not see.

    Args:
        num_states: numbers in the state.
        num_actions: numbers in a whole chunk.
        scale_states: False leaves states as they are.
        clip: bound of normalised states.
    """

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, num_states: int, num_actions: int, *, scale_states: bool = True, clip: float = 10.0) -> None:
        super().__init__()
        self.scale_states, self.clip = scale_states, clip
        for name, size in (("state", num_states), ("action", num_actions)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @torch.no_grad()
    def set_statistics(
        self, state_mean: Tensor, state_std: Tensor, action_mean: Tensor, action_std: Tensor, *, min_std: float
    ) -> None:
        """Take over statistics; those of one control step hold for every step of a chunk."""
        given = {"state_mean": state_mean, "state_std": state_std, "action_mean": action_mean, "action_std": action_std}
        for name, value in given.items():
            buffer = getattr(self, name)
            flat = torch.as_tensor(value, dtype=buffer.dtype, device=buffer.device).flatten()
            is_step = name.startswith("action") and flat.numel() and buffer.numel() % flat.numel() == 0
            if flat.numel() != buffer.numel() and not is_step:
                wanted, fix = buffer.numel(), "Take them from demonstrations of the same task suite."
                raise ConfigError(f"set_statistics: {name} must have {wanted} numbers, got {flat.numel()}. {fix}")
            if not flat.isfinite().all():
                raise ConfigError(f"set_statistics: {name} must be finite, got {flat.tolist()}.")
            flat = flat.repeat(buffer.numel() // max(1, flat.numel()))
            buffer.copy_(flat.clamp_min(min_std) if name.endswith("std") else flat)

    def state(self, state: Tensor) -> Tensor:
        """Normalise states ``[..., S]``."""
        if not self.scale_states:
            return state
        return ((state - self.state_mean) / self.state_std).clamp(-self.clip, self.clip)

    def action(self, action: Tensor) -> Tensor:
        """Normalise chunks ``[..., chunk * A]``."""
        return (action - self.action_mean) / self.action_std

    def restore_action(self, normalized: Tensor) -> Tensor:
        """Return chunks in the units of the environment."""
        return normalized * self.action_std + self.action_mean
