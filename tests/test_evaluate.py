"""The linear datamodelling score against plain loops, closed forms and scipy."""

import copy
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

import downweight as dw


def initial(task: dw.Task) -> dict[str, torch.Tensor]:
    assert task.origin is not None
    assert task.origin.state is not None
    return {name: value.clone() for name, value in task.origin.state.items()}


def recipe_of(task: dw.Task) -> dw.Recipe:
    assert task.origin is not None
    return task.origin.recipe


def spearman(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    answer: Any = stats.spearmanr(predicted.numpy(), actual.numpy())
    return float(answer.statistic)


def regression(rows: int = 24, width: int = 3, seed: int = 0) -> tuple[dw.Task, tuple, tuple]:
    torch.manual_seed(seed)
    x, t = torch.randn(rows, width, dtype=torch.float64), torch.randn(rows, 1, dtype=torch.float64)
    asked = torch.randn(5, width, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    model = nn.Linear(width, 1, bias=False).double().eval()
    return dw.Task(model, "squared_error", (x, t), l2=0.05), (x, t), asked


def network(**recipe: Any) -> tuple[dw.Task, tuple, tuple]:
    torch.manual_seed(1)
    x, t = torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 3, (30,))
    asked = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    task = dw.Task(model, "cross_entropy", (x, t), l2=0.01)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 7, "batch_size": 4, "momentum": 0.5} | recipe
    return dw.train(task, dw.Recipe(**settings), progress=False), (x, t), asked


def losses_by_a_plain_loop(task: dw.Task, recipe: dw.Recipe, data: tuple, asked: tuple, subset: list[int]):
    """Retraining on the subset's own rows with torch.optim, as if there were no others."""
    (x, t), rows = data, torch.tensor(subset)
    model = copy.deepcopy(task.model)
    model.load_state_dict(initial(task))
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    for epoch in range(recipe.epochs):
        order = recipe.order(len(subset), epoch, tuple(subset))
        for batch in rows[order].split(recipe.batch_size):
            optimizer.zero_grad()
            penalty = sum(value.square().sum() for value in model.parameters())
            (nn.functional.cross_entropy(model(x[batch]), t[batch]) + task.l2 / 2 * penalty).backward()
            optimizer.step()
    return nn.functional.cross_entropy(model(asked[0]), asked[1], reduction="none").detach()


def test_networks_are_those_of_a_plain_loop_over_the_subset():
    """Batches of the subset's rows alone (11 rows in batches of 4: a ragged last one), a mean over each batch."""
    task, data, asked = network()
    scores = dw.influence(task, asked, damping=0.1)
    found = dw.linear_datamodelling_score(task, scores, asked, subsets=4, size=11, seed=3, bootstrap=5)
    assert found.subsets.shape == (4, 11)
    for place, subset in enumerate(found.subsets.tolist()):
        expected = losses_by_a_plain_loop(task, recipe_of(task), data, asked, subset)
        torch.testing.assert_close(found.actual[:, place], expected, rtol=1e-10, atol=1e-12)


def test_a_quadratic_cost_has_its_closed_form():
    """By L-BFGS, to the minimum of the subset's mean with the whole penalty; scores sum over what is left out."""
    task, (x, t), asked = regression()
    trained = dw.train(task, dw.Recipe(lr=1.0, epochs=60, optimizer="lbfgs"), progress=False)
    scores = dw.influence(trained, asked, damping=0.0)
    found = dw.linear_datamodelling_score(trained, scores, asked, subsets=12, size=0.5, bootstrap=50)
    for place, subset in enumerate(found.subsets.tolist()):
        own = x[subset]
        theta = torch.linalg.solve(
            own.T @ own / len(subset) + 0.05 * torch.eye(3).double(), own.T @ t[subset] / len(subset)
        )
        losses = 0.5 * (asked[0] @ theta - asked[1]).square()[:, 0]
        torch.testing.assert_close(found.actual[:, place], losses, rtol=1e-6, atol=1e-8)  # a line search sees √eps
        others = [row for row in range(len(x)) if row not in subset]
        torch.testing.assert_close(found.predicted[:, place], scores.values[:, others].sum(1))
    each = [spearman(p, a) for p, a in zip(found.predicted, found.actual, strict=True)]
    torch.testing.assert_close(found.per_query, torch.tensor(each, dtype=torch.float64))
    assert found.value == pytest.approx(sum(each) / len(each))
    assert found.value > 0.5  # and the sign is that of influence


def test_weights_of_rows_and_checkpoints_are_kept(tmp_path):
    """A row's weight stays in its subset's mean; a finished run is read again, one of other subsets refused."""
    task, data, asked = network()
    weights = torch.rand(30, dtype=torch.float64) + 0.5
    weighted = dw.Task(copy.deepcopy(task.model), "cross_entropy", data, l2=0.01, weights=weights)
    trained = dw.train(weighted, dw.Recipe(lr=0.3, epochs=2, batch_size=5), progress=False)
    scores = dw.influence(trained, asked, damping=0.1)
    plain = dw.linear_datamodelling_score(trained, scores, asked, subsets=3, bootstrap=5)
    kept = dw.linear_datamodelling_score(trained, scores, asked, subsets=3, bootstrap=5, checkpoint=tmp_path / "run")
    again = dw.linear_datamodelling_score(trained, scores, asked, subsets=3, bootstrap=5, checkpoint=tmp_path / "run")
    assert torch.equal(plain.actual, kept.actual)
    assert torch.equal(kept.actual, again.actual)
    with pytest.raises(dw.ForeignResult, match="subsets"):
        dw.linear_datamodelling_score(trained, scores, asked, subsets=3, seed=1, checkpoint=tmp_path / "run")
    subset = plain.subsets[0]
    model = copy.deepcopy(task.model)
    model.load_state_dict(initial(trained))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        for batch in subset[recipe_of(trained).order(15, epoch, tuple(subset.tolist()))].split(5):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(data[0][batch]), data[1][batch], reduction="none")
            penalty = sum(value.square().sum() for value in model.parameters())
            ((weights[batch] * losses).mean() + 0.005 * penalty).backward()
            optimizer.step()
    expected = nn.functional.cross_entropy(model(asked[0]), asked[1], reduction="none").detach()
    torch.testing.assert_close(plain.actual[:, 0], expected, rtol=1e-10, atol=1e-12)


def test_the_interval_is_that_of_resampled_subsets():
    """Against scipy's ranks of every resample, ties from drawing a subset twice included."""
    task, _, asked = network()
    values = torch.randn(6, 30, dtype=torch.float64).round(decimals=1)
    found = dw.linear_datamodelling_score(task, values, asked, subsets=9, size=5, seed=2, bootstrap=40)
    generator = torch.Generator().manual_seed(2)
    means = []
    for _ in range(40):
        drawn = torch.randint(9, (9,), generator=generator)
        pairs = zip(found.predicted[:, drawn], found.actual[:, drawn], strict=True)
        means.append(torch.tensor([spearman(p, a) for p, a in pairs]).nanmean().double())
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert found.interval == pytest.approx((low, high), abs=1e-6)
    assert found.interval[0] < found.value < found.interval[1]


def test_several_estimators_are_compared_on_the_same_networks():
    task, _, asked = network()
    scores = dw.influence(task, asked, damping=0.1)
    dots = dw.grad_dot(task, asked)
    both = dw.linear_datamodelling_score(task, {"influence": scores, "dot": dots}, asked, subsets=4, bootstrap=5)
    assert list(both) == ["influence", "dot"]
    assert torch.equal(both["influence"].actual, both["dot"].actual)
    alone = dw.linear_datamodelling_score(task, scores, asked, subsets=both["dot"].subsets.tolist(), bootstrap=5)
    assert torch.equal(alone.actual, both["influence"].actual)
    assert alone.value == both["influence"].value
    assert "4 networks" in alone.meaning()


def test_the_margin_is_measured_where_the_scores_are_of_it():
    task, _, asked = network()
    scores = dw.influence(task, asked, damping=0.1, measurement="margin")
    found = dw.linear_datamodelling_score(task, scores, asked, subsets=3, bootstrap=5)
    assert found.measurement == "margin"
    with pytest.raises(dw.InvalidInput, match="scores predict margin"):
        dw.linear_datamodelling_score(task, scores, asked, subsets=3, measurement="loss")


def test_what_does_not_fit_is_refused_before_any_training():
    task, data, asked = network()
    scores = dw.influence(task, asked, damping=0.1)

    def score(scores: Any = scores, task: Any = task, **settings: Any) -> None:
        dw.linear_datamodelling_score(task, scores, asked, **settings)

    other = dw.influence(dw.Task(task.model, "cross_entropy", data), asked, damping=0.1)
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"scores": scores.values[:, :-1]}, r"shape \(6, 29\); expected \(6, 30\)"),
        ({"scores": scores.values * float("nan")}, "no rank"),
        ({"scores": dw.influence(task, asked, damping=0.1, rows=[1, 2])}, "2 rows; expected those of all 30"),
        ({"scores": other}, "belong to another task"),
        ({"scores": {}}, "empty"),
        ({"subsets": 2}, "at least three"),
        ({"size": 30}, "fewer than all"),
        ({"subsets": [[1], [2], [3, 4]]}, "all of one size"),
        ({"subsets": [[1], [2], [30]]}, "30"),
        ({"task": dw.Task(task.model, "cross_entropy", data), "scores": scores.values}, "has none"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(dw.DownweightError, match=message):
            score(**wrong)


def test_a_run_that_diverged_says_so():
    task, _, asked = network()
    wild = task.with_recipe(dw.Recipe(lr=1e200, epochs=3, batch_size=4), initial=initial(task))
    with pytest.raises(dw.DownweightError, match="diverged"):
        dw.linear_datamodelling_score(wild, torch.randn(6, 30), asked, subsets=3)
