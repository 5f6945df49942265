"""L2-regularised logistic regression at its optimum: the predicted changes against the actual ones, every row.

Both tables have a convex cost, so leave-one-out has one answer, found here by Newton's method to a gradient of 1e-14.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import downweight as dw
from downweight.datasets import uci
from oracles import Logistic

L2 = 0.01
TABLES = ["breast_cancer", "pima_diabetes"]


@dataclass(frozen=True, eq=False)
class Study:
    """Logistic regression at its optimum, four fifths of a table to train on and a fifth to test on."""

    truth: Logistic
    theta: Tensor
    test: tuple[Tensor, Tensor]
    task: dw.Task

    def test_loss(self, theta: Tensor) -> Tensor:
        return self.truth.losses(theta, *self.test).mean()

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        features, targets = self.test
        return features[:, :-1], targets

    @lru_cache  # noqa: B019  the studies live as long as the tests
    def actual(self, epsilon: float) -> Tensor:
        """(N,): change of the mean test loss when row i is downweighted by epsilon and the model retrained."""
        before = self.test_loss(self.theta)
        return torch.stack(
            [self.test_loss(self.truth.without(i, epsilon, self.theta)) - before for i in range(self.truth.rows)]
        )

    @lru_cache  # noqa: B019
    def predicted(self) -> Tensor:
        """(N,): the library's prediction of the same for removal, epsilon = 1/N."""
        return dw.influence(self.task, queries=self.queries, damping=0.0).values.mean(0)


@lru_cache
def study(name: str) -> Study:
    table = {"breast_cancer": uci.breast_cancer, "pima_diabetes": uci.pima_diabetes}[name]()
    features, targets = table.features.double(), table.target.double()
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    fifth = len(order) // 5
    kept, held_out = order[:-fifth], order[-fifth:]
    features = (features - features[kept].mean(0)) / features[kept].std(0)
    features = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    truth = Logistic(features[kept], targets[kept], L2)
    theta = truth.optimum()
    model = nn.Linear(features.shape[1] - 1, 1).double()
    with torch.no_grad():
        model.weight.copy_(theta[None, :-1])
        model.bias.copy_(theta[-1:])
    task = dw.Task(model, loss="binary_cross_entropy", train=(features[kept][:, :-1], targets[kept]), l2=L2)
    return Study(truth, theta, (features[held_out], targets[held_out]), task)


def pearson(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


@pytest.mark.parametrize("name", TABLES)
def test_a_small_downweighting_is_predicted_to_six_digits(name):
    """epsilon = 1e-3/N: correlation above 0.999999, and the size is right too, not only the order."""
    one = study(name)
    actual, predicted = one.actual(1e-3 / one.truth.rows), 1e-3 * one.predicted()
    assert pearson(actual, predicted) > 0.999999
    assert (actual - predicted).norm() < 2e-3 * predicted.norm()


@pytest.mark.parametrize("name", TABLES)
def test_a_whole_removal_is_predicted_to_two_digits(name):
    """epsilon = 1/N on this split: above 0.99. First order has its limit at rows of high leverage (0.42 here), so this
    is a fact about one split: on the breast cancer table others reach a leverage of 0.7 and fall to 0.91."""
    one = study(name)
    assert pearson(one.actual(1 / one.truth.rows), one.predicted()) > 0.99


@pytest.mark.parametrize("name", TABLES)
def test_leverage_correction_improves_removal(name):
    """First order falls short by the removed row's leverage h: shift / (1 - h) is much closer to retraining."""
    one = study(name)
    rows = range(one.truth.rows)
    actual = torch.stack([one.truth.without(i, 1 / one.truth.rows, one.theta) - one.theta for i in rows])
    predicted = dw.parameter_shift(one.task, remove=[[i] for i in rows], damping=0.0)
    corrected = predicted / (1 - one.truth.leverages(one.theta))[:, None]
    # Measured on the oracle: 18.8 % to 2.5 % of the shift on the breast cancer table, 3.1 % to 0.9 % on the other.
    assert (actual - corrected).norm() < 0.35 * (actual - predicted).norm()


@pytest.mark.parametrize("name", TABLES)
def test_leverage_correction_improves_the_correlation(name):
    """Also for the mean test loss, where what is left is second order in the test loss itself."""
    one = study(name)
    actual, predicted = one.actual(1 / one.truth.rows), one.predicted()
    corrected = predicted / (1 - one.truth.leverages(one.theta))
    assert pearson(actual, corrected) > pearson(actual, predicted)


def test_leverage_of_the_breast_cancer_table():
    """What the documentation says about it: the largest leverage on this split is 0.42."""
    one = study("breast_cancer")
    assert one.truth.leverages(one.theta).max().item() == pytest.approx(0.42, abs=0.005)


@pytest.mark.parametrize("name", TABLES)
def test_the_optimum_is_one(name):
    """The oracle's own check: no gradient is left, and scikit-learn stands at the same point."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    one = study(name)
    ones = torch.ones(one.truth.rows, dtype=torch.float64)
    assert one.truth.gradient(one.theta, ones).norm() < 1e-14
    # The constant column is penalised like the others, as `l2` penalises every parameter.
    peer = linear_model.LogisticRegression(C=1 / (L2 * one.truth.rows), fit_intercept=False, tol=1e-12, max_iter=10_000)
    peer.fit(one.truth.features.numpy(), one.truth.targets.numpy())
    np.testing.assert_allclose(peer.coef_[0], one.theta.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", TABLES)
def test_scores_of_all_rows_sum_to_a_known_value(name):
    """At the optimum (1/N) sum of gradients = -l2 theta, so each query's scores sum to -l2 grad m . H^-1 theta."""
    one = study(name)
    scores = dw.influence(one.task, queries=one.queries, damping=0.0).values
    features, targets = one.test
    residual = torch.sigmoid(features @ one.theta) - targets
    hessian = one.truth.hessian(one.theta, torch.ones(one.truth.rows, dtype=torch.float64))
    known = -L2 * residual * (features @ torch.linalg.solve(hessian, one.theta))
    torch.testing.assert_close(scores.sum(1), known, rtol=1e-8, atol=1e-12)
