"""The adapter on a tiny SmolVLA with random weights, in the environment that has LeRobot."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl.core.errors import ConfigError
from apexrl.policies.vla import LeRobotPolicy, instruction_tensor

pytest.importorskip("lerobot", reason="LeRobot has an environment of its own: make test-lerobot")

CHUNK, NUM_ACTIONS = 5, 2
SPACE = gym.spaces.Dict(
    {
        "state": gym.spaces.Box(-1, 1, (4,), np.float32),
        "instruction": gym.spaces.Box(0, 255, (96,), np.uint8),
        "corner2": gym.spaces.Box(0, 255, (32, 32, 3), np.uint8),
    }
)
ACTIONS = gym.spaces.Box(-1, 1, (CHUNK * NUM_ACTIONS,), np.float32)
SPECIAL = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>"]
WORDS = ["<pad>", "<unk>", *SPECIAL, "open", "the", "drawer", "close", "window"]
# torchvision registers shapes for operators that its build beside CPU torch does not have.
_OPERATORS = """nms qnms roi_align qroi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool
_roi_pool_backward ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"""


@pytest.fixture(scope="session", autouse=True)
def _torchvision() -> Any:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS.split():
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    return library


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SmolVLA of some 86,000 random weights, saved as LeRobot saves them."""
    transformers, tokenizers = importlib.import_module("transformers"), importlib.import_module("tokenizers")
    path = tmp_path_factory.mktemp("smolvla")
    vlm = path / "vlm"
    text = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=WORDS.index("<image>"), pad_token_id=0
    ).save_pretrained(vlm)
    words = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL,
        extra_special_tokens=dict(
            zip(("fake_image_token", "global_image_token", "end_of_utterance", "image_token"), SPECIAL, strict=True)
        ),
    )
    transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(), fast, transformers.SmolVLMVideoProcessor(), image_seq_len=4
    ).save_pretrained(vlm)
    feature = importlib.import_module("lerobot.configs.types")
    config = importlib.import_module("lerobot.policies.smolvla.configuration_smolvla").SmolVLAConfig(
        vlm_model_name=str(vlm),
        chunk_size=8,
        n_action_steps=8,
        max_state_dim=8,
        max_action_dim=6,
        num_vlm_layers=2,
        num_steps=3,
        tokenizer_max_length=12,
        resize_imgs_with_padding=(32, 32),
        device="cpu",
        input_features={
            "observation.state": feature.PolicyFeature(feature.FeatureType.STATE, (4,)),
            "observation.images.front": feature.PolicyFeature(feature.FeatureType.VISUAL, (3, 32, 32)),
        },
        output_features={"action": feature.PolicyFeature(feature.FeatureType.ACTION, (NUM_ACTIONS,))},
    )
    torch.manual_seed(0)
    importlib.import_module("lerobot.policies.smolvla.modeling_smolvla").SmolVLAPolicy(config).save_pretrained(path)
    return path


@pytest.fixture
def policy(directory: Path) -> LeRobotPolicy:
    return LeRobotPolicy.load(SPACE, ACTIONS, path=directory, chunk=CHUNK, cameras={"corner2": "front"})


def observe(*leading: int) -> TensorDict:
    return TensorDict(
        {
            "state": torch.randn(*leading, 4),
            "instruction": instruction_tensor("open the drawer").expand(*leading, 96),
            "corner2": torch.randint(0, 256, (*leading, 32, 32, 3), dtype=torch.uint8),
        },
        batch_size=list(leading),
    )


def test_observations_get_the_names_that_lerobot_knows(policy: LeRobotPolicy) -> None:
    inputs = policy.inputs(observe(2, 3))
    assert inputs["observation.state"].shape == (6, 4)
    assert inputs["observation.images.front"].shape == (6, 3, 32, 32)
    assert inputs["observation.images.front"].max() <= 1.0
    assert inputs["observation.language.tokens"][0, :3].tolist() == [WORDS.index(w) for w in ("open", "the", "drawer")]
    assert inputs["observation.language.attention_mask"].sum(-1).tolist() == [3] * 6


def test_it_acts_in_the_units_of_the_environment(policy: LeRobotPolicy) -> None:
    obs = observe(2, 3)

    def mode() -> Tensor:
        torch.manual_seed(0)  # of the noise that it starts from
        return policy(obs, deterministic=True).action

    action = mode()
    assert action.shape == (2, 3, CHUNK * NUM_ACTIONS)
    torch.manual_seed(0)
    torch.testing.assert_close(action, policy.act({"observation": obs}, deterministic=True)["action"])
    assert not torch.equal(policy(obs).action, policy(obs).action)
    policy.set_statistics(torch.zeros(4), torch.ones(4), torch.tensor([3.0, -3.0]), torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(mode(), 2.0 * action + torch.tensor([3.0, -3.0] * CHUNK))
    with refused(ConfigError, "log-probabilities"):
        policy.evaluate_actions(obs, action)


def test_imitation_learns(policy: LeRobotPolicy) -> None:
    torch.manual_seed(0)
    batch = {"observation": observe(16), "action": torch.full((16, CHUNK * NUM_ACTIONS), 0.7)}
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=3e-3)
    history = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = policy.imitation_loss(batch)
        assert loss.shape == (16,)
        loss.mean().backward()
        optimizer.step()
        history.append(loss.mean().item())
    assert sum(history[-10:]) < 0.5 * sum(history[:10])


def test_padded_actions_do_not_count(policy: LeRobotPolicy) -> None:
    batch = {"observation": observe(4), "action": torch.randn(4, CHUNK * NUM_ACTIONS)}
    none = policy.imitation_loss({**batch, "valid_steps": torch.zeros(4, 1, dtype=torch.int64)})
    assert torch.equal(none, torch.zeros(4))
    assert (policy.imitation_loss(batch) > 0).all()


def test_a_directory_without_a_policy_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "policy.path", tmp_path, "LeRobot"):
        LeRobotPolicy.load(SPACE, ACTIONS, path=tmp_path)
