"""The demo: what it prints is what it saved, and the numbers of the real one are those that the README shows."""

import pytest

import downweight as dw
from downweight import demo


def test_what_is_printed_is_what_was_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "RECIPE", dw.Recipe(lr=0.1, epochs=2, batch_size=128))
    monkeypatch.setattr(demo, "REMOVALS", 3)
    page = demo.run(tmp_path)
    assert page == tmp_path / "page.html"
    assert "<svg" in page.read_text(encoding="utf-8")
    saved = dw.Decomposition.load(tmp_path / "decomposition")
    said = capsys.readouterr().out
    assert saved.verdict() in said
    for name, gap in saved.gaps.items():
        assert f"{name} " in said
        assert f"{float(gap.mean()):.4g}" in said


@pytest.mark.slow
def test_influence_answers_the_proximal_bregman_question_and_no_other():
    found = demo.result()
    assert all(found.responses["proximal_bregman"].converged)
    correlations = found.correlations().set_index("response").pearson
    assert correlations["proximal_bregman"] > 0.95
    assert max(correlations[["cold_start", "warm_start", "proximal"]].abs()) < 0.3
    means = {name: float(gap.mean()) for name, gap in found.gaps.items()}
    assert means["non_convergence"] > 0.5 * sum(means.values())
    assert means["solver"] < 1e-6 * sum(means.values())
