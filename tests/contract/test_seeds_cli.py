"""``apexrl train --seeds`` and ``apexrl sweep``, as users meet them: real trainings, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from apexrl.cli.main import main
from apexrl.core.errors import FewSamplesWarning
from apexrl.core.system.files import DirectoryLock, read_json_lines
from apexrl.experiments import jobs, seeds
from apexrl.run.loading import load_config

pytestmark = pytest.mark.slow

TINY = {
    "task.id": "cartpole",
    "task.num_envs": 4,
    "policy.hidden_dims": [8],
    "algo.num_steps": 8,
    "algo.num_epochs": 1,
    "training.total_timesteps": 320,
    "training.save_interval": 2,
    "training.eval_interval": 5,
    "training.eval_episodes": 2,
    "training.eval_num_envs": 2,
    "training.final_eval_episodes": 4,
    "training.device": "cpu",
    "features.save_video": False,
    "logging.tensorboard": False,
}


def words(**more: Any) -> list[str]:
    """Options of a short training; two underscores stand for a dot."""
    values = {**TINY, **{name.replace("__", "."): value for name, value in more.items()}}
    return [word for name, value in values.items() for word in (f"--{name}", json.dumps(value).strip('"'))]


def without_time(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_json_lines(path)]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)


def is_free(directory: Path) -> bool:
    lock = DirectoryLock(directory)
    try:
        lock.acquire()
    except Exception:
        return False
    lock.release()
    return True


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command in a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "apexrl.cli", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


# Seeds


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds, trained at once. Not to be changed."""
    directory = tmp_path_factory.mktemp("seeds") / "two"
    assert main(["train", "lift_ppo", "--seeds", "2", "--jobs", "2", "--run-dir", str(directory), *words()]) == 0
    return directory


def test_every_seed_is_the_run_that_it_would_be_alone(finished: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    assert main(["train", "lift_ppo", "--run-dir", str(alone), *words(training__seed=1)]) == 0
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_time(finished / "seed-1" / name) == without_time(alone / name)
        assert without_time(finished / "seed-0" / name) != without_time(alone / name)


def test_the_seeds_are_aggregated(finished: Path) -> None:
    stored = seeds.read(finished)
    assert [(run.seed, run.state) for run in stored.runs] == [(0, "done"), (1, "done")]
    last = [read_json_lines(finished / f"seed-{seed}" / "evaluations.jsonl")[-1]["return"] for seed in (0, 1)]
    found = json.loads((finished / seeds.FILE).read_text())["aggregate"]["return"]
    assert found["iqm"] == pytest.approx(sum(last) / 2)
    # Student's t of two values: t with one degree of freedom is 12.706, times half of what lies between them.
    reach = 12.7062 * abs(last[1] - last[0]) / 2
    assert found["interval"] == pytest.approx([found["iqm"] - reach, found["iqm"] + reach], rel=1e-4)
    with Image.open(finished / "curve.png") as image:
        assert image.width > 800


def test_plot_draws_them_together(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    together, apart = tmp_path / "together.png", tmp_path / "apart.png"
    with pytest.warns(FewSamplesWarning, match="interval of 2 samples is unreliable"):
        assert main(["plot", str(finished), "--output", str(together)]) == 0
    assert main(["plot", str(finished / "seed-0"), "--output", str(apart)]) == 0
    assert capsys.readouterr().out.split() == [str(together), str(apart)]
    assert together.read_bytes() != apart.read_bytes()


def test_resume_goes_on_with_what_is_missing_and_with_new_seeds(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "two"))
    expected = seeds.read(finished)
    stored = seeds.read(directory)
    stored.runs[1] = seeds.SeedRun(1)
    stored.write()
    # As a kill leaves it: half of its lines, and a checkpoint in the middle.
    (directory / "seed-1" / "checkpoints" / "iteration_000010.pt").unlink()
    untouched = (directory / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(["train", "--resume", str(directory), "--seeds", "3"]) == 0
    found = seeds.read(directory)
    assert found.runs[:2] == expected.runs
    assert [(run.seed, run.state) for run in found.runs] == [(0, "done"), (1, "done"), (2, "done")]
    assert without_time(directory / "seed-1" / "metrics.jsonl") == without_time(finished / "seed-1" / "metrics.jsonl")
    assert (directory / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == untouched
    assert "seeds 1, 2\n" in capsys.readouterr().out
    assert main(["train", "--resume", str(directory)]) == 0
    assert f"Every seed in {directory} is done." in capsys.readouterr().out


def test_a_seed_follows_the_configuration_that_all_of_them_have_now(finished: Path, tmp_path: Path) -> None:
    directory = tmp_path / "prolonged"
    shutil.copytree(finished, directory)
    stored = seeds.read(directory)
    stored.config["training"]["total_timesteps"] = 640  # as after --resume with this, stopped before seed 1
    stored.runs[1].state = "waiting"
    stored.write()
    assert main(["train", "--resume", str(directory)]) == 0
    assert [read_json_lines(directory / f"seed-{seed}" / "metrics.jsonl")[-1]["total_steps"] for seed in (0, 1)] == [
        320,
        640,
    ]


def test_a_run_with_nothing_left_to_train_still_says_what_was_logged(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "seed-0"
    shutil.copytree(finished / "seed-0", run_dir)
    waiting, reports = [jobs.Job(seeds.read(finished).config, run_dir)], list[jobs.Report]()

    def note(report: jobs.Report) -> bool:
        reports.append(report)
        return True

    assert jobs.run_jobs(lambda: waiting.pop() if waiting else None, note) is None
    assert reports[-1].kind == "done"
    assert (
        reports[-1].values["logged"]["train/value_loss"]
        == read_json_lines(run_dir / "metrics.jsonl")[-1]["train/value_loss"]
    )


def test_sigterm_leaves_a_slow_iteration(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    directory = tmp_path / "slow"
    slow = words(algo__num_steps=2_000_000, training__total_timesteps=8_000_000)
    process = start("train", "lift_ppo", "--seeds", "1", "--run-dir", str(directory), *slow)
    wait_for(lambda: (directory / "seed-0" / "config.yaml").is_file())
    time.sleep(2.0)  # it is in its first rollout, which would take minutes
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, errors
    wait_for(lambda: is_free(directory / "seed-0"), seconds=10)


def test_eval_of_several_runs_asks_for_one(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(finished)]) == 2
    assert f"holds several runs; name one of them, such as {finished / 'seed-0'}" in capsys.readouterr().err


def test_a_seed_that_fails_is_reported_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "some"
    (directory / "seed-5").mkdir(parents=True)
    (directory / "seed-5" / "mine.txt").write_text("not a run")
    overrides = [(name, json.dumps(value)) for name, value in TINY.items()]
    config = load_config("lift_ppo", overrides).to_dict()
    seeds.SeedRuns(directory, config, [seeds.SeedRun(5), seeds.SeedRun(6)]).write()
    assert main(["train", "--resume", str(directory)]) == 1
    output = capsys.readouterr().out
    assert f"seed 5      failed: --run-dir {directory / 'seed-5'} is not empty" in output
    assert "over 1 seed: " in output
    assert f"1 of 2 failed. Try again with: apexrl train --resume {directory}" in output
    assert [run.state for run in seeds.read(directory).runs] == ["failed", "done"]
    (directory / "seed-5" / "mine.txt").unlink()
    assert main(["train", "--resume", str(directory)]) == 0
    assert [run.state for run in seeds.read(directory).runs] == ["done", "done"]


def test_seeds_that_all_diverge_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "none"
    arguments = ["--run-dir", str(directory), *words(algo__reward_scale=1e38)]
    assert main(["train", "lift_ppo", "--seeds", "5,6", "--jobs", "2", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out.count("failed: Training diverged: ") == 4  # when it happened, and in the table
    assert f"No seed in {directory} was trained to its end" in output.err
    assert not (directory / "curve.png").exists()


def test_ctrl_c_saves_says_how_to_go_on_and_that_works(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "long"
    logs = [directory / f"seed-{seed}" / "metrics.jsonl" for seed in (0, 1)]

    def interrupt() -> None:
        wait_for(lambda: all(log.exists() for log in logs))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    long = {"training__total_timesteps": 10**7, "training__save_interval": 10**6, "training__eval_interval": 0}
    arguments = words(**long, features__compile="false")  # which could take longer than wait_for waits
    assert main(["train", "lift_ppo", "--seeds", "2", "--jobs", "2", "--run-dir", str(directory), *arguments]) == 130
    thread.join()
    output = capfd.readouterr()
    assert f"not finished: seeds 0, 1. Resume with: apexrl train --resume {directory}" in output.out
    assert output.err.count("Stopping after the running iterations") == 1
    saved = [sorted((directory / f"seed-{seed}" / "checkpoints").glob("*.pt")) for seed in (0, 1)]
    assert [len(paths) for paths in saved] == [1, 1]
    assert [run.state for run in seeds.read(directory).runs] == ["waiting", "waiting"]
    steps = str(max(int(line["total_steps"]) for log in logs for line in read_json_lines(log)))
    assert main(["train", "--resume", str(directory), "--training.total_timesteps", steps]) == 0
    assert [run.state for run in seeds.read(directory).runs] == ["done", "done"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seeds", "none"], ["--seeds must be a number", "'none'"]),
        (["--jobs", "2"], ["--jobs 2", "--seeds"]),
        (["--seeds", "2", "--training.final_eval_episodes", "0"], ["training.final_eval_episodes", "got 0"]),
        (["--seeds", "2", "--run-dir", "{finished}"], ["{finished} is not empty", "--resume {finished}"]),
        (["--resume", "{finished}", "--run-dir", "x"], ["--resume {finished}", "leave --run-dir out"]),
        (["lift_ppo", "--resume", "{finished}"], ["--resume {finished}", "leave 'lift_ppo' out"]),
        (["--resume", "{finished}", "--algo.gamma", "0.5"], ["--algo.gamma 0.5", "cannot change"]),
        (["--resume", "{finished}", "--training.seed", "4"], ["--training.seed 4", "cannot change"]),
        (["--resume", "{finished}/..", "--seeds", "2"], ["holds no seeds.json"]),
    ],
)
def test_a_mistake_gets_one_message(
    arguments: list[str], expected: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / seeds.FILE).read_bytes()
    assert main(["train", *(word.format(finished=finished) for word in arguments)]) == 2
    error = capsys.readouterr().err
    for part in expected:
        assert part.format(finished=finished) in error
    assert (finished / seeds.FILE).read_bytes() == before


# Sweeps


def sweep_file(path: Path, **changes: Any) -> Path:
    content = {
        "preset": "lift_ppo",
        "overrides": {**TINY, "training.eval_interval": 2, "features.save_plot": False},
        "space": {
            "algo.learning_rate": {"low": "1e-4", "high": 0.1, "log": True},
            "algo.num_epochs": {"low": 1, "high": 3},
            "policy.hidden_dims": {"choices": [[4], [8, 8]]},
        },
        "trials": 3,
        "seed": 4,
        **changes,
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def results(directory: Path) -> Any:
    return json.loads((directory / "sweep.json").read_text())


def test_a_sweep_searches_prunes_and_writes_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "sweep"
    file = sweep_file(tmp_path / "s.yaml", trials=10, pruning="median")
    assert main(["sweep", str(file), "--dir", str(directory), "--jobs", "2"]) == 0
    output = capsys.readouterr().out
    found = results(directory)
    assert len(found["trials"]) == 10
    states = [trial["state"] for trial in found["trials"]]
    assert set(states) == {"complete", "pruned"}
    best = max((trial for trial in found["trials"] if trial["state"] == "complete"), key=lambda trial: trial["value"])
    assert found["best"] == best
    last = read_json_lines(directory / f"trial-{best['number']:04d}" / "evaluations.jsonl")[-1]
    assert last["return"] == best["value"]
    config = load_config(str(directory / "best.yaml"))
    assert config.to_dict()["algo"]["learning_rate"] == best["params"]["algo.learning_rate"]
    assert list(config.policy.hidden_dims) == best["params"]["policy.hidden_dims"]  # type: ignore[union-attr]
    pruned = states.index("pruned")
    assert len(read_json_lines(directory / f"trial-{pruned:04d}" / "metrics.jsonl")) < 10
    assert f"trial {pruned} was pruned" in output
    assert f"Best configuration: {directory / 'best.yaml'}" in output
    with Image.open(directory / "sweep.png") as image:
        assert image.width > 1000
    assert main(["train", str(directory / "best.yaml"), "--run-dir", str(tmp_path / "again")]) == 0
    assert read_json_lines(tmp_path / "again" / "evaluations.jsonl")[-1]["return"] == best["value"]


def test_a_sweep_that_is_killed_goes_on_to_the_same_end(start: Callable[..., Any], tmp_path: Path) -> None:
    # Two seeds a trial, killed in the second trial; then once more, with the same command.
    file = sweep_file(tmp_path / "s.yaml", seeds=2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["sweep", str(file), "--dir", str(whole)]) == 0
    process = start("sweep", str(file), "--dir", str(killed))
    second = killed / "trial-0001" / "seed-0"
    wait_for(lambda: process.poll() is not None or len(read_json_lines(second / "metrics.jsonl")) >= 3)
    process.kill()
    process.wait()
    with (killed / "journal.jsonl").open("a") as journal:
        journal.write('{"op_code": 6, "work')  # as if it had been writing
    wait_for(lambda: is_free(second))  # its process notices that nobody listens
    before = results(killed)["trials"]
    assert before[0]["state"] == "complete"
    assert main(["sweep", str(file), "--dir", str(killed)]) == 0
    assert results(killed) == results(whole)
    for name in ("best.yaml", "sweep.yaml"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert len({json.dumps(trial["params"]) for trial in results(whole)["trials"]}) == 3
    assert len(results(whole)["trials"][0]["scores"]) == 2


def test_more_trials_go_on_and_another_search_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "sweep"
    assert main(["sweep", str(sweep_file(tmp_path / "s.yaml")), "--dir", str(directory), "--trials", "1"]) == 0
    assert len(results(directory)["trials"]) == 1
    assert main(["sweep", str(sweep_file(tmp_path / "s.yaml", trials=2)), "--dir", str(directory)]) == 0
    first = results(directory)["trials"]
    assert len(first) == 2
    assert main(["sweep", "--resume", str(directory)]) == 0
    assert results(directory)["trials"] == first
    capsys.readouterr()
    assert main(["sweep", str(sweep_file(tmp_path / "s.yaml", seed=5)), "--dir", str(directory)]) == 2
    assert f"{directory} holds a sweep with another 'seed'" in capsys.readouterr().err
    lock = DirectoryLock(directory)
    lock.acquire()
    assert main(["sweep", "--resume", str(directory)]) == 2
    assert f"{directory} is in use" in capsys.readouterr().err
    lock.release()


def test_an_objective_that_no_trial_has_ends_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweep_file(tmp_path / "s.yaml", objective="retrun")
    assert main(["sweep", str(file), "--dir", str(tmp_path / "sweep")]) == 2
    error = capsys.readouterr().err
    assert "objective 'retrun' is no number of an evaluation or a log" in error
    assert "Did you mean 'return'?" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Give a sweep file, or --resume"),
        (["{file}", "--resume", "x"], "Give a sweep file, or --resume"),
        (["--resume", "x", "--dir", "y"], "--resume x stays in its own directory; leave --dir out"),
        (["--resume", "nowhere"], "nowhere holds no sweep"),
        (["{file}", "--dir", "{here}"], "{here} holds something else than a sweep"),
        (["{file}", "--jobs", "0"], "must be an integer from 1"),
        (["{file}", "--trials", "100001"], "--trials: trials must be an integer from 1 to 100000, got 100001"),
    ],
)
def test_a_mistake_of_a_sweep_gets_one_message(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(tmp_path / "s.yaml")
    assert main(["sweep", *(word.format(file=file, here=tmp_path) for word in arguments)]) == 2
    assert expected.format(here=tmp_path) in capsys.readouterr().err


def test_without_optuna_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in ("apexrl.cli.sweep", "apexrl.experiments.sweep"):  # imported by another test, perhaps
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["sweep", "cartpole"]) == 2
    assert "pip install 'apexrl[sweep]'" in capsys.readouterr().err
