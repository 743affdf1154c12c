"""Document 004: OnPolicyRunner, nearly as the document writes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from apexrl.agent import Trainer
from apexrl.agent.on_policy_runner import OnPolicyRunner
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.envs import RslVecEnv
from apexrl.errors import CheckpointError, ConfigError
from apexrl.loggers import read_json_lines
from apexrl.models import MLPActor, MLPCritic
from apexrl.policies import RecurrentActorCritic


class WalkingRobot:
    """The environment dialect of the document: ``step -> (obs, reward, done, extras)``."""

    num_envs, num_actions, max_episode_length = 4, 2, 10

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.position, self.time = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)

    def get_observations(self) -> Tensor:
        return self.position.clone()

    def reset(self) -> Tensor:
        self.position.zero_()
        self.time.zero_()
        return self.get_observations()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        self.position += 0.1 * action.clamp(-1, 1)
        self.time += 1
        velocity_reward, energy_penalty = action[:, 0].clamp(-1, 1), 0.1 * action.square().sum(-1)
        fallen = self.position.abs().amax(-1) > 2.0
        time_outs = (self.time >= self.max_episode_length) & ~fallen
        robot_height = self.position[:, 1].clone()
        done = fallen | time_outs
        self.position[done] = 0.0
        self.time[done] = 0
        extras = {
            "time_outs": time_outs,
            "reward_components": {
                "velocity": velocity_reward,
                "energy": -energy_penalty,
            },
            "log": {
                "/robot/height_mean": robot_height.mean().item(),
            },
        }
        return self.get_observations(), velocity_reward - energy_penalty, done, extras


@pytest.fixture
def env() -> RslVecEnv:
    torch.manual_seed(0)
    return RslVecEnv(WalkingRobot())


pytestmark = pytest.mark.filterwarnings("ignore:.*hides the last state.*")


def test_basic_use(tmp_path: Path) -> None:
    runner = OnPolicyRunner(
        env=WalkingRobot(),
        algorithm="ppo",
        actor_class=MLPActor,
        critic_class=MLPCritic,
        actor_cfg={"hidden_dims": [16]},
        critic_cfg={"hidden_dims": [16]},
        log_dir=str(tmp_path / "logs"),
        save_dir=str(tmp_path / "checkpoints"),
        device=torch.device("cpu"),
        log_interval=1,
        save_interval=2,
        log_reward_components=True,
    )
    runner.learn(total_timesteps=4 * 32 * 4)
    assert runner.iteration == 4
    stats = runner.eval(num_episodes=8)
    assert stats["eval/min_reward"] <= stats["eval/mean_reward"] <= stats["eval/max_reward"]
    assert stats["eval/std_reward"] >= 0
    runner.save_checkpoint("final_model.pt")
    assert (tmp_path / "checkpoints" / "final_model.pt").is_file()

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        f"train/{name}" for name in ("policy_loss", "value_loss", "entropy_loss", "approx_kl", "learning_rate")
    } <= tags
    assert {"episode/mean_reward", "episode/mean_length", "rollout/mean_reward", "rollout/mean_value"} <= tags
    assert {"reward_components/velocity", "reward_components/energy", "env/robot/height_mean"} <= tags
    assert {"time/rollout_share", "time/update_share", "time/fps"} <= tags


def test_callbacks(env: RslVecEnv) -> None:
    runner = OnPolicyRunner(env=env, device="cpu")
    seen: list[str] = []

    def on_iteration_start(runner: OnPolicyRunner) -> None:
        seen.append(f"start {runner.iteration}")

    def on_iteration_end(runner: OnPolicyRunner, stats: dict[str, float]) -> None:
        if stats["rollout/mean_reward"] > -100:
            seen.append("threshold")

    runner.add_callback("pre_iteration", on_iteration_start)
    runner.add_callback("post_iteration", on_iteration_end)
    runner.learn(2 * 4 * 32)
    assert seen == ["start 0", "threshold", "start 1", "threshold"]
    with pytest.raises(ConfigError, match="Did you mean 'post_update'"):
        runner.add_callback("post_updates", on_iteration_end)


def test_reward_components_are_summed_over_whole_episodes(env: RslVecEnv) -> None:
    runner = OnPolicyRunner(env=env, device="cpu", cfg=PPOConfig(num_steps=4))
    stats: list[dict[str, float]] = []
    runner.add_callback("post_iteration", lambda _, s: stats.append(s))
    runner.learn(4 * 4 * 5)
    # Episodes of 10 steps span rollouts of 4; their components add up to their return.
    with_episodes = [s for s in stats if "episode/mean_reward" in s]
    assert with_episodes
    for s in with_episodes:
        assert s["episode/mean_length"] == 10.0
        total = s["reward_components/velocity"] + s["reward_components/energy"]
        assert s["episode/mean_reward"] == pytest.approx(total, abs=1e-4)


def test_log_reward_components_can_be_switched_off(env: RslVecEnv) -> None:
    runner = OnPolicyRunner(env=env, device="cpu", log_reward_components=False)
    stats: list[dict[str, float]] = []
    runner.add_callback("post_iteration", lambda _, s: stats.append(s))
    runner.learn(4 * 32)
    assert not [name for name in stats[0] if name.startswith("reward_components/")]


def test_checkpoints_continue_the_counts(env: RslVecEnv, tmp_path: Path) -> None:
    runner = OnPolicyRunner(env=env, save_dir=tmp_path, device="cpu")
    runner.learn(4 * 32 * 2)
    runner.save_checkpoint("model.pt")
    runner.save_checkpoint(f"checkpoint_{runner.iteration}.pt")
    assert (tmp_path / "checkpoint_2.pt").is_file()
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert (content["iteration"], content["total_steps"]) == (2, 256)
    assert {name.split(".")[0] for name in content["policy"]} == {"actor", "critic"}
    assert content["algorithm"]["config"]["learning_rate"] == PPOConfig().learning_rate
    assert content["algorithm"]["optimizer"]["state"]

    other = OnPolicyRunner(env=RslVecEnv(WalkingRobot()), save_dir=tmp_path, device="cpu")
    other.load_checkpoint("model.pt")
    assert (other.iteration, other.total_steps) == (2, 256)
    for a, b in zip(runner.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    other.learn(4 * 32 * 3)
    assert other.iteration == 3


def test_saving_without_a_place_is_an_error(env: RslVecEnv) -> None:
    with pytest.raises(CheckpointError, match="save_dir"):
        OnPolicyRunner(env=env, device="cpu").save_checkpoint("model.pt")


def test_evaluation_leaves_the_training_environments_untouched() -> None:
    robot = WalkingRobot()
    runner = OnPolicyRunner(env=robot, device="cpu")
    runner.learn(4 * 32)
    position, time = robot.position.clone(), robot.time.clone()
    runner.eval(num_episodes=4)
    assert torch.equal(robot.position, position)
    assert torch.equal(robot.time, time)


def test_a_ready_made_agent(tmp_path: Path) -> None:
    env = WalkingRobot()
    cfg = PPOConfig(learning_rate=3e-4)
    agent = PPO(
        env=env,
        cfg=cfg,
        actor_class=MLPActor,
        critic_class=MLPCritic,
    )
    runner = OnPolicyRunner(
        agent=agent,
        env=env,
        cfg=cfg,
        log_dir=str(tmp_path),
    )
    runner.learn(4 * 32)
    assert runner.agent is agent
    with pytest.raises(ConfigError, match="another cfg"):
        OnPolicyRunner(agent=agent, env=env, cfg=PPOConfig(learning_rate=1e-3))


@pytest.mark.parametrize(
    "option",
    [{"actor_cfg": {"hidden_dims": [8]}}, {"critic_cfg": {}}, {"device": "cpu"}, {"algorithm": "sac"},
     {"actor_class": torch.nn.Identity}, {"critic_class": torch.nn.Identity}],
    ids=str,
)  # fmt: skip
def test_what_a_ready_made_agent_would_ignore_is_refused(option: dict[str, Any], env: RslVecEnv) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} would have no effect"):
        OnPolicyRunner(agent=PPO(env=env), env=env, **option)


def test_an_agent_finds_its_device_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apexrl.algorithms.ppo.find_device", lambda: torch.device("meta"))
    assert PPO(env=WalkingRobot(), device="cpu").policy.device.type == "cpu"
    assert PPO(env=WalkingRobot()).policy.device.type == "meta"


def test_a_trainer_and_a_rollout_take_the_raw_environment() -> None:
    robot, other = WalkingRobot(), WalkingRobot()
    agent = PPO(env=robot, device="cpu")
    trainer = Trainer(robot, agent.policy, agent, eval_env=other)
    trainer.learn(4 * 32)
    assert trainer.evaluate(4).num_episodes == 4
    runner = OnPolicyRunner(env=robot, agent=agent)
    assert runner.rollout(None, 3, envs=robot)[1] is not None
    assert robot.time.tolist() == [3] * 4
    obs, _, _ = runner.rollout(None, 3, envs=other)
    runner.rollout(obs, 2, envs=other)
    assert (robot.time.tolist(), other.time.tolist()) == ([3] * 4, [5] * 4)


@pytest.mark.parametrize("interval", [0, -1])
def test_an_impossible_log_interval_is_refused(interval: int, env: RslVecEnv) -> None:
    with pytest.raises(ConfigError, match=f"log_interval must be at least 1, got {interval}"):
        OnPolicyRunner(env=env, device="cpu", log_interval=interval)


def test_a_second_run_in_the_same_place_starts_the_logs_anew(tmp_path: Path) -> None:
    for iterations in (3, 2):
        runner = OnPolicyRunner(env=WalkingRobot(), device="cpu", log_dir=tmp_path, log_interval=1, eval_interval=1)
        runner.learn(4 * 32 * iterations)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert [line["iteration"] for line in read_json_lines(tmp_path / name)] == [1, 2]


def test_a_recurrent_policy_values_what_another_function_does(env: RslVecEnv) -> None:
    policy = RecurrentActorCritic.for_env(env)
    runner = OnPolicyRunner(env=env, agent=PPO(policy=policy))
    _, batch, _ = runner.rollout(None, 5, policy_fn=lambda obs: (torch.ones(4, 2), torch.zeros(4, 1), None))
    assert batch is not None
    assert (batch["action"] == 1).all()
    # The memory starts empty and goes on with every observation, as when the policy itself acts.
    carry = {"observation": batch["observation"][0], **policy.initial_state(4)}
    for t in range(1, 5):
        memory = {name: value for name, value in policy.act(carry).items() if name in carry}
        carry = {"observation": batch["observation"][t], **memory}
        for name, value in memory.items():
            torch.testing.assert_close(batch[name][t], value)
    runner.algorithm.update(batch)


def test_an_unknown_algorithm_names_the_known_ones(env: RslVecEnv) -> None:
    with pytest.raises(ConfigError, match=r"'pppo'; known are \['ppo'\]\. Did you mean 'ppo'"):
        OnPolicyRunner(env=env, algorithm="pppo")
