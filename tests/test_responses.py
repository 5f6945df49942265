"""The five responses against independent references: gradients, derivatives in ε, minimisers, closed forms, endings."""

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import downweight as dw
import oracles
from cases import Case, UserLoss, log_cosh, mlp
from downweight import proximal
from downweight.stack import Stack, stack, unstack
from downweight.train import Gradient, Problem
from oracles import LOSSES, Oracle
from unchecked import downweight as unchecked
from untouched import untouched

# gradients of the objectives, at a point that is not θˢ

ROWS = 9
GROUPS = [[2], [0, 5, 7], [4, 8]]


def small(loss: str, **settings: Any) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(21)
        model, inputs = mlp(3, 4, 3).double().eval(), torch.randn(ROWS, 3).double()
        labels, soft = torch.randint(3, (ROWS,)), torch.rand(ROWS, 3).double()
    plain = log_cosh if loss == "own" else None
    used = UserLoss(log_cosh) if loss == "own" else loss
    data = (inputs, labels if loss == "cross_entropy" else soft)
    return Case(model, used, data, data, data, settings, plain)


def quadratic_cost(oracle: Oracle, theta: Tensor, removed: list[int], epsilon: float, damping: float) -> Tensor:
    """The quadratic model of the Bregman objective, from the dense Gauss-Newton matrix (l2 is in it)."""
    moved = theta - oracle.theta
    linear = oracle.gradients[removed].sum(0) @ moved
    return 0.5 * moved @ oracle.gauss_newton @ moved - epsilon * linear + 0.5 * damping * moved @ moved


COSTS: dict[str, Callable[[Oracle, Tensor, list[int], float, float], Tensor]] = {
    "cost": lambda oracle, theta, removed, epsilon, damping: (
        oracle.downweighted_cost_at(theta, removed, epsilon) + 0.5 * damping * (theta - oracle.theta).square().sum()
    ),
    "bregman": lambda oracle, theta, removed, epsilon, damping: oracle.bregman_response_cost_at(
        theta, removed, epsilon, damping
    ),
    "quadratic": quadratic_cost,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "l2": 0.3,
        "loss_scale": 0.4,
        "weights": torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5, 3.0, 0.1, 1.0, 0.7], dtype=torch.float64),
    },
}


def slope_of(cost: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    theta = theta.detach().clone().requires_grad_()
    return torch.autograd.grad(cost(theta), theta)[0]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("loss", [*LOSSES, "own"])
@pytest.mark.parametrize("fidelity", COSTS)
def test_the_gradient_of_every_objective(fidelity, loss, settings):
    """Over all rows in two ways, against autograd of the objective written down; proximal is "cost" with a damping."""
    made = small(loss, **SETTINGS[settings])
    task, oracle, epsilon = made.task(), made.oracle(), 0.07
    moved = 0.3 * torch.randn(3, task.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for damping in (0.0, 0.2):
        for exact in (False, True):
            problem = Problem(task, fidelity, damping, GROUPS, epsilon, exact)
            gradient = Gradient(problem, Stack.of(task))
            leaves = stack(task, 3, moved if problem.relative else task.flat + moved)
            with task.evaluating():
                shared = gradient.batch(leaves, {}, torch.arange(ROWS))
                own = gradient.batch(leaves, {}, torch.stack([torch.randperm(ROWS) for _ in GROUPS]))
                whole = [] if exact else [gradient.whole(leaves, size) for size in (4, ROWS)]
            for place, group in enumerate(GROUPS):
                expected = slope_of(
                    lambda t, g=group, e=damping: COSTS[fidelity](oracle, t, g, epsilon, e), task.flat + moved[place]
                )
                for found in (shared, own, *whole):
                    # Sums of some tens of terms of size one.
                    assert_close(unstack(found)[place], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("fidelity", ["cost", "bregman"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_value_that_lbfgs_minimises(fidelity, loss):
    """Differences of values are those of the objective written down, which may differ by a constant."""
    made = small(loss, **SETTINGS["everything"])
    task, oracle = made.task(), made.oracle()
    gradient = Gradient(Problem(task, fidelity, 0.2, [[0, 5]], 0.07), Stack(task, False))
    values = []
    for seed in (1, 2):
        moved = 0.3 * torch.randn(1, task.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with task.evaluating():
            mine = gradient.value(stack(task, 1, moved if fidelity == "bregman" else task.flat + moved))
        values.append((mine, COSTS[fidelity](oracle, task.flat + moved[0], [0, 5], 0.07, 0.2).detach()))
    (one, plain_one), (two, plain_two) = values
    assert_close(one - two, plain_one - plain_two, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("fidelity", ["bregman", "quadratic"])
def test_the_gradient_vanishes_exactly_at_the_start(fidelity, dtype):
    """ε = 0: bit for bit nothing, or noise of 1e-7 would be taken for a response; also with a ragged batch.

    Layers wide enough that a product of one matrix and a product of several round differently.
    """
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = mlp(40, 33, 10, activation=nn.SiLU).to(dtype).eval()
        inputs, targets = torch.randn(37, 40, dtype=dtype), torch.randint(10, (37,))
    task = dw.Task(model, "cross_entropy", (inputs, targets), l2=0.1, weights=torch.linspace(0, 2, 37))
    passes = Stack.of(task)
    for count in (2, 3):
        gradient = Gradient(Problem(task, fidelity, 0.1, GROUPS[:count], 0.0), passes)
        leaves = stack(task, count, torch.zeros(count, task.size))
        own = torch.stack([torch.randperm(37, generator=torch.Generator().manual_seed(k)) for k in range(count)])
        with task.evaluating():
            found = [gradient.whole(leaves, 10)]
            found += [gradient.batch(leaves, {}, index) for index in (own[0], own, own[:, :5])]
        for each in found:
            assert bool((unstack(each) == 0).all())


def test_epsilon_zero_moves_nothing():
    """Bit for bit, for everything that starts at θˢ and whose fidelity is least there; two-stage by subtraction."""
    base = dw.train(small("cross_entropy", l2=0.1).task(), dw.Recipe(lr=0.3, epochs=3, batch_size=4, momentum=0.9))
    for objective in (
        dw.ProximalBregman(0.1),
        dw.LinearizedProximalBregman(0.1),
        dw.ProximalBregman(0.1, optimizer="recipe"),
        dw.LinearizedProximalBregman(0.1, optimizer="recipe"),
        dw.TwoStage(),
    ):
        for order in ("shared", "independent"):
            found = dw.respond(base, objective, GROUPS, epsilon=0.0, batch_order=order)
            assert not found.shift.any(), objective


# the proximal Bregman response

N = 60


@lru_cache
def network(activation: type[nn.Module] = nn.SiLU, loss: str = "cross_entropy", rows: int = N, **settings) -> Case:
    """A network of 43 parameters, somewhat trained: rows differ in what they have left to say."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = mlp(4, 5, 3, activation=activation).double().eval()
        inputs = torch.randn(rows, 4).double()
        labels = (inputs[:, :3] + 0.5 * torch.randn(rows, 3).double()).argmax(1)
        targets = labels if loss == "cross_entropy" else nn.functional.one_hot(labels, 3).double()
    data = (inputs, targets)
    made = Case(model, loss, data, data, data, settings)
    fitted = dw.train(made.task(), dw.Recipe(optimizer="adam", lr=0.05, epochs=40))
    model.load_state_dict(fitted.state_dict())
    return made


@lru_cache
def dense(**settings: Any) -> Oracle:
    return network(**settings).oracle()


def minimised(oracle: Oracle, removed: list[int], damping: float, epsilon: float = 1 / N) -> Tensor:
    """A minimiser of the objective written down, by scipy's trust region from θˢ, then Newton to the last digit."""
    cost = lambda theta: oracle.bregman_response_cost_at(theta, removed, epsilon, damping)  # noqa: E731

    def value(theta):
        return float(cost(torch.from_numpy(theta)).detach())

    def slope(theta):
        return slope_of(cost, torch.from_numpy(theta)).numpy()

    def bend(theta):
        matrix: Any = torch.autograd.functional.hessian(cost, torch.from_numpy(theta))
        return matrix.numpy()

    found = scipy.optimize.minimize(
        value,
        oracle.theta.numpy(),
        jac=slope,
        hess=bend,
        method="trust-exact",
        options={"initial_trust_radius": 0.02, "max_trust_radius": 0.1, "gtol": 1e-8},
    )
    theta = oracles.newton(cost, torch.from_numpy(found.x), gradient=1e-13)
    assert torch.linalg.eigvalsh(torch.autograd.functional.hessian(cost, theta))[0] > 0
    return theta


def relative_gradient(oracle: Oracle, theta: Tensor, removed: list[int], damping: float, epsilon: float) -> float:
    left = slope_of(lambda t: oracle.bregman_response_cost_at(t, removed, epsilon, damping), theta)
    return float(left.norm() / (epsilon * oracle.gradients[removed].sum(0).norm()))


def hardest(oracle: Oracle, count: int) -> list[int]:
    """The rows of the largest gradients."""
    return oracle.gradients.norm(dim=1).argsort(descending=True)[:count].tolist()


STEPS = [2.0**-k for k in range(2, 7)]  # of 1/N


def fitted_order(errors: list[float]) -> float:
    x, y = torch.tensor(STEPS).double().log(), torch.tensor(errors).double().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "l2"), [(nn.SiLU, 0.0), (nn.Tanh, 0.05)])
def test_influence_is_the_derivative_of_the_response_in_epsilon(activation, l2):
    """Central differences approach A⁻¹ Σ ∇L at second order: halving ε quarters the error, until 1e-9 of the response,
    where the minimisers' own tolerance shows; at ε = 1/64 N the error is still 1e-5 of it or more."""
    made, oracle, damping = network(activation, l2=l2), dense(activation=activation, l2=l2), 0.1
    task, exact = made.task(), dw.GaussNewton(rtol=1e-11)
    worst = hardest(oracle, 2)
    removals = [[worst[0]], [*worst, 3, 11]]
    expected = oracle.shifts(removals, "gauss_newton", damping, epsilon=1.0)
    ends = {
        step: [
            dw.respond(task, dw.ProximalBregman(damping, exact), removals, epsilon=sign * step / N) for sign in (1, -1)
        ]
        for step in STEPS
    }
    for place in range(2):
        slopes = [(up.shift[place] - down.shift[place]) * N / (2 * step) for step, (up, down) in ends.items()]
        errors = [float((slope - expected[place]).norm()) for slope in slopes]
        assert errors[-1] < 1e-2 * float(expected[place].norm())
        assert 1.9 < fitted_order(errors) < 2.1, errors


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("activation", [nn.SiLU, nn.Tanh])
def test_the_response_is_the_minimiser(activation, loss):
    """To a relative gradient of 1e-6, and A's condition of some hundreds at damping 0.1: 1e-5 of the response."""
    made, oracle, damping = network(activation, loss), dense(activation=activation, loss=loss), 0.1
    removals = [[row] for row in hardest(oracle, 3)] + [[0], [10, 20, 30]]
    with untouched(made.model):
        found = dw.respond(made.task(), dw.ProximalBregman(damping), removals)
    assert found.converged.all()
    for place, group in enumerate(removals):
        assert found.result[place].startswith("converged")
        assert found.relative_gradient[place] <= 1e-6
        left = relative_gradient(oracle, oracle.theta + found.shift[place], group, damping, 1 / N)
        # The gradient is a difference of terms 1e6 times as large, which round at 1e-16.
        assert_close(float(found.relative_gradient[place]), left, rtol=1e-4, atol=1e-11)
        expected = minimised(oracle, group, damping) - oracle.theta
        assert (found.shift[place] - expected).norm() < 1e-5 * expected.norm()
        assert_close(found.parameters[place], oracle.theta + found.shift[place], rtol=0, atol=1e-15)


def test_the_response_with_weights_scale_and_penalty():
    weights = torch.linspace(0.2, 2.0, N, dtype=torch.float64)
    settings: dict[str, Any] = {"weights": weights, "loss_scale": 0.6, "l2": 0.03}
    made = replace(network(), settings=settings)
    oracle, removals = made.oracle(), [[40], [3, 50]]
    found = dw.respond(made.task(), dw.ProximalBregman(0.1, dw.GaussNewton(rtol=1e-9)), removals)
    for place, group in enumerate(removals):
        expected = minimised(oracle, group, 0.1) - oracle.theta
        assert (found.shift[place] - expected).norm() < 1e-7 * expected.norm()


def test_the_linearised_response_is_the_damped_solve():
    made, oracle = network(l2=0.02), dense(l2=0.02)
    removals = [[3], [5, 9, 11], list(range(20))]
    for epsilon in (None, -0.3):
        found = dw.respond(made.task(), dw.LinearizedProximalBregman(0.05), removals, epsilon=epsilon)
        expected = oracle.shifts(removals, "gauss_newton", 0.05, epsilon)
        assert_close(found.shift, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
        assert found.converged.all()
        assert (found.relative_gradient < 1e-9).all()


def test_a_mixture_of_sizes_is_the_same_one_by_one():
    """Singles, small groups and 30 % of the rows take different roads through the factors."""
    made = network(nn.Tanh)
    large = list(range(0, N, 3))[:18]
    removals = [[1], large, [4, 9], [2], [7, 8, 50, 51], [12, 30]]
    objective = dw.ProximalBregman(0.3, dw.GaussNewton(rtol=1e-9))
    together = dw.respond(made.task(), objective, removals)
    assert together.converged.all()
    assert together.removals == tuple(map(tuple, removals))
    for place, group in enumerate(removals):
        alone = dw.respond(made.task(), objective, [group])
        assert_close(together.shift[place], alone.shift[0], rtol=1e-6, atol=1e-8)
    expected = minimised(dense(activation=nn.Tanh), large, 0.3) - dense(activation=nn.Tanh).theta
    assert (together.shift[1] - expected).norm() < 1e-7 * expected.norm()


def test_hard_removals_that_are_put_off_end_where_they_do_alone(monkeypatch):
    """Blocks of two, and two evaluations in the first round: most removals are put off, and nothing else changes."""
    made, removals = network(nn.Tanh), [[row] for row in (1, 5, 9, 13, 20)]
    objective = dw.ProximalBregman(0.05, dw.GaussNewton(rtol=1e-9))
    expected = dw.respond(made.task(), objective, removals)
    monkeypatch.setattr(proximal, "_HURRY", 2)

    def pairs(_: Any, removals: list) -> list[list[int]]:
        return [list(range(len(removals)))[k : k + 2] for k in range(0, len(removals), 2)]

    monkeypatch.setattr(proximal.LeftOut, "blocks", pairs)
    rounds = []
    run = proximal._Work.run

    def counted(self: Any, *settings: Any, hurried: bool) -> Any:
        answer = run(self, *settings, hurried=hurried)
        rounds.append((hurried, len(answer.late)))
        return answer

    monkeypatch.setattr(proximal._Work, "run", counted)
    found = dw.respond(made.task(), objective, removals)
    assert (True, 2) in rounds, "two removals of a block are put off"
    assert rounds[-1][0] is False
    assert found.converged.all()
    assert found.result == expected.result
    assert_close(found.shift, expected.shift, rtol=1e-7, atol=1e-10)


def test_the_response_without_the_kernel_of_the_outputs(monkeypatch):
    """Where N·C does not fit, inner solves are by conjugate gradients, with the same answer."""
    made, removals = network(nn.Tanh), [[1], [4, 9]]
    expected = dw.respond(made.task(), dw.ProximalBregman(0.1), removals)

    def none(*_: Any) -> Any:
        raise dw.MemoryLimit("no room")

    monkeypatch.setattr("downweight.solvers.dual.Dual.init", none)
    found = dw.respond(made.task(), dw.ProximalBregman(0.1), removals)
    assert found.converged.all()
    assert_close(found.shift, expected.shift, rtol=1e-4, atol=1e-5 * float(expected.shift.abs().max()))


def test_a_removal_without_gradient_moves_nothing_and_says_so():
    weights = torch.ones(N, dtype=torch.float64)
    weights[[3, 4]] = 0.0
    task = replace(network(nn.Tanh), settings={"weights": weights}).task()
    task = task.with_recipe(dw.Recipe(lr=0.1, epochs=2, batch_size=16))
    for objective in (dw.ProximalBregman(0.1), dw.LinearizedProximalBregman(0.1), dw.WarmStart()):
        found = dw.respond(task, objective, [[3, 4], [5]])
        if objective.start == "trained" and objective.fidelity != "cost":
            assert not found.shift[0].any()
            assert found.converged[0]
        assert found.shift[1].any()
        assert found.relative_gradient[0] == 0
        assert "no gradient" in found.result[0], objective
        assert "no gradient" not in found.result[1]


# responses on a quadratic problem, in closed form


@lru_cache
def regression() -> tuple[Case, Oracle]:
    """Least squares with three parameters, two outputs a row and a penalty: every objective is a quadratic."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model, inputs = nn.Linear(3, 2, bias=False).double().eval(), torch.randn(8, 3).double()
        targets = torch.randn(8, 2).double()
    made = Case(
        model, "squared_error", (inputs, targets), (inputs, targets), (inputs, targets), {"l2": 0.2, "loss_scale": 0.8}
    )
    return made, made.oracle()


def test_all_responses_on_a_quadratic_problem():
    """With H and b of J and h and a of the removed rows, N kept in both:

    cold = warm = two-stage = (H − εh)⁻¹ (b − εa), with two-stage's drift zero only at the optimum;
    proximal = (H − εh + λI)⁻¹ (b − εa + λθˢ); PBRF = θˢ + (H − εh + λI)⁻¹ εg; linearised = θˢ + (H + λI)⁻¹ εg.
    The eigenvalues of H are 0.5 to 2.3: full-batch descent at 0.6 contracts by 0.7 a step, to 1e-14 after K/2.
    """
    made, oracle = regression()
    task, (inputs, targets) = made.task(), made.train
    damping, epsilon, group = 0.3, 1 / 8, [2, 5]
    recipe = dw.Recipe(lr=0.6, epochs=180)
    base = dw.train(task, recipe)
    pair = lambda rows: (inputs[rows].T @ inputs[rows] * 0.8, inputs[rows].T @ targets[rows] * 0.8)  # noqa: E731
    h, a = pair(group)
    total, b = pair(list(range(8)))
    eye = torch.eye(3, dtype=torch.float64)
    curvature, b = total / 8 + 0.2 * eye, b / 8
    start = torch.linalg.solve(curvature, b)  # (3, 2), the transposed weight
    assert_close(base.flat.reshape(2, 3).T, start, rtol=1e-10, atol=1e-12)
    g = h @ start - a
    without = curvature - epsilon * h
    retrained = torch.linalg.solve(without, b - epsilon * a)
    proximal = torch.linalg.solve(without + damping * eye, b - epsilon * a + damping * start)
    bregman = start + torch.linalg.solve(without + damping * eye, epsilon * g)
    linear = start + torch.linalg.solve(curvature + damping * eye, epsilon * g)
    assert_close(proximal, bregman, rtol=1e-12, atol=1e-13)  # at the optimum the two questions are one
    for objective, expected in (
        (dw.ColdStart(), retrained),
        (dw.WarmStart(), retrained),
        (dw.TwoStage(), retrained),
        (dw.Proximal(damping), proximal),
        (dw.ProximalBregman(damping, dw.GaussNewton(rtol=1e-12)), bregman),
        (dw.ProximalBregman(damping), bregman),
        (dw.LinearizedProximalBregman(damping), linear),
    ):
        found = dw.respond(base, objective, [[0], group])
        assert_close(found.parameters[1].reshape(2, 3).T, expected, rtol=1e-6, atol=1e-7)
        assert found.converged.all(), (objective, found.result)
    # By the recipe at a tenth of its rate: 1 − 0.06·0.6 a step, 90 of them, leave 4 % in the flattest direction.
    for kind, expected in ((dw.ProximalBregman, bregman), (dw.LinearizedProximalBregman, linear)):
        found = dw.respond(base, kind(damping, optimizer="recipe"), [[0], group])
        assert_close(
            found.parameters[1].reshape(2, 3).T, expected, rtol=0, atol=0.05 * float((expected - start).norm())
        )
        assert (found.relative_gradient < 0.05).all()
        assert not found.converged.any()
        assert all("not to a minimum" in words for words in found.result)


@pytest.mark.parametrize(
    "objective", [dw.ColdStart(), dw.WarmStart(), dw.Proximal(0.3), dw.ProximalBregman(0.3, "recipe")]
)
def test_responses_by_lbfgs_on_a_quadratic_problem(objective):
    made, oracle = regression()
    base = dw.train(made.task(), dw.Recipe(optimizer="lbfgs", lr=1.0, epochs=40))
    oracle = replace_theta(made, base)
    found = dw.respond(base, objective, [[2, 5]])
    expected = oracles.newton(
        lambda t: COSTS[objective.fidelity](oracle, t, [2, 5], 1 / 8, objective.damping), base.flat, gradient=1e-13
    )
    if objective.name == "proximal_bregman":  # at lr/10 L-BFGS still takes 20 iterations of a line search
        assert_close(found.parameters[0], expected, rtol=1e-4, atol=1e-5)
    else:
        assert_close(found.parameters[0], expected, rtol=1e-7, atol=1e-8)


def replace_theta(made: Case, task: dw.Task) -> Oracle:
    model = copy.deepcopy(made.model)
    model.load_state_dict(task.state_dict())
    return replace(made, model=model).oracle()


def test_two_stage_is_the_difference_of_two_warm_starts():
    """Exactly: the same bits as subtracting the runs; the drift of a run that is not over is in neither."""
    base = dw.train(network(nn.Tanh).task(), dw.Recipe(lr=0.1, epochs=3, batch_size=16, momentum=0.9))
    removals = [[3], [5, 9]]
    for order in ("shared", "independent"):
        found = dw.respond(base, dw.TwoStage(), removals, batch_order=order)
        without = dw.respond(base, dw.WarmStart(), removals, batch_order=order)
        kept = dw.respond(base, dw.WarmStart(), removals, batch_order=order, epsilon=0.0)
        assert torch.equal(found.shift, without.shift - kept.shift)
        assert torch.equal(found.parameters, base.flat + found.shift)
        assert kept.shift.norm() > 3 * found.shift.norm()  # the drift is what a warm start mostly shows


# where there is no minimum to reach, or none to see


def outlier() -> Case:
    """Two layers, N = 40, one target moved by 30: |r| ‖x‖ / N is far above a damping of 0.01."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, inputs = mlp(3, 6, 1).double().eval(), torch.randn(40, 3).double()
        targets = torch.sin(inputs[:, :1]) + 0.1 * torch.randn(40, 1).double()
    targets[4] += 30.0
    data = (inputs, targets)
    return Case(model, "squared_error", data, data, data)


@pytest.mark.slow
@pytest.mark.parametrize("damping", [0.01, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_response_that_leaves_the_basin_says_so(damping):
    task = outlier().task()
    with pytest.warns(dw.DownweightWarning, match="left the basin") as caught:
        found = dw.respond(task, dw.ProximalBregman(damping, dw.GaussNewton(max_steps=64)), [[4], [7]])
    assert len(caught) == 1
    assert not found.converged[0]
    assert "left the basin" in found.result[0]
    assert found.relative_gradient[0] > 0.1
    assert found.shift.isfinite().all()


def test_enough_damping_holds_the_same_row():
    calm, oracle = dw.respond(outlier().task(), dw.ProximalBregman(1.0), [[4], [7]]), outlier().oracle()
    assert calm.converged.all()
    expected = minimised(oracle, [4], 1.0, 1 / 40) - oracle.theta
    assert (calm.shift[0] - expected).norm() < 1e-5 * expected.norm()


def test_too_few_steps_are_no_minimum():
    made = network(nn.Tanh)
    row = hardest(dense(activation=nn.Tanh), 1)
    with pytest.warns(dw.DownweightWarning, match="max_steps"):
        found = dw.respond(made.task(), dw.ProximalBregman(0.1, dw.GaussNewton(rtol=1e-12, max_steps=2)), [row])
    assert not found.converged.any()
    assert found.relative_gradient[0] > 1e-12


def test_piecewise_linear_networks_settle_or_say_that_they_have_not():
    """No gradient need vanish on a kink. What has settled, far more work leaves in place: 2e-3 of the response is twice
    the default criterion, which compares halves of the work done."""
    made = network(nn.ReLU, rows=40)
    oracle, task, inputs = dense(activation=nn.ReLU, rows=40), made.task(), made.train[0]
    removals = [[row] for row in hardest(oracle, 8)] + [[1], [2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)
        found = dw.respond(task, dw.ProximalBregman(0.05), removals)
        far = dw.respond(task, dw.ProximalBregman(0.05, dw.GaussNewton(settle=1e-6, max_steps=2000)), removals)
    start = made.model(inputs).detach()
    for place, group in enumerate(removals):
        words, converged = found.result[place], bool(found.converged[place])
        left = relative_gradient(oracle, oracle.theta + found.shift[place], group, 0.05, 1 / 40)
        assert converged == words.startswith("converged")
        if "gradient" in words:
            assert left <= 1.001e-6
        if not converged:
            continue
        outputs, further = found.outputs(inputs)[place], far.outputs(inputs)[place]
        moved = (further - outputs).norm(dim=1).mean() / (further - start).norm(dim=1).mean()
        assert moved < 2e-3, (group, words, far.result[place])
    assert found.converged.any()


# float32


def as_float32(made: Case) -> Case:
    """The same case at θˢ cast, and its float64 twin at that very θˢ."""
    return replace(
        made,
        model=copy.deepcopy(made.model).float(),
        train=(made.train[0].float(), made.train[1]),
        settings=made.settings,
    )


def back_to_float64(made: Case) -> Case:
    return replace(made, model=copy.deepcopy(made.model).double(), train=(made.train[0].double(), made.train[1]))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Tanh])
def test_float32_agrees_with_float64_above_the_resolution(activation):
    low = as_float32(network(activation))
    high = back_to_float64(low)
    removals = [[row] for row in range(0, N, 5)] + [[1, 2, 3]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)
        found = dw.respond(low.task(), dw.ProximalBregman(0.1), removals)
    exact = dw.respond(high.task(), dw.ProximalBregman(0.1), removals)
    seen = 0
    for place in range(len(removals)):
        error = (found.shift[place].double() - exact.shift[place]).norm() / exact.shift[place].norm()
        if "resolution" in found.result[place]:
            assert not found.converged[place]
            assert error < 0.1
        else:
            assert error < 1e-2
            seen += bool(found.converged[place])
    assert seen > len(removals) // 2


def test_float32_below_the_resolution_is_said_and_is_neither_zero_nor_noise():
    """A loss scaled by 1e-6 moves parameters of size one by 1e-8 and less: float32 cannot hold them there."""
    low = replace(as_float32(network()), settings={"loss_scale": 1e-6})
    high = back_to_float64(low)
    removals = [[row] for row in hardest(dense(), 2)] + [[0], [4, 9]]
    with pytest.warns(dw.DownweightWarning, match="resolution"):
        found = dw.respond(low.task(), dw.ProximalBregman(0.1), removals)
    exact = dw.respond(high.task(), dw.ProximalBregman(0.1), removals)
    for place in range(len(removals)):
        assert "below the resolution" in found.result[place]
        assert not found.converged[place]
        assert found.shift[place].any()
        # So small a step is all linear: what is left is float32's gradient of the row.
        assert (found.shift[place].double() - exact.shift[place]).norm() < 1e-3 * exact.shift[place].norm()
    assert torch.equal(found.parameters, low.task().flat + found.shift)


def confident() -> Case:
    """Margins of 20 nats and more: rows with gradients of 1e-11."""
    made = network()
    model = copy.deepcopy(made.model)
    with torch.no_grad():
        model[2].weight.mul_(2.0)
    return replace(made, model=model)


def first_step(oracle: Oracle, removed: list[int], damping: float) -> Tensor:
    """(A without the removed rows)⁻¹ ε Σ ∇L: the response itself where it is tiny, to as many digits."""
    weights = torch.ones(N, dtype=torch.float64)
    weights[removed] = 0.0
    others = replace(oracle, weights=weights).system("gauss_newton", damping)
    return torch.linalg.solve(others, oracle.gradients[removed].sum(0)) / N


def test_float32_of_a_confident_row():
    """p − 1 of such a row is rounding noise in float32 unless it is a sum of the others."""
    low = as_float32(confident())
    oracle = back_to_float64(low).oracle()
    calm = [[row] for row in oracle.gradients.norm(dim=1).argsort()[:3].tolist()]
    assert oracle.gradients[calm[-1][0]].norm() < 1e-9
    with pytest.warns(dw.DownweightWarning, match="resolution"):
        found = dw.respond(low.task(), dw.ProximalBregman(0.1), calm)
    for place, group in enumerate(calm):
        expected = first_step(oracle, group, 0.1)
        assert "below the resolution" in found.result[place]
        assert (found.shift[place].double() - expected).norm() < 1e-2 * expected.norm()


def test_tiny_responses_in_float64_are_no_failures():
    """Half the rows of an interpolating network: shifts of 1e-12, where θˢ + δ keeps four digits of δ. They are their
    linearisation to 1e-12 of themselves, and must not be 256 steps through rounding noise."""
    made, oracle = confident(), confident().oracle()
    calm = [[row] for row in oracle.gradients.norm(dim=1).argsort()[:3].tolist()]
    found = dw.respond(made.task(), dw.ProximalBregman(0.1), calm)  # a warning would fail the test
    assert found.converged.all()
    for place, group in enumerate(calm):
        expected = first_step(oracle, group, 0.1)
        # The reference's own p − 1 rounds at 1e-16, which is 1e-5 of these gradients.
        assert (found.shift[place] - expected).norm() < 1e-3 * expected.norm()


# the answer


def test_outputs_are_those_of_the_network_at_the_parameters():
    made = network(nn.Tanh)
    base = dw.train(made.task(), dw.Recipe(lr=0.1, epochs=2, batch_size=16))
    queries = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for objective in (dw.ColdStart(), dw.ProximalBregman(0.1), dw.LinearizedProximalBregman(0.1)):
        found = dw.respond(base, objective, [[3], [5, 9]])
        outputs = found.outputs(queries)
        assert outputs.shape == (2, 5, 3)
        for place in range(2):
            assert_close(
                outputs[place], made.oracle().outputs_at(found.parameters[place], queries), rtol=1e-12, atol=1e-13
            )


def test_a_response_comes_back_from_the_disk(tmp_path):
    made = network(nn.Tanh)
    base = dw.train(made.task(), dw.Recipe(lr=0.1, epochs=2, batch_size=16))
    for objective in (dw.WarmStart(), dw.ProximalBregman(0.1)):
        found = dw.respond(base, objective, [[3], [5, 9]], epsilon=0.01)
        path = tmp_path / objective.name
        found.save(path)
        read = dw.Response.load(path, expect=base)
        for name in ("parameters", "shift", "converged", "relative_gradient"):
            assert torch.equal(getattr(read, name), getattr(found, name)), name
        for name in ("result", "removals", "objective", "settings", "epsilon", "batch_order", "seconds", "notes"):
            assert getattr(read, name) == getattr(found, name), name
        assert torch.equal(read.outputs(made.train[0]), found.outputs(made.train[0]))
        alone = dw.Response.load(path)
        assert torch.equal(alone.shift, found.shift)
        with pytest.raises(dw.InvalidInput, match="expect"):
            alone.outputs(made.train[0])
        with pytest.raises(dw.ForeignResult, match="parameters"):
            dw.Response.load(path, expect=made.task())
        meta = path / "meta.json"
        held = json.loads(meta.read_text())
        del held["epsilon"]
        meta.write_text(json.dumps(held))
        with pytest.raises(dw.DamagedResult):
            dw.Response.load(path)


@pytest.mark.parametrize("objective", [dw.ProximalBregman(0.1), dw.LinearizedProximalBregman(0.1)])
def test_the_model_is_left_as_it_was(objective):
    made = network(nn.Tanh)
    model = copy.deepcopy(made.model)
    model.train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    task = replace(made, model=model).task()
    with untouched(model):
        found = dw.respond(task, objective, [[3], [5, 9]])
        found.outputs(made.train[0])
    with untouched(model), pytest.raises(dw.InvalidInput):
        dw.respond(task, objective, [[3], [N]])


def test_a_proximity_of_zero_is_refused_where_nothing_else_holds():
    """Without damping and penalty the flat directions of the outputs are free."""
    made = network(nn.Tanh)
    with pytest.raises(unchecked.DownweightError, match="damping"):
        unchecked.respond(
            unchecked.Task(made.model, "cross_entropy", made.train), unchecked.ProximalBregman(0.0), [[3]]
        )
    assert math.isfinite(
        float(dw.respond(network(nn.Tanh, l2=0.1).task(), dw.ProximalBregman(0.0), [[3]]).shift.norm())
    )
