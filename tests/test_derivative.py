"""Influence is the derivative of what really happens when a row is downweighted.

The responses are minimised here by Newton's method on the oracle's own cost, to the last digit. Central differences in
epsilon then differ from the derivative by a multiple of step^2, so halving the step must quarter the error.
"""

import pytest
import torch
from torch import Tensor, nn

import downweight as dw
import oracles
from cases import CASES, Case, oracle_of

# Steps in units of 1/N, large enough that the difference of two optima (each good to about 1e-14) over the step keeps
# eight digits, small enough to be asymptotic: the fitted order shows whether they are.
STEPS = [2.0**-k for k in range(2, 7)]


def fitted_order(steps: list[float], errors: list[float]) -> float:
    """Slope of log error over log step."""
    x, y = torch.tensor(steps).double().log(), torch.tensor(errors).double().log()
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def at_the_optimum(name: str) -> Case:
    """A softmax or least-squares regression whose parameters minimise its cost to a gradient of 1e-14."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Linear(3, 3).double()
        inputs, queries = torch.randn(12, 3).double(), torch.randn(4, 3).double()
        labels, query_labels = torch.randint(3, (12,)), torch.randint(3, (4,))
        soft, query_soft = torch.rand(12, 3).double(), torch.rand(4, 3).double()
        weights = torch.rand(12).double() + 0.5
    settings = {"l2": 0.1, "weights": weights, "loss_scale": 0.8}
    if name == "cross_entropy":
        made = Case(model, name, (inputs, labels), (queries, query_labels), (queries, query_labels), settings)
    else:
        made = Case(model, name, (inputs, soft), (queries, query_soft), (queries, query_soft), settings)
    oracle = made.oracle()
    torch.nn.utils.vector_to_parameters(oracles.newton(oracle.cost_at, oracle.theta), model.parameters())
    return made


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy", "squared_error"])
def test_influence_is_the_derivative_of_retraining(name, curvature):
    """Strongly convex: shift / epsilon and N times the score are the slopes of the actual response, at second order."""
    made = at_the_optimum(name)
    oracle, task, removed = made.oracle(), made.task(), [2, 7]
    shift = dw.parameter_shift(task, remove=[removed], damping=0.0, curvature=curvature, epsilon=1.0)[0]
    scores = dw.influence(task, queries=made.queries, damping=0.0, curvature=curvature, rows=[removed]).values[:, 0]
    losses = lambda theta: oracle.losses_at(theta, *made.queries).detach()  # noqa: E731
    shift_errors, score_errors = [], []
    for step in STEPS:
        ends = [
            oracles.newton(lambda t, e=e: oracle.downweighted_cost_at(t, removed, e), oracle.theta)
            for e in (step / made.rows, -step / made.rows)
        ]
        slope = (ends[0] - ends[1]) / (2 * step / made.rows)
        shift_errors.append((slope - shift).norm().item())
        slope_of_losses = (losses(ends[0]) - losses(ends[1])) / (2 * step)
        score_errors.append((slope_of_losses - scores).norm().item())
    if name == "squared_error":
        # The response is a rational function, 1 / (1 - epsilon h): still second order, no special case.
        assert shift_errors[-1] < 0.02 * shift.norm()
    assert 1.9 < fitted_order(STEPS, shift_errors) < 2.1
    assert 1.9 < fitted_order(STEPS, score_errors) < 2.1


RESPONSES = [
    "mlp_smooth",
    "regression_three_outputs",
    "binary_three_outputs",
    "layer_norm",
    "row_weights",
    "scaled_loss",
]


@pytest.mark.parametrize("name", RESPONSES)
def test_gauss_newton_influence_is_the_derivative_of_the_bregman_response(name):
    """Away from an optimum too: the damping is the proximity, l2 the divergence of the penalty, and
    Gauss-Newton the curvature of the Bregman divergence at theta_s."""
    made, oracle, damping = CASES[name](), oracle_of(name), 0.3 * CASES[name]().settings.get("loss_scale", 1.0)
    shift = dw.parameter_shift(made.task(), remove=[[5]], damping=damping, epsilon=1.0)[0]

    def response(epsilon: float) -> Tensor:
        return oracles.newton(
            lambda t: oracle.bregman_response_cost_at(t, [5], epsilon, damping), oracle.theta, gradient=1e-13
        )

    steps = [step / 4 for step in STEPS]
    errors = []
    for step in steps:
        epsilon = step / made.rows
        errors.append(((response(epsilon) - response(-epsilon)) / (2 * epsilon) - shift).norm().item())
    assert 1.9 < fitted_order(steps, errors) < 2.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_smooth", "binary_three_outputs", "layer_norm"])
def test_hessian_influence_is_the_derivative_of_the_tilted_cost(name):
    """The cost, its slope at theta_s taken away so that theta_s is stationary, plus the proximity of the damping."""
    made, oracle = CASES[name](), oracle_of(name)
    damping = 0.3 + oracle.definite_damping("hessian")
    shift = dw.parameter_shift(made.task(), remove=[[3]], damping=damping, curvature="hessian", epsilon=1.0)[0]

    def response(epsilon: float) -> Tensor:
        def cost(theta: Tensor) -> Tensor:
            away = theta - oracle.theta
            tilted = oracle.downweighted_cost_at(theta, [3], epsilon) - oracle.cost_gradient @ away
            return tilted + 0.5 * damping * away.square().sum()

        return oracles.newton(cost, oracle.theta, gradient=1e-13)

    steps = [step / 4 for step in STEPS]
    errors = []
    for step in steps:
        epsilon = step / made.rows
        errors.append(((response(epsilon) - response(-epsilon)) / (2 * epsilon) - shift).norm().item())
    assert 1.9 < fitted_order(steps, errors) < 2.1


def test_ridge_removal_is_exact_up_to_leverage():
    """For least squares the true removal shift is the influence shift / (1 - h)."""
    made = at_the_optimum("squared_error")
    oracle = made.oracle()
    shift = dw.parameter_shift(made.task(), remove=[[3]], damping=0.0)[0]
    # One leverage for all three outputs, since they share the features: the trace holds it three times.
    leverage = oracle.leverages("gauss_newton", 0.0)[3] / 3
    exact = oracles.newton(lambda t: oracle.downweighted_cost_at(t, [3], 1 / made.rows), oracle.theta) - oracle.theta
    torch.testing.assert_close(exact, shift / (1 - leverage), rtol=1e-10, atol=1e-14)
