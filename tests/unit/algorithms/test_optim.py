import pytest
import torch
from tests.scripted import flat_gradient
from torch import nn

from apexrl.algorithms.optimizer import FlatAdam


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def flat_step(module: nn.Module, optimizer: FlatAdam, x: torch.Tensor, skip: float = 0.0) -> None:
    gradient = flat_gradient(optimizer, module(x).square().sum())
    optimizer.step(gradient, gradient.norm(), skip=torch.tensor(skip))


def test_equals_torch_adam_with_clipping() -> None:
    ours, theirs = network(), network()
    flat = FlatAdam(ours.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=0.5)
    plain = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    for _ in range(5):
        x = torch.randn(7, 3)
        flat_step(ours, flat, x)
        plain.zero_grad()
        theirs(x).square().sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_skipped_step_changes_neither_parameters_nor_moments() -> None:
    module = network()
    optimizer = FlatAdam(module.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    flat_step(module, optimizer, torch.ones(2, 3))
    before, moments = optimizer.flat.detach().clone(), optimizer.state_dict()["state"]
    flat_step(module, optimizer, torch.full((2, 3), float("nan")), skip=1.0)
    assert torch.equal(optimizer.flat, before)
    for name, value in optimizer.state_dict()["state"].items():
        assert torch.equal(value, moments[name]), name


def test_parameters_are_views_and_loading_a_state_dict_keeps_them_so() -> None:
    module, other = network(0), network(1)
    optimizer = FlatAdam(module.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    module.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.flat, torch.cat([p.flatten() for p in other.parameters()]))


def test_parameters_that_the_loss_does_not_use_get_zero_gradients() -> None:
    module = network()
    optimizer = FlatAdam(module.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1e9)
    gradient = flat_gradient(optimizer, module[0](torch.ones(2, 3)).sum())
    views = optimizer.views(gradient)
    torch.testing.assert_close(views["0.weight"], torch.full((4, 3), 2.0))
    assert torch.equal(views["2.bias"], torch.zeros(2))
    optimizer.step(gradient, gradient.norm(), skip=torch.tensor(0.0))
    assert module[0].weight.grad is not None
    torch.testing.assert_close(module[0].weight.grad, views["0.weight"], msg="grad shows what the step used")


def test_a_first_step_that_is_skipped_leaves_no_trace() -> None:
    ours, theirs = network(), network()
    a = FlatAdam(ours.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    b = FlatAdam(theirs.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    flat_step(ours, a, torch.full((2, 3), float("inf")), skip=1.0)
    flat_step(ours, a, torch.ones(2, 3))
    flat_step(theirs, b, torch.ones(2, 3))
    assert torch.equal(a.flat, b.flat)


def test_state_goes_on_exactly() -> None:
    first, second = network(), network()
    a = FlatAdam(first.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    flat_step(first, a, torch.ones(2, 3))
    a.learning_rate.fill_(3e-3)
    b = FlatAdam(second.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    second.load_state_dict(first.state_dict())
    b.load_state_dict(a.state_dict())
    flat_step(first, a, torch.full((2, 3), 0.5))
    flat_step(second, b, torch.full((2, 3), 0.5))
    assert torch.equal(a.flat, b.flat)


def test_the_learning_rate_tensor_is_what_adam_uses() -> None:
    module = network()
    optimizer = FlatAdam(module.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0)
    optimizer.learning_rate.fill_(0.0)
    before = optimizer.flat.detach().clone()
    flat_step(module, optimizer, torch.ones(2, 3))
    assert torch.equal(optimizer.flat, before)


def test_a_compiled_step_equals_an_eager_one_in_weights_and_state() -> None:
    modules = network(), network()
    eager, compiled = (FlatAdam(m.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0) for m in modules)

    def step(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            compiled.step(gradient, gradient.norm(), torch.zeros(()))

    run = torch.compile(step, dynamic=False)
    for seed in range(4):
        gradient = torch.randn(len(eager.flat), generator=torch.Generator().manual_seed(seed))
        eager.step(gradient, gradient.norm(), torch.zeros(()))
        run(gradient)
    torch.testing.assert_close(compiled.flat, eager.flat)
    for name, value in eager.state.items():
        torch.testing.assert_close(compiled.state[name], value, msg=name)


def test_parameters_that_are_clipped_apart() -> None:
    module = network()
    optimizer = FlatAdam(module.named_parameters(), 1e-2, eps=1e-5, max_grad_norm=1.0, separate_clip_prefix="2.")
    views = optimizer.views(torch.arange(len(optimizer.flat), dtype=torch.float32))
    assert list(views)[-2:] == ["2.weight", "2.bias"]
    gradient = torch.ones(len(optimizer.flat))
    optimizer.step(gradient, gradient.norm(), torch.zeros(()))
    gradients = optimizer.views(optimizer.gradient)
    for part in ("0.", "2."):
        flat = torch.cat([value.flatten() for name, value in gradients.items() if name.startswith(part)])
        assert float(flat.norm()) == pytest.approx(1.0, abs=1e-5)
