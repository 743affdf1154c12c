"""Vision-language-action policies: our own compact model, and an adapter for LeRobot's."""

from apexrl.policies.vla.cfg_adapter import PI0_CFG_Adapter
from apexrl.policies.vla.lerobot import LeRobotPolicy
from apexrl.policies.vla.model import SIZES, Dimensions
from apexrl.policies.vla.policy import DENOISING, VALID_STEPS, VLAPolicy
from apexrl.policies.vla.tokenizer import WordTokenizer, instruction_tensor

__all__ = [
    "DENOISING",
    "SIZES",
    "VALID_STEPS",
    "Dimensions",
    "LeRobotPolicy",
    "PI0_CFG_Adapter",
    "VLAPolicy",
    "WordTokenizer",
    "instruction_tensor",
]
