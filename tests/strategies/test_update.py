"""From gradients to weights: which optimizers are switched to fused kernels, and the paths that only a GPU takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from distributed_training.strategies.base import StepSettings
from distributed_training.strategies.fused import DirectSteps, use_fused
from distributed_training.strategies.update import Update, _to_look_at


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_with_a_fused_kernel_are_switched_and_step_alike(kind: type[torch.optim.Optimizer]) -> None:
    plain, fused = parameters(), parameters()
    one, other = kind(plain, lr=0.1), kind(fused, lr=0.1)  # type: ignore[call-arg]
    if kind is torch.optim.Adagrad:  # its state is made with it, so it counts as having stepped
        other.state.clear()
        other = kind(fused, lr=0.1, fused=True)  # type: ignore[call-arg]
    else:
        assert use_fused(other)
        assert all(group["fused"] and not group["foreach"] for group in other.param_groups)
    for _ in range(3):
        for p in (*plain, *fused):
            p.grad = torch.full_like(p, 0.5)
        one.step()
        other.step()
    for a, b in zip(plain, fused):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "choice", [{"fused": False}, {"foreach": True}, {"capturable": True}, {"differentiable": True}]
)
def test_what_the_user_chose_stays(choice: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW(parameters(), **choice)  # type: ignore[arg-type]
    before = [dict(group) for group in optimizer.param_groups]
    assert not use_fused(optimizer)
    for group, old in zip(optimizer.param_groups, before):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in old.items() if k != "params"}


def test_what_the_user_chose_for_one_group_stays() -> None:
    first, second = parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "foreach": True}, {"params": [second]}])
    assert not use_fused(optimizer)
    assert optimizer.param_groups[0]["foreach"] is True


def test_a_user_who_chose_fused_has_it() -> None:
    assert use_fused(torch.optim.AdamW(parameters(), fused=True))


def test_an_optimizer_that_has_stepped_is_left_alone() -> None:
    own = parameters()
    optimizer = torch.optim.AdamW(own)
    for p in own:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not use_fused(optimizer)
    assert not optimizer.param_groups[0]["fused"]


class MySGD(torch.optim.SGD):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, MySGD])
def test_other_optimizers_are_left_alone(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(parameters(), lr=0.1)  # type: ignore[call-arg]
    assert not use_fused(optimizer)
    assert not optimizer.param_groups[0].get("fused")


def test_complex_parameters_have_no_fused_kernel() -> None:
    assert not use_fused(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1))


DIRECT = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1), "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "betas": (0.5, 0.6)}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "maximize": True, "eps": 1e-3}),
]


@pytest.mark.parametrize(("kind", "options"), DIRECT)
def test_direct_kernel_calls_end_in_the_very_weights_of_the_optimizers_own_step(kind: Any, options: Any) -> None:
    own, reference = parameters(), parameters()
    groups = [{"params": [own[0]], "lr": 0.3}, {"params": [own[1]]}]
    optimizer = kind(groups, **options)
    plain = kind([{"params": [reference[0]], "lr": 0.3}, {"params": [reference[1]]}], **options, fused=True)
    assert use_fused(optimizer)
    update, direct = Update(optimizer, StepSettings(), None), []
    calls = update._direct_step
    update._direct_step = lambda *given: direct.append(calls(*given)) or direct[-1]  # type: ignore
    for step in range(5):
        for a, b in zip(own, reference):
            b.grad = torch.randn_like(b)
            a.grad = b.grad.clone()
        optimizer.param_groups[1]["lr"] = plain.param_groups[1]["lr"] = 0.1 / (step + 1)  # as a schedule does
        update(torch.tensor(1.0))
        plain.step()
        if step == 2:  # a resume replaces state and groups
            optimizer.load_state_dict(optimizer.state_dict())
    assert direct[-3:] == [True] * 3, "the kernel was not called directly"
    for a, b in zip(own, reference):
        assert torch.equal(a, b)
    for a, b in zip(own, reference):
        for key, value in plain.state[b].items():
            assert torch.equal(torch.as_tensor(optimizer.state[a][key]), torch.as_tensor(value)), key


def test_a_step_that_is_not_plain_is_left_to_the_optimizer() -> None:
    own = parameters()
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    use_fused(optimizer)
    direct = DirectSteps(optimizer)
    gradients = [torch.ones_like(p) for p in own]
    assert not direct(gradients)  # no momentum yet
    for p, gradient in zip(own, gradients):
        p.grad = gradient
    optimizer.step()
    assert not direct(gradients[:1])  # a parameter without gradient
    assert not direct([gradients[0].to_sparse(), gradients[1]])
    optimizer.state[own[1]]["momentum_buffer"] = None
    assert not direct(gradients)
    optimizer.state[own[1]]["momentum_buffer"] = torch.zeros(2, 2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert not direct(gradients)
    assert torch.equal(own[0], torch.full((3,), 0.9))


def test_parameters_without_a_gradient_are_passed_by() -> None:
    own = parameters()
    update = Update(torch.optim.SGD(own, lr=0.1), StepSettings(gradient_clip=1.0), None)
    own[0].grad = torch.tensor([3.0, 4.0, 0.0])
    result = update(torch.tensor(1.0))
    assert float(result.norm) == pytest.approx(5.0)  # type: ignore[arg-type]
    assert torch.equal(own[1], torch.ones(2, 2))
    torch.testing.assert_close(own[0].detach(), torch.tensor([0.94, 0.92, 1.0]))


def test_no_gradient_at_all_is_no_error() -> None:
    own = parameters()
    update = Update(torch.optim.SGD(own, lr=0.1), StepSettings(gradient_clip=1.0), None)
    assert not update(torch.tensor(1.0)).skipped
    assert torch.equal(own[0], torch.ones(3))


@pytest.mark.parametrize("large", [1e19, 1e30])
def test_large_but_finite_gradients_are_not_taken_for_infinite(large: float) -> None:
    own = [nn.Parameter(torch.zeros(3))]
    update = Update(torch.optim.SGD(own, lr=1.0), StepSettings(), None)
    own[0].grad = torch.full((3,), large)
    assert not update(torch.tensor(1.0)).skipped
    assert own[0][0].item() == pytest.approx(-large)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [False, True])
def test_the_way_of_a_gpu_skips_by_a_flag_on_the_device(fused: bool, bad: bool) -> None:
    """Driven on the CPU: its fused kernels obey the same flag."""
    own = parameters()
    optimizer = torch.optim.AdamW(own, lr=0.1)
    if fused:
        assert use_fused(optimizer)
    update = Update(optimizer, StepSettings(), None)
    update._on_cpu = False
    for p in own:
        p.grad = torch.full_like(p, float("nan") if bad else 1.0)
    result = update(torch.tensor(1.0))
    assert isinstance(result.skipped, torch.Tensor)
    assert bool(result.skipped) == bad
    assert torch.equal(own[0], torch.ones(3)) == bad
    assert not hasattr(optimizer, "found_inf")
    assert all(p.grad is None for p in own)


@pytest.mark.parametrize("kind", ["sparse", "mixed types"])
def test_gradients_that_one_kernel_cannot_check_are_checked_all_the_same(kind: str) -> None:
    table = torch.nn.Embedding(4, 2, sparse=kind == "sparse")
    other = torch.nn.Parameter(torch.ones(2, dtype=torch.float64 if kind != "sparse" else torch.float32))
    update = Update(torch.optim.SGD([table.weight, other], lr=0.1), StepSettings(), None)
    update._on_cpu = False
    before = table.weight.detach().clone()
    for factor, skipped in ((float("inf"), True), (1.0, False)):
        ((table(torch.tensor([1])) * factor).sum() + other.sum()).backward()
        assert bool(update(torch.tensor(1.0)).skipped) is skipped
        assert torch.equal(table.weight, before) is skipped


@pytest.mark.parametrize("size", [10, 2**22])
@pytest.mark.parametrize("value", [1.0, 3e38, float("nan"), float("inf"), float("-inf")])
def test_what_a_recorded_step_looks_at_is_finite_if_all_gradients_are(size: int, value: float) -> None:
    """Large gradients by the largest number of each, small ones as they are."""
    gradients = [torch.ones(3), torch.ones(size)]
    gradients[1][-1] = value
    looked_at = _to_look_at(gradients)
    assert all(tensor.isfinite().all() for tensor in looked_at) is math.isfinite(value)
