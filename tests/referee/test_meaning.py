"""Meaning: items 16 to 18, the sign, the unit and the damping of a score."""

import re

import pytest
import torch
from torch import nn

import downweight as dw
import oracles
from cases import CASES, Case, classification, oracle_of, task_of


def trained() -> Case:
    """Softmax regression at its optimum, so that removing a row has one true effect."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        made = classification(nn.Linear(3, 3).double(), (3,), 3, rows=30, l2=0.03)
    oracle = made.oracle()
    torch.nn.utils.vector_to_parameters(oracles.newton(oracle.cost_at, oracle.theta), oracle.parameters)
    return made


def test_16_positive_means_that_the_row_helped():
    """Signs that differ between functions of one library, or that no documentation settles.

    Every row is really removed and the model retrained: a clearly positive score goes with a query loss that rises, a
    clearly negative one with a loss that falls, and `top` calls the first kind helpful.
    """
    made = trained()
    oracle = made.oracle()
    scores = dw.influence(made.task(), queries=made.queries, damping=0.0)
    before = oracle.losses_at(oracle.theta, *made.queries)
    actual = torch.stack(
        [
            oracle.losses_at(
                oracles.newton(lambda t, i=i: oracle.downweighted_cost_at(t, [i], 1 / made.rows), oracle.theta),
                *made.queries,
            )
            - before
            for i in range(made.rows)
        ],
        dim=1,
    )
    clear = scores.values.abs() > 0.1 * scores.values.abs().max()
    assert clear.sum() >= 10
    assert (scores.values.sign() == actual.sign())[clear].all()
    for query in range(4):
        row, score = scores.top(query=query, k=1, sign="helpful")[0]
        assert score > 0
        assert actual[query, row] > 0
        row, score = scores.top(query=query, k=1, sign="harmful")[0]
        assert score < 0
        assert actual[query, row] < 0


def test_16_scores_are_in_units_of_the_measurement():
    """Scores in arbitrary units: twice the data, or another normaliser, and nobody can say what 0.3 means.

    The size agrees with retraining, per removed row: nats of loss, to the accuracy of first order (here 20 %).
    """
    made = trained()
    oracle = made.oracle()
    scores = dw.influence(made.task(), queries=made.queries, damping=0.0).values
    before = oracle.losses_at(oracle.theta, *made.queries)
    for row in (0, 11, 29):
        moved = oracles.newton(lambda t, i=row: oracle.downweighted_cost_at(t, [i], 1 / made.rows), oracle.theta)
        actual = oracle.losses_at(moved, *made.queries) - before
        assert (scores[:, row] - actual).norm() < 0.2 * actual.norm()


def test_16_a_result_says_what_it_means():
    """A matrix of numbers without a word on sign, unit and scale.

    `meaning()` names the measurement and removal, and what positive means; it differs between loss and margin.
    """
    made = CASES["mlp_smooth"]()
    loss = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.1).meaning().lower()
    margin = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.1, measurement="margin")
    assert "loss" in loss
    assert "remov" in loss
    assert "positive" in loss
    assert "margin" in margin.meaning().lower()
    assert margin.meaning().lower() != loss


def test_17_a_row_loss_is_averaged_once():
    """A loss that the user averages, the library averages again, and the batch size averages a third time.

    A row's loss is a sum over its positions and outputs, and 1/N comes once: duplicating every row halves the scores,
    and a row of two positions scores like the sum of its parts.
    """
    made = CASES["mlp_smooth"]()
    single = dw.influence(made.task(), queries=made.queries, damping=0.1).values
    twice = Case(
        made.model,
        made.loss,
        (made.train[0].repeat(2, 1), made.train[1].repeat(2)),
        made.queries,
        made.candidates,
        made.settings,
    )
    doubled = dw.influence(twice.task(), queries=made.queries, damping=0.1).values
    torch.testing.assert_close(doubled, single.repeat(1, 2) / 2, rtol=1e-9, atol=1e-15)

    positions = CASES["regression_with_positions"]()
    inputs, targets = positions.queries
    whole = dw.influence(positions.task(), queries=positions.queries, damping=0.1).values
    masks = [torch.zeros(4, 2).double().index_fill_(0, torch.tensor([t]), 1.0) for t in range(4)]
    parts = [
        dw.influence(
            positions.task(),
            queries=(inputs, targets),
            damping=0.1,
            measurement=lambda outputs, targets, mask=mask: 0.5 * (mask * (outputs - targets).square()).sum((1, 2)),
        ).values
        for mask in masks
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-9, atol=1e-14)


def test_17_loss_scale_multiplies_the_loss_and_nothing_else():
    """A mean over tokens instead of a sum changes loss, gradient and curvature, but not damping and l2.

    With loss_scale s everywhere: s^2 grad m . (s G + l2 + damping)^-1 grad L / N.
    """
    made = CASES["mlp_relu"]()
    oracle, scale = oracle_of("mlp_relu"), 0.2
    system = scale * oracle.gauss_newton + (0.03 + 0.1) * torch.eye(len(oracle.theta), dtype=torch.float64)
    solved = torch.linalg.solve(system, oracle.gradients.T)
    truth = scale**2 * oracle.measurement_gradients(made.queries) @ solved / made.rows
    scores = dw.influence(made.task(loss_scale=scale, l2=0.03), queries=made.queries, damping=0.1)
    torch.testing.assert_close(scores.values, truth, rtol=1e-8, atol=1e-14)


def test_18_damping_is_absolute_and_stated():
    """A damping that is secretly relative to the mean eigenvalue, to the batch or to the layer, and stated nowhere.

    l2 and damping are one and the same number in A, in every solver, and the result carries the damping that it used.
    """
    made = CASES["mlp_relu"]()
    for solver in ("cholesky", "dual", dw.CG(rtol=1e-12)):
        damped = dw.influence(made.task(), queries=made.queries, damping=0.13, solver=solver)
        mixed = dw.influence(made.task(l2=0.1), queries=made.queries, damping=0.03, solver=solver)
        torch.testing.assert_close(damped.values, mixed.values, rtol=1e-8, atol=1e-13)
        assert damped.damping == 0.13
        assert mixed.damping == 0.03


def test_18_damping_does_not_depend_on_the_layer():
    """Damping per layer, scaled by each layer's own curvature.

    For a very large absolute damping the score is the product of gradients over that number, for all layers alike.
    """
    made, oracle = CASES["cnn"](), oracle_of("cnn")
    scores = dw.influence(task_of("cnn"), queries=made.queries, damping=1e8).values
    expected = oracle.measurement_gradients(made.queries) @ oracle.gradients.T / made.rows / 1e8
    torch.testing.assert_close(scores, expected, rtol=1e-7, atol=1e-18)


def test_18_a_relative_damping_is_asked_for_by_name_and_printed(capsys):
    """A fraction of the mean eigenvalue that is called damping, or that nobody ever sees as a number.

    The λ is absolute once it is made, printed, and the same for a seed however memory cuts the work.
    """
    for name in ("mlp_smooth", "row_weights"):
        task, truth = task_of(name), oracle_of(name).system("gauss_newton", 0.0).diagonal().mean().item()
        chosen = dw.relative_damping(task, 0.1, probes=4000, seed=3)
        printed = capsys.readouterr().out
        mean, error = (float(word) for word in re.findall(r"eigenvalue (\S+) ± (\S+) of Gauss-Newton", printed)[0])
        assert abs(chosen / 0.1 - truth) < 4 * error < 0.1 * truth
        assert abs(mean - truth) < 4 * error
        assert float(re.findall(r"λ = (\S+):", printed)[0]) == float(f"{chosen:.6g}")
        cut = dw.relative_damping(task, 0.1, probes=4000, seed=3, memory_limit="100 KB")
        assert abs(cut - chosen) <= 1e-12 * chosen
        assert dw.relative_damping(task, 0.2, probes=10, seed=3) != dw.relative_damping(task, 0.2, probes=10, seed=4)
        capsys.readouterr()


@pytest.mark.parametrize("arguments", [{"fraction": 0.0}, {"fraction": -1.0}, {"probes": 1}, {"seed": -1}], ids=str)
def test_18_a_relative_damping_that_is_none(arguments):
    """Nothing is computed for a fraction that gives no damping."""
    with pytest.raises(dw.InvalidInput, match=next(iter(arguments))):
        dw.relative_damping(task_of("mlp_smooth"), **{"fraction": 0.1, **arguments})
