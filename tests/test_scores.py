"""What a user does with scores: the strongest rows, tables, the answer's own account of itself, saving and loading."""

import json
import math
from dataclasses import replace

import pytest
import torch

import downweight as dw
from cases import CASES, oracle_of, task_of


@pytest.fixture
def scores() -> dw.Scores:
    made = CASES["mlp_smooth"]()
    return dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.01)


def test_top_lists_the_strongest_rows_first(scores):
    """Loss: helpful is positive (removal raises the loss), harmful is negative; both strongest first."""
    for query in range(4):
        line = scores.values[query]
        for sign, wanted in (("helpful", line), ("harmful", -line)):
            expected = [i for i in wanted.argsort(descending=True).tolist() if wanted[i] > 0]
            top = scores.top(query=query, k=3, sign=sign)
            assert [row for row, _ in top] == expected[:3]
            assert [score for _, score in top] == [line[i].item() for i in expected[:3]]


def test_top_gives_fewer_when_fewer_have_the_sign(scores):
    helpful = scores.top(query=0, k=100, sign="helpful")
    harmful = scores.top(query=0, k=100, sign="harmful")
    assert len(helpful) == (scores.values[0] > 0).sum()
    assert len(harmful) == (scores.values[0] < 0).sum()
    assert len(helpful) + len(harmful) <= 10


def test_margin_turns_helpful_around():
    """A higher margin is better, so the helpful rows are those whose removal lowers it."""
    made = CASES["mlp_smooth"]()
    scores = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.01, measurement="margin")
    top = scores.top(query=1, k=10, sign="helpful")
    assert top
    assert all(score < 0 for _, score in top)
    assert [row for row, _ in top] == [i for i in scores.values[1].argsort().tolist() if scores.values[1, i] < 0]


def test_a_bare_function_has_no_direction_until_it_is_declared():
    made = CASES["mlp_smooth"]()

    def first_output(outputs, targets):
        return outputs[:, 0]

    bare = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.01, measurement=first_output)
    with pytest.raises(dw.DownweightError, match="higher_is_better|direction"):
        bare.top(query=0, k=3, sign="helpful")
    for higher in (True, False):
        named = dw.Measurement("first output", first_output, higher_is_better=higher)
        declared = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.01, measurement=named)
        assert torch.equal(declared.values, bare.values)
        assert all((score < 0) is higher for _, score in declared.top(query=0, k=10, sign="helpful"))


@pytest.mark.parametrize("arguments", [{"query": 4}, {"query": -5}, {"k": -1}])
def test_top_refuses_what_it_cannot_mean(scores, arguments):
    with pytest.raises(dw.DownweightError):
        scores.top(**{"query": 0, "k": 3, "sign": "helpful", **arguments})


def test_rows_are_named_as_the_task_names_them():
    """With rows= the second entry of top is the training row, not the column; with row_ids it is the id."""
    made = CASES["mlp_smooth"]()
    picked = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.01, rows=[7, 2])
    named = picked.top(query=0, k=2, sign="helpful") + picked.top(query=0, k=2, sign="harmful")
    columns = {7: 0, 2: 1}
    assert {row for row, _ in named} == {7, 2}
    assert all(picked.values[0, columns[row]].item() == score for row, score in named)
    ids = [f"image-{i}" for i in range(10)]
    with_ids = dw.influence(made.task(row_ids=ids), queries=made.queries, damping=0.01)
    row, score = with_ids.top(query=0, k=1, sign="helpful")[0]
    assert row in ids
    assert score == with_ids.values[0, ids.index(row)].item()


def test_pandas_holds_every_score(scores):
    """One way or another every (query, row, score) is in the frame."""
    frame = scores.to_pandas()
    numbers = frame.select_dtypes("number")
    if frame.shape[0] == scores.values.numel():  # long
        assert {"query", "row", "score"} <= set(frame.columns)
        for line in frame.itertuples():
            assert line.score == scores.values[line.query, line.row].item()
    else:  # wide
        assert numbers.to_numpy()[:, -10:].shape == (4, 10)
        assert torch.equal(torch.as_tensor(numbers.to_numpy()[:, -10:].copy()), scores.values)


def test_the_answer_says_what_it_is(scores):
    """Damping, curvature, solver, coverage, residuals, notes and a sentence on the meaning."""
    assert scores.damping == 0.01
    assert "gauss" in str(scores.curvature).lower()
    assert any(word in str(scores.solver).lower() for word in ("dual", "cholesky", "cg"))
    assert scores.solved in ("queries", "rows")
    residuals = torch.as_tensor(scores.residuals)
    assert len(residuals) == {"queries": 4, "rows": 10}[scores.solved]
    assert residuals.max() < 1e-10
    assert all(isinstance(note, str) for note in scores.notes)
    assert isinstance(scores.meaning(), str)


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_the_smaller_side_is_solved(solver):
    """s_test: A is symmetric, so the fewer of queries and rows are solved for, and the answer is the same."""
    made, task = CASES["mlp_smooth"](), task_of("mlp_smooth")
    few_rows = dw.influence(task, queries=made.queries, damping=0.01, rows=[1, 5], solver=solver)
    assert few_rows.solved == "rows"
    assert len(torch.as_tensor(few_rows.residuals)) == 2
    few_queries = dw.influence(task, queries=made.queries, damping=0.01, solver=solver)
    assert few_queries.solved == "queries"
    torch.testing.assert_close(few_rows.values, few_queries.values[:, [1, 5]], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("measurement", ["loss", "margin"])
def test_save_and_load_gives_the_same_answer(tmp_path, measurement):
    made, task = CASES["mlp_smooth"](), task_of("mlp_smooth")
    scores = dw.influence(task, queries=made.queries, damping=0.01, measurement=measurement)
    scores.save(tmp_path / "answer")
    loaded = dw.Scores.load(tmp_path / "answer", expect=task)
    assert torch.equal(loaded.values, scores.values)
    assert torch.equal(torch.as_tensor(loaded.residuals), torch.as_tensor(scores.residuals))
    assert (loaded.damping, loaded.solved) == (scores.damping, scores.solved)
    assert loaded.top(query=2, k=4, sign="harmful") == scores.top(query=2, k=4, sign="harmful")
    assert loaded.meaning() == scores.meaning()
    meta = json.loads((tmp_path / "answer" / "meta.json").read_text())
    assert "damping" in json.dumps(meta)
    assert torch.equal(dw.Scores.load(tmp_path / "answer").values, scores.values)


def test_groups_and_ids_survive_the_disk(tmp_path):
    made = CASES["mlp_smooth"]()
    task = made.task(row_ids=[f"r{i}" for i in range(10)])
    for name, choice in (("groups", [[3], [5, 9]]), ("rows", [4, 1])):
        scores = dw.influence(task, queries=made.queries, damping=0.01, rows=choice)
        scores.save(tmp_path / name)
        loaded = dw.Scores.load(tmp_path / name, expect=task)
        assert torch.equal(loaded.values, scores.values)
        assert loaded.top(query=0, k=2, sign="helpful") == scores.top(query=0, k=2, sign="helpful")


def test_an_unfinished_solve_stays_unfinished_on_disk(tmp_path):
    """The convergence flags and the residuals are part of the answer."""
    made = CASES["mlp_relu"]()
    with pytest.warns(dw.DownweightWarning):
        scores = dw.influence(
            task_of("mlp_relu"), queries=made.queries, damping=1e-4, solver=dw.CG(rtol=1e-10, max_steps=2)
        )
    scores.save(tmp_path / "answer")
    loaded = dw.Scores.load(tmp_path / "answer")
    assert not torch.as_tensor(loaded.converged).any()
    assert torch.equal(torch.as_tensor(loaded.residuals), torch.as_tensor(scores.residuals))
    assert loaded.notes == scores.notes


def test_float32_scores_keep_their_dtype_on_disk(tmp_path):
    made = CASES["mlp_smooth"]()
    import copy

    task = dw.Task(copy.deepcopy(made.model).float(), "cross_entropy", (made.train[0].float(), made.train[1]))
    scores = dw.influence(task, queries=(made.queries[0].float(), made.queries[1]), damping=0.01)
    scores.save(tmp_path / "answer")
    loaded = dw.Scores.load(tmp_path / "answer", expect=task)
    assert loaded.values.dtype == scores.values.dtype
    assert torch.equal(loaded.values, scores.values)


def test_measurement_sees_targets_and_outputs_row_by_row():
    """A measurement that is zero for some targets gives zero scores for those queries only."""
    made = CASES["mlp_smooth"]()

    def only_class_one(outputs, targets):
        return outputs[:, 1] * (targets == 1)

    inputs = torch.cat([made.queries[0], made.queries[0]])
    targets = torch.tensor([1, 0, 1, 2, 1, 1, 0, 0])
    scores = dw.influence(task_of("mlp_smooth"), queries=(inputs, targets), damping=0.01, measurement=only_class_one)
    truth = oracle_of("mlp_smooth").scores((inputs, targets), "gauss_newton", 0.01, measurement=only_class_one)
    torch.testing.assert_close(scores.values, truth, rtol=1e-8, atol=1e-14)
    assert (scores.values[targets != 1] == 0).all()


def test_top_leaves_out_what_is_not_a_number(scores):
    """A diverged solver gives NaN, which sorts first and has no sign."""
    values = torch.tensor([[math.nan, 2.0, -1.0, math.inf, 3.0, -math.inf, 0.0]])
    made = replace(scores, values=values, removals=tuple(range(7)))
    assert made.top(k=2) == [(4, 3.0), (1, 2.0)]
    assert made.top(sign="harmful") == [(2, -1.0)]


def test_the_warning_has_the_advice_of_the_solver():
    """A scale that would work, and that a system is singular: in the warning and in the notes, not only in stats."""
    made = CASES["mlp_relu"]()
    with pytest.warns(dw.DownweightWarning, match="worth nothing: diverged at scale 0.001.*a scale of .* would work"):
        scores = dw.influence(task_of("mlp_relu"), queries=made.queries, damping=0.1, solver=dw.LiSSA(scale=1e-3))
    assert any("would work" in note for note in scores.notes)
    assert "would work" in scores.meaning()
    for solver in ("cg", "minres"):
        with pytest.warns(dw.DownweightWarning, match="singular.*raise the damping"):
            scores = dw.influence(task_of("mlp_relu"), queries=made.queries, damping=0.0, solver=solver)
        assert any("singular" in note for note in scores.notes)
        assert (solver == "cg") == (set(scores.results) == {dw.Result.DIVERGED.value})
        assert (scores.residuals > 1e3).all() or solver == "minres"


def test_the_advice_of_every_block_is_kept():
    """A limit cuts the systems into blocks, of which one alone may have something to say."""
    from downweight.influence import join

    parts = [
        dw.Solution(torch.zeros(1, 2), torch.zeros(1), torch.ones(1, dtype=torch.long), (dw.Result.STEPS,), stats)
        for stats in ({"message": "first", "matvecs": 1}, {"matvecs": 2}, {"message": "third", "matvecs": 3})
    ]
    assert join(parts).stats == {"message": "first; third", "matvecs": 6}
