"""Document 004: OnPolicyRunner, as the document writes it; only numbers of steps are smaller."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.refusals import refused
from torch import Tensor

from apexrl import cli
from apexrl.agent import Trainer, TrainingConfig, checkpoint
from apexrl.agent.on_policy_runner import OnPolicyRunner
from apexrl.algorithms import ppo
from apexrl.algorithms.ppo import PPO, PPOConfig
from apexrl.algorithms.ppo_roa import PPOROA, PPOROAConfig
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.core.system.files import read_json_lines
from apexrl.envs import RslVecEnv, make_env
from apexrl.policies import RecurrentActorCritic, ROAPolicy
from apexrl.policies.networks import MLPActor, MLPCritic


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
        stability_reward = 0.1 - 0.1 * self.position[:, 1].abs()
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
                "stability": stability_reward,
            },
            "log": {
                "/robot/height_mean": robot_height.mean().item(),
            },
        }
        return self.get_observations(), velocity_reward - energy_penalty + stability_reward, done, extras


@pytest.fixture
def env() -> RslVecEnv:
    torch.manual_seed(0)
    return RslVecEnv(WalkingRobot())


pytestmark = pytest.mark.filterwarnings("ignore:.*hides the last state.*")


def test_basic_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = WalkingRobot()

    runner = OnPolicyRunner(
        env=env,
        algorithm="ppo",
        actor_class=MLPActor,
        critic_class=MLPCritic,
        log_dir="./logs",
        save_dir="./checkpoints",
        log_interval=10,
        save_interval=100,
    )

    runner.learn(total_timesteps=2_000)

    stats = runner.eval(num_episodes=100)

    runner.save_checkpoint("final_model.pt")

    assert (runner.iteration, runner.total_steps) == (16, 16 * 128)  # the first whole iteration past 2,000
    assert stats["eval/min_reward"] <= stats["eval/mean_reward"] <= stats["eval/max_reward"]
    assert (tmp_path / "checkpoints" / "final_model.pt").is_file()
    lines = read_json_lines(tmp_path / "logs" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 10, 16]


def test_the_configuration_and_what_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = WalkingRobot()

    runner = OnPolicyRunner(
        env=env,
        algorithm="ppo",
        actor_class=MLPActor,
        critic_class=MLPCritic,
        actor_cfg={"hidden_dims": [256]},
        critic_cfg={"hidden_dims": [256]},
        log_dir="./logs",
        save_dir="./checkpoints",
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        log_interval=10,
        save_interval=100,
        log_reward_components=True,
    )

    policy: Any = runner.policy
    assert [tuple(p.shape) for p in policy.actor.trunk.parameters()] == [(256, 2), (256,)]
    runner.learn(total_timesteps=4 * 32 * 4)
    runner.close()
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        f"train/{name}" for name in ("policy_loss", "value_loss", "entropy_loss", "approx_kl", "learning_rate")
    } <= tags
    assert {"episode/mean_reward", "episode/mean_length", "rollout/mean_reward", "rollout/mean_value"} <= tags
    assert {f"reward_components/{name}" for name in ("velocity", "energy", "stability")} <= tags
    assert "env/robot/height_mean" in tags
    assert {"time/rollout_share", "time/update_share", "time/fps"} <= tags


def test_the_arguments_have_the_documents_order_and_defaults() -> None:
    parameters = inspect.signature(OnPolicyRunner).parameters
    assert list(parameters)[:14] == [
        "env", "algorithm", "actor_class", "critic_class", "actor_cfg", "critic_cfg", "log_dir", "save_dir", "device",
        "log_interval", "save_interval", "log_reward_components", "agent", "cfg",
    ]  # fmt: skip
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert (defaults["algorithm"], defaults["log_interval"], defaults["save_interval"]) == ("ppo", 10, 100)
    assert defaults["log_reward_components"] is True
    assert list(inspect.signature(OnPolicyRunner.learn).parameters)[:2] == ["self", "total_timesteps"]
    assert list(inspect.signature(OnPolicyRunner.eval).parameters)[:2] == ["self", "num_episodes"]
    assert list(inspect.signature(PPO).parameters)[:4] == ["env", "cfg", "actor_class", "critic_class"]


def test_the_training_loop(tmp_path: Path) -> None:
    # Collect, update, adjust the learning rate, log every second iteration, save every third.
    cfg = PPOConfig(learning_rate=1e-3, schedule="linear")
    runner = OnPolicyRunner(
        WalkingRobot(), cfg=cfg, device="cpu", log_dir=tmp_path, save_dir=tmp_path, log_interval=2, save_interval=3
    )
    seen: list[str] = []
    rates: list[float] = []
    for event in ("pre_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update", "post_iteration"):
        runner.add_callback(event, lambda *_, event=event: seen.append(event))
    runner.add_callback("post_iteration", lambda _, stats: rates.append(stats["train/learning_rate"]))
    runner.learn(total_timesteps=4 * 32 * 7)
    each = ["pre_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update", "post_iteration"]
    assert seen == each * 7
    assert rates == pytest.approx([1e-3 * (1 - i / 7) for i in range(7)], rel=1e-4)
    assert [line["iteration"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 4, 6, 7]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"iteration_{i:06}.pt" for i in (3, 6, 7)]


def test_evaluation_prints_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    runner = OnPolicyRunner(WalkingRobot(), device="cpu")

    stats = runner.eval(num_episodes=100)

    print(f"平均奖励: {stats['eval/mean_reward']:.2f}")
    print(f"奖励标准差: {stats['eval/std_reward']:.2f}")
    print(f"最小奖励: {stats['eval/min_reward']:.2f}")
    print(f"最大奖励: {stats['eval/max_reward']:.2f}")

    mean, std, low, high = (float(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    # Actions and robots are the same in every episode: evaluation is deterministic.
    assert (low, high, std) == (mean, mean, 0.0)


def test_callbacks(env: RslVecEnv, capsys: pytest.CaptureFixture[str]) -> None:
    runner = OnPolicyRunner(env=env, device="cpu")
    threshold = -100

    def on_iteration_start(runner: OnPolicyRunner) -> None:
        print(f"开始迭代 {runner.iteration}")

    def on_iteration_end(runner: OnPolicyRunner, stats: dict[str, float]) -> None:
        if stats["rollout/mean_reward"] > threshold:
            print("达到奖励阈值！")

    runner.add_callback("pre_iteration", on_iteration_start)
    runner.add_callback("post_iteration", on_iteration_end)

    runner.learn(2 * 4 * 32)
    assert capsys.readouterr().out.splitlines() == ["开始迭代 0", "达到奖励阈值！", "开始迭代 1", "达到奖励阈值！"]
    with refused(ConfigError, "post_updates", "Did you mean 'post_update'"):
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
        total = sum(s[f"reward_components/{name}"] for name in ("velocity", "energy", "stability"))
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
    with refused(CheckpointError, "save_dir"):
        OnPolicyRunner(env=env, device="cpu").save_checkpoint("model.pt")


def test_evaluation_leaves_the_training_environments_untouched() -> None:
    robot = WalkingRobot()
    runner = OnPolicyRunner(env=robot, device="cpu")
    runner.learn(4 * 32)
    position, time = robot.position.clone(), robot.time.clone()
    runner.eval(num_episodes=4)
    assert torch.equal(robot.position, position)
    assert torch.equal(robot.time, time)


def test_a_ready_made_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
        log_dir="./logs",
    )

    runner.learn(4 * 32)
    assert runner.agent is agent
    assert read_json_lines(tmp_path / "logs" / "metrics.jsonl")[0]["train/learning_rate"] == pytest.approx(3e-4)
    with refused(ConfigError, "another cfg"):
        OnPolicyRunner(agent=agent, env=env, cfg=PPOConfig(learning_rate=1e-3))


def test_an_agent_acts_on_observations_alone() -> None:
    env = make_env("payload", 4)
    obs: Any = env.reset(seed=0)
    agent = PPO(env=env, device="cpu")
    action = agent.get_action(obs, deterministic=True)
    assert torch.equal(action, agent.policy(obs, deterministic=True).action)
    assert not action.requires_grad
    assert not torch.equal(agent.get_action(obs), agent.get_action(obs))
    # The student is deployed, while the teacher explores.
    roa = PPOROA(ROAPolicy.for_env(env), PPOROAConfig(phase="train"))
    seen = obs.exclude("priv")
    assert torch.equal(roa.get_action(seen, True), roa.roa.student.act({"observation": seen}, True)["action"])
    with refused(KeyError, "priv"):
        roa.get_action(seen)
    recurrent = PPO(policy=RecurrentActorCritic.for_env(env))
    with refused(ConfigError, "memory", "RecurrentActorCritic"):
        recurrent.get_action(obs)


@pytest.mark.parametrize(
    "option",
    [{"actor_cfg": {"hidden_dims": [8]}}, {"critic_cfg": {}}, {"device": "cpu"}, {"algorithm": "sac"},
     {"actor_class": torch.nn.Identity}, {"critic_class": torch.nn.Identity}],
    ids=str,
)  # fmt: skip
def test_what_a_ready_made_agent_would_ignore_is_refused(option: dict[str, Any], env: RslVecEnv) -> None:
    with refused(ConfigError, next(iter(option)), "no effect"):
        OnPolicyRunner(agent=PPO(env=env), env=env, **option)


def test_an_agent_finds_its_device_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "find_device", lambda: torch.device("meta"))
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
    with refused(ConfigError, "log_interval", f"got {interval}"):
        OnPolicyRunner(env=env, device="cpu", log_interval=interval)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def make_runner(tmp_path: Path, **options: Any) -> OnPolicyRunner:
    places = {"log_dir": tmp_path / "logs", "save_dir": tmp_path / "checkpoints", **options}
    return OnPolicyRunner(env=WalkingRobot(), device="cpu", log_interval=1, eval_interval=1, eval_episodes=4, **places)


def test_a_second_runner_in_the_same_directories_destroys_nothing(tmp_path: Path) -> None:
    first = make_runner(tmp_path)
    first.learn(4 * 32 * 3)
    first.save_checkpoint("model.pt")
    first.close()
    before = contents(tmp_path)

    runner = make_runner(tmp_path)
    assert contents(tmp_path) == before  # nothing is written before there is something to write
    runner.learn(4 * 32 * 2)
    runner.save_checkpoint("model.pt")
    runner.eval(4)
    runner.close()
    assert {path: content for path, content in contents(tmp_path).items() if path in before} == before
    assert (runner.run_dir, runner.save_dir) == (tmp_path / "logs" / "run_2", tmp_path / "checkpoints" / "run_2")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert [line["iteration"] for line in read_json_lines(tmp_path / "logs" / "run_2" / name)][:2] == [1, 2]
    assert torch.load(tmp_path / "checkpoints" / "run_2" / "model.pt", weights_only=True)["iteration"] == 2

    runner = make_runner(tmp_path)
    runner.eval(4)  # written to run_3; the weights of the first run are still found by their name
    runner.load_checkpoint("model.pt")
    assert (runner.run_dir, runner.iteration) == (tmp_path / "logs" / "run_3", 3)

    # One shared directory is enough, and its number is that of both.
    third = make_runner(tmp_path, log_dir=tmp_path / "other")
    third.save_checkpoint("model.pt")
    assert (third.run_dir, third.save_dir) == (tmp_path / "other" / "run_4", tmp_path / "checkpoints" / "run_4")


def test_a_checkpoint_loaded_from_the_same_directories_continues_their_run(tmp_path: Path) -> None:
    first = make_runner(tmp_path, keep_checkpoints=1)
    first.learn(4 * 32 * 3)
    first.save_checkpoint("model.pt")
    first.close()
    for last in (5, 6):
        runner = make_runner(tmp_path)
        runner.load_checkpoint("model.pt")
        runner.learn(4 * 32 * last)
        runner.close()
        assert (runner.run_dir, runner.save_dir) == (tmp_path / "logs", tmp_path / "checkpoints")
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            lines = read_json_lines(tmp_path / "logs" / name)
            assert [line["iteration"] for line in lines] == list(range(1, last + 1))
    # From an earlier checkpoint, those of iterations that come again are no longer the newest, and are kept.
    runner = make_runner(tmp_path)
    runner.load_checkpoint("model.pt")
    runner.learn(4 * 32 * 4)
    runner.close()
    assert checkpoint.latest(tmp_path / "checkpoints").name == "iteration_000004.pt"
    assert (tmp_path / "checkpoints" / "iteration_000006.pt.superseded").is_file()
    # The logs of another run are not continued with it.
    stranger = make_runner(tmp_path / "stranger")
    stranger.learn(4 * 32)
    runner = make_runner(tmp_path, log_dir=tmp_path / "stranger" / "logs")
    runner.load_checkpoint("model.pt")
    runner.learn(4 * 32 * 4)
    assert [line["iteration"] for line in read_json_lines(tmp_path / "stranger" / "logs" / "metrics.jsonl")] == [1]


def test_all_checkpoints_stay_unless_told(tmp_path: Path) -> None:
    for keep in ({}, {"keep_checkpoints": 2}):
        runner = make_runner(tmp_path, save_interval=1, **keep)
        runner.learn(4 * 32 * 5)
        assert runner.save_dir is not None
        assert len(list(runner.save_dir.glob("iteration_*.pt"))) == (2 if keep else 5)


def test_the_schedule_is_given_by_options_or_as_a_whole(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, save_step_csv=True)
    assert (runner.cfg.eval_episodes, runner.save_step_csv) == (4, True)
    training = TrainingConfig(total_timesteps=4 * 32 * 2, eval_interval=1, eval_episodes=3, save_interval=0)
    runner = OnPolicyRunner(env=WalkingRobot(), device="cpu", log_dir=tmp_path, training=training)
    runner.learn()
    assert runner.iteration == 2
    assert [line["episodes"] for line in read_json_lines(tmp_path / "evaluations.jsonl")] == [3, 3]
    with refused(ConfigError, "training", "seed", "keep_checkpoints"):
        OnPolicyRunner(env=WalkingRobot(), device="cpu", training=training, seed=1, keep_checkpoints=3)


def test_the_command_line_evaluates_plays_and_exports_the_checkpoint_of_a_runner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = OnPolicyRunner(
        env=make_env("lift", 4),
        actor_class=MLPActor,
        critic_class=MLPCritic,
        actor_cfg={"hidden_dims": [16]},
        critic_cfg={"hidden_dims": [16]},
        save_dir=tmp_path,
        device="cpu",
    )
    runner.learn(4 * 32)
    path = str(runner.save_checkpoint("final_model.pt"))
    assert cli.main(["eval", path, "--episodes", "5", "--num-envs", "5"]) == 0
    assert f"eval/mean_reward {runner.eval(5)['eval/mean_reward']:.4g}" in capsys.readouterr().out
    assert cli.main(["play", path, "--episodes", "1", "--output", str(tmp_path / "video.mp4")]) == 0
    assert cli.main(["export", path, "--format", "torchscript", "--output", str(tmp_path / "export")]) == 0
    assert {"video.mp4", "export"} <= {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize("phase", ["train", "finetune"])
def test_the_algorithm_can_be_ppo_roa(phase: Any) -> None:
    runner = OnPolicyRunner(
        make_env("payload", 4),
        algorithm="ppo_roa",
        cfg=PPOROAConfig(num_steps=8, phase=phase),
        actor_cfg={"hidden_dims": (8,), "adapt_dims": (8,)},
        critic_cfg={"hidden_dims": (8,)},
        device="cpu",
    )
    runner.learn(2 * 4 * 8)
    assert isinstance(runner.policy, ROAPolicy)
    assert (runner.iteration, runner.policy.history) == (2, 24)
    with refused(ConfigError, "'ppo_roa'", "PPOROAConfig", "PPOConfig"):
        OnPolicyRunner(make_env("payload", 4), algorithm="ppo_roa", cfg=PPOConfig())
    with refused(ConfigError, "actor_class", "Identity"):
        OnPolicyRunner(make_env("payload", 4), algorithm="ppo_roa", actor_class=torch.nn.Identity)


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
    with refused(ConfigError, "'pppo'", "'ppo_roa'", "Did you mean 'ppo'"):
        OnPolicyRunner(env=env, algorithm="pppo")
