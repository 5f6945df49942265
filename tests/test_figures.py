"""The two teaching figures: their numbers against closed forms, their pictures for what they show."""

import pytest
import torch

from downweight.paper.decision_boundary import decision_boundary
from downweight.paper.response_paths import INPUTS, REMOVED, START, TARGETS, response_paths
from downweight.report.figures import contour


def test_response_paths_are_those_of_gradient_descent_on_a_quadratic():
    """θ_K = θ* + (I − ηH)ᴷ (θ₀ − θ*) for every ε, also at 1/N, where H is singular and θ* any minimum."""
    found = response_paths(steps=100, points=7)
    x, t = torch.tensor(INPUTS, dtype=torch.float64), torch.tensor(TARGETS, dtype=torch.float64)
    start = torch.tensor(START).double()  # as the network's initial weights were given, in float32

    def descended(epsilon: float, theta: torch.Tensor, steps: int) -> torch.Tensor:
        share = torch.full((4,), 0.25, dtype=torch.float64)
        share[list(REMOVED)] -= epsilon
        hessian, linear = x.T @ (share[:, None] * x), x.T @ (share * t)
        least = torch.linalg.pinv(hessian, rcond=1e-12) @ linear
        shrunk = torch.linalg.matrix_power(torch.eye(2).double() - 0.2 * hessian, steps)
        return least + shrunk @ (theta - least)

    trained = descended(0.0, start, 100)
    torch.testing.assert_close(found.trained, trained, rtol=1e-10, atol=1e-12)
    for epsilon, cold, warm in zip(found.epsilon.tolist(), found.cold, found.warm, strict=True):
        torch.testing.assert_close(cold, descended(epsilon, start, 150), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(warm, descended(epsilon, trained, 50), rtol=1e-10, atol=1e-12)
    assert found.epsilon[0] == 0
    assert found.epsilon[-1] == 0.25


@pytest.mark.slow
def test_cold_and_warm_start_part_where_the_minima_are_a_line():
    found = response_paths()
    assert (found.cold[0] - found.warm[0]).norm() < 1e-2
    assert (found.cold[-1] - found.warm[-1]).norm() > 2
    # Both are minima: the cost has no slope left at either.
    costs = found.costs(0.25, torch.stack([found.cold[-1], found.warm[-1]]))
    assert costs[0] == pytest.approx(float(costs[1]), abs=1e-6)
    picture = found.picture()
    assert picture.startswith("<svg")
    for word in ("cold start", "warm start", "θ⁰", "θˢ"):
        assert word in picture


@pytest.mark.slow
def test_influence_moves_the_boundary_where_the_row_is_and_retraining_everywhere():
    found = decision_boundary()
    trained, others = found.train["trained"], torch.arange(len(found.targets)) != found.removed
    assert trained[found.removed] > 0  # the row is fitted, and no longer is without its weight
    assert found.train["influence"][found.removed] < 0
    assert found.train["retrained"][found.removed] < 0
    assert found.change("retrained")[others].mean() > 3 * found.change("influence")[others].mean()

    def loss(name: str) -> float:
        logits, targets = found.train[name][others], found.targets[others]
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, targets))

    # The nuisance of the paper: retraining goes on fitting the others.
    assert loss("retrained") < 0.7 * loss("trained")
    assert loss("influence") > 0.9 * loss("trained")
    picture = found.picture()
    for word in ("trained", "influence", "retrained"):
        assert word in picture


def test_a_contour_lies_where_the_values_are_at_its_level():
    axis = [0.1 * k for k in range(21)]
    pieces = contour(axis, axis, [[x * x + y * y for x in axis] for y in axis], 1.7)
    assert len(pieces) > 20
    for x, y in (point for piece in pieces for point in piece):
        assert x * x + y * y == pytest.approx(1.7, abs=0.01)
