"""Deployment: a trained policy as files that need neither this package nor the task, and a card that explains them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

import apexrl
from apexrl.agent import checkpoint
from apexrl.core.errors import ConfigError, ExportError, RunDirError, did_you_mean
from apexrl.core.observations import PRIVILEGED_GROUPS, leaves
from apexrl.core.types import ACTION, DONE, OBSERVATION
from apexrl.deploy.card import as_json, control, inputs_and_outputs
from apexrl.deploy.model import CARD, CARD_FORMAT, FILES, READERS, DeployedPolicy, Model, traced
from apexrl.envs import VecEnv
from apexrl.policies import Policy
from apexrl.rollout import initial_state, make_actor, rollout
from apexrl.run import trained_policy

TOLERANCE = 1e-5
"""A file whose actions differ from the policy's by this much, relative to actions above 1, is not kept."""
NUM_ENVS, NUM_STEPS, MAX_EPISODE = 4, 100, 1000
"""Of the rollout that tests the files: ``NUM_STEPS`` more than an episode (at most ``MAX_EPISODE``), for a reset."""
OPSET = 17
"""Of ONNX: everything that policies use exists in it, and runtimes from 2022 on read it."""


@dataclass(frozen=True)
class Exported:
    """A directory with ``policy.json`` and the files that it names, and the content of ``policy.json``."""

    directory: Path
    card: Mapping[str, Any]


def export_policy(source: Path, output: Path | None = None, formats: Sequence[str] = tuple(FILES)) -> Exported:
    """Write the newest checkpoint of a run, or one checkpoint, as files for deployment, as ``write_policy`` does.

    ``output`` is a directory; None for ``export`` in the run directory.
    """
    _check_formats(formats)
    trained = trained_policy.load_trained(source)
    config, task, content = trained.config, trained.config.task.card(source), checkpoint.load(trained.checkpoint)
    origin = {"name": trained.checkpoint.name} | {name: content[name] for name in ("iteration", "total_steps")}
    about = {"algorithm": config.algo.name, "policy": config.policy.kind, "task": task, "checkpoint": origin}
    if output is None:
        directory = source if source.is_dir() else source.parent
        output = (directory.parent if directory.name == "checkpoints" else directory) / "export"
    with contextlib.closing(trained.make_env(NUM_ENVS)) as env:
        return write_policy(trained.policy, env, output, formats, about={**about, "control": control(env)})


def write_policy(
    policy: Policy,
    env: VecEnv,
    directory: Path,
    formats: Sequence[str] = tuple(FILES),
    *,
    about: Mapping[str, Any] | None = None,
) -> Exported:
    """Write any policy as files for deployment; they are tried on the environment before they get their names.

    ``about`` is what the card says besides: plain values. The environment is reset.

    Raises:
        ExportError: when a package is missing, the policy needs privileged observations, or a file acts differently.
    """
    _check_formats(formats)
    policy = copy.deepcopy(policy).cpu().eval().requires_grad_(False)
    batch = record(env, policy)
    model = DeployedPolicy(policy, env.action_space, batch[OBSERVATION][0])
    privileged = [path for path in model.paths if path.split(".")[0] in PRIVILEGED_GROUPS]
    if privileged:
        raise ExportError(
            f"The actor sees {privileged}, which a robot cannot measure. Train with policy.actor_groups that leave it "
            "out, or a student (algo.name ppo_roa)."
        )
    with _staging(directory) as staging:
        difference = {name: _write_format(model, batch, name, staging / FILES[name]) for name in formats}
        card = {
            "format": CARD_FORMAT,
            "apexrl": apexrl.__version__,
            **(about or {}),
            **inputs_and_outputs(policy, model.paths, env, batch[0]),
            "use": {name: _USES[name].format(inputs=_arguments(name, model)) for name in formats},
            "verification": {"observations": batch.numel(), "tolerance": TOLERANCE, "largest_difference": difference},
            "files": {
                FILES[name]: {"sha256": hashlib.sha256((staging / FILES[name]).read_bytes()).hexdigest()}
                for name in formats
            },
        }
        (staging / CARD).write_text(as_json(card), encoding="utf-8")
        if (directory / CARD).exists():
            for name in set(FILES.values()) - {FILES[name] for name in formats}:
                (directory / name).unlink(missing_ok=True)  # of an earlier export: the new card does not describe it
        # The card goes last: whoever finds its checksums right has a complete export.
        for name in (*(FILES[name] for name in formats), CARD):
            (staging / name).replace(directory / name)
    return Exported(directory, card)


def _write_format(model: DeployedPolicy, batch: TensorDict, name: str, path: Path) -> float:
    """Write one format and try it; returns the largest difference."""
    num_envs = batch.shape[1]
    inputs = [*_observations(model, batch[0]), *model.policy.initial_memory(num_envs).values()]
    _WRITERS[name](model, inputs, path)
    written = READERS[name](path, model.input_names)
    difference = float(np.max([largest_difference(written, model, batch[:, :width]) for width in (num_envs, 1)]))
    if not difference < TOLERANCE:  # also when it is not a number
        raise ExportError(
            f"{path.name} was not kept: its actions differ from the policy's by {difference:.1e}, which is not below "
            f"{TOLERANCE:.0e}. Please report this with the configuration of the run."
        )
    return difference


def record(env: VecEnv, policy: Policy) -> TensorDict:
    """Let the policy act deterministically; returns the observations, actions and ends, ``[T, N]`` on the CPU."""
    carry = {OBSERVATION: env.reset(seed=0), **initial_state(policy, env)}
    actor = make_actor(policy, env.device, deterministic=True)
    num_steps = NUM_STEPS + min(env.max_episode_steps or 0, MAX_EPISODE)
    batch, _ = rollout(env, actor, carry, num_steps, keep={OBSERVATION, ACTION})
    return batch.cpu()


def largest_difference(exported: Model, model: DeployedPolicy, batch: TensorDict) -> float:
    """Largest ``|a' − a| / max(1, |a|)`` of exported actions a' and recorded ones a, over a batch ``[T, N]``.

    The exported model lives from its own recurrent state, zero where an episode starts.
    """
    states: Sequence[Tensor] = list(model.policy.initial_memory(batch.shape[1]).values())
    differences = []
    for step in batch.unbind(0):
        action, *states = exported([*_observations(model, step), *states])
        ended = step[DONE].squeeze(-1)
        states = [state.masked_fill(ended.view(-1, *[1] * (state.ndim - 1)), 0.0) for state in states]
        wanted = model.clipped(step[ACTION]).double()
        differences.append(((action.double() - wanted).abs() / wanted.abs().clamp_min(1.0)).max())
    return float(torch.stack(differences).max())


def _check_formats(formats: Sequence[str]) -> None:
    for name in formats:
        if name not in FILES:
            raise ConfigError(
                f"--format must name one or more of {','.join(FILES)}, got '{','.join(formats)}'."
                + did_you_mean(name, FILES)
            )
    missing = [package for package in ("onnx", "onnxruntime") if importlib.util.find_spec(package) is None]
    if missing and "onnx" in formats:
        raise ExportError(
            f"ONNX needs {' and '.join(missing)}: pip install 'apexrl[export]', or leave it out: --format torchscript."
        )


@contextlib.contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    """Give a directory inside ``directory`` for unfinished files, and leave nothing of it behind."""
    if directory.exists() and not directory.is_dir():
        raise RunDirError(f"--output {directory} is a file; name a directory.")
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=directory) as name:
            yield Path(name)
    except PermissionError as error:
        raise RunDirError(f"--output {directory} cannot be written: {error.strerror}; name another.") from error
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # not empty: the export is finished
                directory.rmdir()


# The formats. Both go by a trace of one call: policies have no branches that depend on data. PyTorch has newer
# exporters, but TorchScript is what libtorch and robot stacks load, and the newer ONNX exporter needs one more package.


def _write_onnx(model: DeployedPolicy, inputs: Sequence[Tensor], path: Path) -> None:
    """Write an ONNX file."""
    names = model.input_names
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        torch.onnx.export(
            model,
            tuple(inputs),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=names,
            output_names=model.output_names,
            dynamic_axes={name: {0: "batch"} for name in (*names, *model.output_names)},
        )


def _write_torchscript(model: DeployedPolicy, inputs: Sequence[Tensor], path: Path) -> None:
    """Write a TorchScript file."""
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(traced(model, inputs), path)


_WRITERS: dict[str, Callable[[DeployedPolicy, Sequence[Tensor], Path], None]] = {
    "onnx": _write_onnx,
    "torchscript": _write_torchscript,
}
_USES = {
    "onnx": 'onnxruntime.InferenceSession("policy.onnx").run(None, {{{inputs}}})',
    "torchscript": 'torch.jit.load("policy.pt")({inputs})',
}


def _arguments(name: str, model: DeployedPolicy) -> str:
    key = '"{}": ' if name == "onnx" else ""
    return ", ".join(key.format(path) + path.replace(".", "_") for path in model.input_names)


def _observations(model: DeployedPolicy, step: TensorDict) -> list[Tensor]:
    """Return the tensors ``[N, ...]`` of a recorded step that the model takes."""
    found = leaves(step[OBSERVATION])
    return [found[path] for path in model.paths]
