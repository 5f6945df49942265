"""The baselines that users compare with, against their formulas written out with the oracle's gradients."""

import copy

import pytest
import torch
from torch import nn

import downweight as dw
from cases import CASES, oracle_of, task_of


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of products, no solve: rounding only."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_grad_dot(name):
    """(1/N) grad m . w grad L, the score with the curvature left out."""
    made, oracle = CASES[name](), oracle_of(name)
    truth = oracle.measurement_gradients(made.queries) @ oracle.gradients.T / made.rows
    scores = dw.grad_dot(task_of(name), made.queries)
    assert_same(scores.values, truth)


@pytest.mark.parametrize("name", ["mlp_smooth", "cnn", "language_model", "own_loss", "regression_three_outputs"])
def test_grad_cos(name):
    """Cosine of the two gradients: neither loss_scale nor N is in it."""
    made, oracle = CASES[name](), oracle_of(name)
    queries, rows = oracle.measurement_gradients(made.queries), oracle.gradients
    truth = nn.functional.normalize(queries, dim=1) @ nn.functional.normalize(rows, dim=1).T
    scores = dw.grad_cos(task_of(name), made.queries)
    assert_same(scores.values, truth)
    assert scores.values.abs().max() <= 1 + 1e-12


def test_grad_cos_of_a_row_without_gradient_is_zero():
    """Not NaN: a row that teaches nothing points nowhere."""
    made = CASES["a_row_without_counted_positions"]()
    scores = dw.grad_cos(task_of("a_row_without_counted_positions"), made.queries)
    assert scores.values.isfinite().all()
    assert (scores.values[:, 2] == 0).all()


@pytest.mark.parametrize("as_states", [False, True])
@pytest.mark.parametrize("name", ["mlp_smooth", "batch_norm", "language_model", "some_parameters", "row_weights"])
def test_tracin(name, as_states):
    """(1/N) sum over checkpoints of the learning rate times the gradients' product there."""
    made, oracle = CASES[name](), oracle_of(name)
    generator = torch.Generator().manual_seed(1)
    shape, rates = oracle.theta.shape, [0.1, 0.03, 0.5]
    flats = [oracle.theta + 0.1 * torch.randn(shape, dtype=torch.float64, generator=generator) for _ in rates]
    truth, checkpoints = torch.zeros(4 if name != "language_model" else 3, made.rows).double(), []
    try:
        for flat, rate in zip(flats, rates, strict=True):
            torch.nn.utils.vector_to_parameters(flat, oracle.parameters)
            there = made.oracle()
            truth += rate * there.measurement_gradients(made.queries) @ there.gradients.T / made.rows
            checkpoints.append(copy.deepcopy(made.model.state_dict()) if as_states else flat)
    finally:
        torch.nn.utils.vector_to_parameters(oracle.theta, oracle.parameters)
    before = copy.deepcopy(made.model.state_dict())
    scores = dw.tracin(task_of(name), made.queries, checkpoints=checkpoints, learning_rates=rates)
    assert_same(scores.values, truth)
    assert all(torch.equal(value, before[key]) for key, value in made.model.state_dict().items())


@pytest.mark.parametrize(
    ("checkpoints", "rates"),
    [
        (lambda theta: [], []),
        (lambda theta: [theta, theta, theta], [0.1, 0.2]),
        (lambda theta: [theta, theta], [0.1, float("nan")]),
        (lambda theta: [theta[:-1]], [0.1]),
        (lambda theta: [theta * float("inf")], [0.1]),
        (lambda theta: [{"layer.weight": torch.ones(3)}], [0.1]),
    ],
    ids=["none", "too many", "nan rate", "short", "infinite", "foreign"],
)
def test_tracin_refuses_what_does_not_fit(checkpoints, rates):
    made, theta = CASES["mlp_smooth"](), oracle_of("mlp_smooth").theta
    with pytest.raises(dw.DownweightError):
        dw.tracin(task_of("mlp_smooth"), made.queries, checkpoints=checkpoints(theta), learning_rates=rates)


@pytest.mark.parametrize("name", ["mlp_smooth", "softmax_regression", "regression_three_outputs", "layer_norm"])
def test_representer_points(name):
    """(1 / (l2 N)) grad m . grad L in the last layer's parameters only."""
    made = CASES[name]()
    task = made.task(l2=0.03)
    last = [module for module in made.model.modules() if isinstance(module, nn.Linear)][-1]
    names = [key for key, p in made.model.named_parameters() if any(p is q for q in last.parameters())]
    oracle = made.oracle()
    oracle.names = names
    truth = oracle.measurement_gradients(made.queries) @ oracle.gradients.T / (0.03 * made.rows)
    scores = dw.representer_points(task, made.queries)
    assert_same(scores.values, truth)


def test_representer_points_need_l2():
    with pytest.raises(dw.DownweightError, match="l2"):
        dw.representer_points(CASES["mlp_relu"]().task(), CASES["mlp_relu"]().queries)


def test_representer_points_need_a_linear_last_layer():
    made = CASES["tied_autoencoder"]()
    with pytest.raises(dw.DownweightError, match="(?i)linear|layer"):
        dw.representer_points(made.task(), made.queries)


def test_large_damping_turns_influence_into_grad_dot():
    """lambda (C + lambda I)^-1 approaches the identity: two independent paths meet."""
    made = CASES["mlp_smooth"]()
    task = made.task()
    damped = 1e9 * dw.influence(task, queries=made.queries, damping=1e9).values
    torch.testing.assert_close(damped, dw.grad_dot(task, made.queries).values, rtol=1e-7, atol=1e-12)


def test_measurements_and_rows_work_for_baselines():
    made, oracle = CASES["mlp_smooth"](), oracle_of("mlp_smooth")
    from oracles import margin

    truth = oracle.measurement_gradients(made.queries, margin) @ oracle.gradients.T / made.rows
    scores = dw.grad_dot(task_of("mlp_smooth"), made.queries, measurement="margin")
    assert_same(scores.values, truth)


def test_representer_points_belong_to_their_task(tmp_path):
    """They rest on the last layer, and are the task's all the same."""
    made = CASES["mlp_smooth"]()
    scores = dw.representer_points(task_of("mlp_smooth"), made.queries)
    scores.save(tmp_path / "answer")
    assert torch.equal(dw.Scores.load(tmp_path / "answer", expect=made.task()).values, scores.values)
    assert scores.coverage.left_out
