"""The demo: its numbers are those of a retraining, and its page says them."""

import pytest
import torch
from torch import nn

import downweight as dw
from downweight.datasets.uci import breast_cancer
from downweight.demo import L2, leave_one_out, mean_loss, rows_behind, run, with_ones


@pytest.fixture(scope="module")
def study():
    return leave_one_out(breast_cancer(), seed=2)


def test_actual_changes_are_those_of_an_lbfgs_retraining(study):
    """Newton's all-rows-at-once minima agree with torch.optim.LBFGS, one row at a time."""
    inputs, targets = with_ones(study.data.train[0]), study.data.train[1].double()
    asked, answers = with_ones(study.data.test[0]), study.data.test[1].double()

    def loss_without(row: int | None) -> torch.Tensor:
        weights = torch.zeros(1, inputs.shape[1], dtype=torch.float64, requires_grad=True)
        kept = torch.ones(len(targets), dtype=torch.float64)
        if row is not None:
            kept[row] = 0
        optimizer = torch.optim.LBFGS(
            [weights], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            logits = (weights @ inputs.T)[0]
            losses = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            cost = (kept * losses).sum() / len(targets) + L2 / 2 * weights.square().sum()
            cost.backward()
            return cost

        optimizer.step(closure)
        return mean_loss(asked, answers, weights.detach())[0]

    before = loss_without(None)
    for row in (0, int(study.leverage.argmax())):
        change = loss_without(row) - before
        # Two minima, each right to about the gradient's 1e-12 over the curvature's 0.01.
        assert abs(float(change - study.actual[row])) < 1e-9


def test_prediction_is_the_derivative_and_leverage_corrects_it(study):
    numbers = study.summary
    assert numbers["Pearson at 1e-3/N"] > 0.999999
    assert numbers["Pearson at 1/N"] > 0.99  # this split; the table of the demo has all ten
    assert numbers["error, corrected"] < 0.5 * numbers["error, plain"]


def test_rows_behind_a_prediction_have_the_sign_that_they_are_listed_under(study):
    listed = rows_behind(study)
    assert all(entry["score"] > 0 for entry in listed["helpful"])
    assert all(entry["score"] < 0 for entry in listed["harmful"])


@pytest.mark.slow
def test_page_is_self_contained_and_has_both_pictures(tmp_path, capsys):
    page = run(tmp_path).read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://doi.org", "")
    assert "breast_cancer" in capsys.readouterr().out
    assert dw.__version__ in page
