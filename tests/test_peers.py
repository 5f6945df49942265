"""Other people's implementations: curvlinops for the products, scikit-learn for what has a closed form."""

import numpy as np
import pytest
import torch
from torch import nn

import downweight as dw
from cases import CASES, Case, oracle_of, task_of

# torch's own compiler frontend, which a dependency of curvlinops still uses when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

# Its operators mean over rows with these losses of PyTorch; those of one output vector a row, so that "mean" over
# elements and over rows differ by a known factor.
LOSS_OF_PEER = {
    "cross_entropy": (nn.CrossEntropyLoss(reduction="sum"), 1.0),
    "squared_error": (nn.MSELoss(reduction="sum"), 0.5),
    "binary_cross_entropy": (nn.BCEWithLogitsLoss(reduction="sum"), 1.0),
}
SHARED = [
    "mlp_smooth",
    "mlp_relu",
    "mlp_without_bias",
    "more_outputs_than_parameters_need",
    "cnn",
    "layer_norm",
    "batch_norm",
    "regression_three_outputs",
    "binary_three_outputs",
    "residual",
    "confident",
]


# Where curvlinops 3.0.1 on torch 2.13 has no Hessian to compare with: the backward pass of SiLU cannot be
# differentiated forward, and its products for a network with LayerNorm are off by 0.2 from double autograd and from
# finite differences.
NO_HESSIAN = ["mlp_smooth", "cnn", "batch_norm", "layer_norm"]


@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, "gauss_newton") for name in SHARED] + [(name, "hessian") for name in SHARED if name not in NO_HESSIAN],
)
def test_products_agree_with_curvlinops(name, curvature):
    """Its sum over the rows in ragged batches, divided by N here, plus l2; vectors of random entries."""
    curvlinops = pytest.importorskip("curvlinops")
    made = CASES[name]()
    loss, factor = LOSS_OF_PEER[made.loss]
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    inputs, targets = made.train
    batches = [(inputs[a : a + 3], targets[a : a + 3]) for a in range(0, made.rows, 3)]
    kind = {"gauss_newton": curvlinops.GGNLinearOperator, "hessian": curvlinops.HessianLinearOperator}[curvature]
    peer = kind(made.model, loss, parameters, batches, check_deterministic=False)
    operator = {"gauss_newton": dw.GaussNewtonMatrix, "hessian": dw.HessianMatrix}[curvature](task_of(name))
    vectors = torch.randn(3, operator.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = factor * (peer @ vectors.T).T / made.rows + made.settings.get("l2", 0.0) * vectors
    torch.testing.assert_close(operator @ vectors, truth.detach(), rtol=1e-10, atol=1e-12)


def test_scores_agree_with_curvlinops_cg():
    """Its conjugate gradients on its Gauss-Newton matrix, ours by factorisation."""
    curvlinops = pytest.importorskip("curvlinops")
    examples = pytest.importorskip("curvlinops.examples")
    made = CASES["mlp_relu"]()
    parameters = list(made.model.parameters())
    loss = nn.CrossEntropyLoss(reduction="mean")
    peer = curvlinops.GGNLinearOperator(made.model, loss, parameters, [made.train], check_deterministic=False)
    size = peer.shape[0]
    damped = peer + 0.1 * examples.IdentityLinearOperator(
        [p.shape for p in parameters], torch.device("cpu"), torch.float64
    )
    inverse = curvlinops.CGInverseLinearOperator(damped, eps=0, tolerance=1e-9, max_iter=10 * size)
    oracle = oracle_of("mlp_relu")
    solved = inverse @ oracle.measurement_gradients(made.queries).T
    truth = solved.T @ oracle.gradients.T / made.rows
    scores = dw.influence(task_of("mlp_relu"), queries=made.queries, damping=0.1)
    torch.testing.assert_close(scores.values, truth, rtol=1e-6, atol=1e-9)


def least_squares(rows: int = 30, width: int = 4, l2: float = 0.07) -> tuple[Case, float]:
    """A linear model without intercept at the ridge optimum of scikit-learn."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    targets = inputs @ torch.arange(1.0, width + 1).double() + torch.randn(
        rows, dtype=torch.float64, generator=generator
    )
    queries = (inputs[:5] + 0.3, targets[:5])
    peer = linear_model.Ridge(alpha=l2 * rows, fit_intercept=False, solver="cholesky").fit(inputs, targets)
    model = nn.Linear(width, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.as_tensor(peer.coef_)[None])
    return Case(model, "squared_error", (inputs, targets), queries, queries, {"l2": l2}), l2


def test_ridge_without_a_row_is_sklearns():
    """The shift over 1 - h is the coefficients that scikit-learn fits without the row, for every row."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    made, l2 = least_squares()
    inputs, targets = made.train
    shift = dw.parameter_shift(made.task(), remove=[[i] for i in range(made.rows)], damping=0.0)
    matrix = inputs.T @ inputs / made.rows + l2 * torch.eye(4).double()
    leverage = (inputs * torch.linalg.solve(matrix, inputs.T).T).sum(1) / made.rows
    for i in range(made.rows):
        kept = [j for j in range(made.rows) if j != i]
        # The normaliser stays 1/N, so the penalty of scikit-learn's sum stays l2 N.
        peer = linear_model.Ridge(alpha=l2 * made.rows, fit_intercept=False, solver="cholesky")
        peer.fit(inputs[kept].numpy(), targets[kept].numpy())
        moved = made.model.weight.detach()[0] + shift[i] / (1 - leverage[i])
        np.testing.assert_allclose(moved.numpy(), peer.coef_, rtol=1e-9, atol=1e-11)


def test_self_influence_gives_sklearns_leave_one_out_errors():
    """Half of RidgeCV's squared leave-one-out residual is the row's loss at the shifted output r / (1 - h), and
    self-influence is h r^2, its first order term."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    made, l2 = least_squares()
    inputs, targets = made.train
    cv = linear_model.RidgeCV(alphas=[l2 * made.rows], fit_intercept=False, store_cv_results=True)
    cv.fit(inputs.numpy(), targets.numpy())
    left_out = torch.as_tensor(cv.cv_results_).reshape(-1).sqrt()
    residual = (made.model(inputs).detach()[:, 0] - targets).abs()
    leverage = 1 - residual / left_out  # r / (1 - h) is the left-out residual
    values = dw.self_influence(made.task(), damping=0.0)
    torch.testing.assert_close(values, leverage * residual.square(), rtol=1e-8, atol=1e-12)


def test_dual_is_kernel_ridge_regression():
    """Predictions of the influence shift of all rows at once, from zero, are those of scikit-learn's KernelRidge."""
    kernel_ridge = pytest.importorskip("sklearn.kernel_ridge")
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(9, 20, dtype=torch.float64, generator=generator)  # more parameters than rows
    targets = torch.randn(9, 1, dtype=torch.float64, generator=generator)
    model = nn.Linear(20, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    task = dw.Task(model, "squared_error", (inputs, targets))
    # One Gauss-Newton step from zero is the ridge solution: theta = -A^-1 (1/N) sum of gradients.
    scores = dw.influence(
        task,
        queries=(inputs, targets),
        damping=0.02,
        solver="dual",
        measurement=lambda outputs, targets: outputs[:, 0],
    )
    peer = kernel_ridge.KernelRidge(alpha=0.02 * 9, kernel="linear").fit(inputs.numpy(), targets.numpy())
    np.testing.assert_allclose(-scores.values.sum(1).numpy(), peer.predict(inputs.numpy())[:, 0], rtol=1e-9)


def test_logistic_regression_stands_still_at_sklearns_optimum():
    """At scikit-learn's optimum the scores of all rows sum to -l2 grad m . H^-1 theta, for softmax too."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    labels = (inputs @ torch.randn(3, 3, dtype=torch.float64, generator=generator)).argmax(1)
    labels[::7] = torch.randint(3, (6,), generator=generator)
    l2 = 0.05
    peer = linear_model.LogisticRegression(
        C=1 / (l2 * 40), fit_intercept=False, tol=1e-10, max_iter=1000, solver="newton-cg"
    )
    peer.fit(inputs.numpy(), labels.numpy())
    model = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.as_tensor(peer.coef_))
    made = Case(model, "cross_entropy", (inputs, labels), (inputs[:4], labels[:4]), (inputs, labels), {"l2": l2})
    oracle = made.oracle()
    assert oracle.cost_gradient.norm() < 1e-6
    scores = dw.influence(made.task(), queries=made.queries, damping=0.0)
    known = -l2 * oracle.measurement_gradients(made.queries) @ torch.linalg.solve(oracle.hessian, oracle.theta)
    torch.testing.assert_close(scores.values.sum(1), known, rtol=1e-4, atol=1e-6)
