"""Machine code that one run leaves for the next."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apexrl.core.system import code_cache
from apexrl.core.system.acceleration import Compiled
from apexrl.core.system.code_cache import Traced, cache_dir, compile_function


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda: sorted((tmp_path / "apexrl" / "compiled").iterdir())


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def tripled(x: Tensor) -> Tensor:
    return 3 * x


@pytest.mark.slow
def test_compiled_code_changes_the_same_memory_as_the_function_and_draws_the_same_numbers(
    entries: Callable[[], list[Path]],
) -> None:
    class Learner:
        def __init__(self) -> None:
            self.flat = torch.arange(6.0)
            self.view = self.flat[2:].view(2, 2)
            self.count = torch.zeros(1, dtype=torch.float64)

        def step(self, batch: dict[str, Tensor], times: int) -> tuple[dict[str, Tensor], int]:
            gradient, loss = torch.func.grad_and_value(lambda flat: (flat.square() * batch["x"]).sum())(self.flat)
            self.flat.sub_(0.1 * gradient)
            self.count.add_(times)
            # Reads through a view what was written to the whole just above.
            return {"loss": loss, "noisy": self.view + torch.randn(2, 2)}, times

    plain, fast = Learner(), Learner()
    batches = [{"x": torch.rand(6)} for _ in range(3)]
    run = compile_function(fast.step, (batches[0], 2))
    assert fast.count.item() == 0.0, "to compile is not to run"
    for batch in batches:
        results: list[Any] = []
        for function in (plain.step, run):
            torch.manual_seed(7)
            results.append(function(batch, 2))
        (expected, expected_times), (found, times) = results
        assert times == expected_times == 2
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fast.flat, plain.flat)
    assert fast.count.item() == 6.0
    assert len(entries()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("entries")
def test_arguments_are_read_where_they_lie_in_memory() -> None:
    def rows(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2.0 + y).sum(0)

    whole = torch.arange(24.0).view(4, 6)
    first, second = whole[:, :3], whole[:, 3:]  # as the minibatches of sequences: neither is dense
    repeated = torch.tensor([1.0, 2.0, 3.0]).expand(4, 3)
    compiled = compile_function(rows, (first, repeated))
    for x in (first, second):
        assert compiled(x, repeated).tolist() == rows(x, repeated).tolist()


@pytest.mark.slow
def test_the_second_run_builds_nothing_and_a_broken_entry_is_built_again(
    entries: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, builds, build = torch.ones(3), [], code_cache._build

    def counted(traced: Traced, directory: Path) -> Path:
        builds.append(traced.key())
        return build(traced, directory)

    monkeypatch.setattr(code_cache, "_build", counted)
    assert compile_function(doubled, (x,))(x).tolist() == [2.0] * 3
    assert compile_function(doubled, (x,))(x).tolist() == [2.0] * 3
    assert len(builds) == 1
    (entry,) = entries()
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert compile_function(doubled, (x,))(x).tolist() == [2.0] * 3
    middle = len(whole) // 2
    entry.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    assert compile_function(doubled, (x,))(x).tolist() == [2.0] * 3
    assert len(builds) == 3
    assert entries() == [entry], "nothing half-written stays"


def test_another_function_shape_type_or_number_of_threads_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4)
    keys = [Traced(doubled, (x,)).key() for _ in range(2)]
    keys += [Traced(function, (y,)).key() for function, y in ((tripled, x), (doubled, x[:3]), (doubled, x.double()))]
    keys.append(Traced(doubled, (torch.ones(8)[::2],)).key())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    keys.append(Traced(doubled, (x,)).key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1


def test_a_directory_that_others_can_write_to_is_not_used(entries: Callable[[], list[Path]]) -> None:
    directory = cache_dir()
    assert directory is not None
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    assert cache_dir() is None


@pytest.mark.slow
def test_without_a_compiler_a_function_runs_as_it_is(entries: Callable[[], list[Path]]) -> None:
    import torch._inductor.config

    compiled = Compiled(tripled, torch.device("cpu"))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.warns(UserWarning, match="Compilation failed, so this runs uncompiled"),
    ):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert entries() == []
