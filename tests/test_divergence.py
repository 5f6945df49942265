"""Bregman divergences and changes of gradients keep their digits where two outputs almost agree: checked by mpmath."""

from typing import Any

import mpmath
import pytest
import torch

from downweight.losses import NAMED, AutogradLoss

DIGITS = 1e-12  # float64 has 16; a few operations in a row, at most


def pair(apart: float, confidence: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = confidence * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return reference + apart * torch.randn(4, 5, generator=generator, dtype=torch.float64), reference


def exactly(value: torch.Tensor) -> list:
    return [mpmath.mpf(float(entry)) for entry in value]


def relative_error(found: torch.Tensor, expected: Any) -> float:
    return abs(float(mpmath.mpf(float(found)) / expected - 1))


@pytest.mark.parametrize("confidence", [1.0, 30.0])
@pytest.mark.parametrize("apart", [1e-12, 1e-6, 1e-3, 0.015, 0.025, 1.0, 30.0, 400.0])
def test_cross_entropy_against_sixty_digits(apart, confidence):
    """Softmax probabilities down to 1e-40, differences down to 1e-12 of a logit."""
    outputs, reference = pair(apart, confidence)
    targets = torch.tensor([0, 1, 2, -100])
    loss = NAMED["cross_entropy"]
    divergence, change = loss.divergence(outputs, reference, targets), loss.change(outputs, reference, targets)
    with mpmath.workdps(60):
        for row in range(3):
            y, s = exactly(outputs[row]), exactly(reference[row])
            total_y, total_s = (mpmath.fsum(mpmath.exp(entry) for entry in each) for each in (y, s))
            p, q = ([mpmath.exp(e) / total for e in each] for each, total in ((s, total_s), (y, total_y)))
            expected = mpmath.log(total_y / total_s) - mpmath.fsum(a * (b - c) for a, b, c in zip(p, y, s, strict=True))
            assert relative_error(divergence[row], expected) < DIGITS
            for k in range(5):
                assert relative_error(change[row, k], q[k] - p[k]) < DIGITS
    assert divergence[3] == 0
    assert not change[3].any()


@pytest.mark.parametrize("apart", [1e-12, 1e-3, 0.02, 1.0, 400.0])
def test_binary_cross_entropy_against_sixty_digits(apart):
    outputs, reference = pair(apart, 5.0)
    loss, targets = NAMED["binary_cross_entropy"], torch.ones(4, 5)
    divergence, change = loss.divergence(outputs, reference, targets), loss.change(outputs, reference, targets)
    with mpmath.workdps(60):
        for row in range(4):
            total = mpmath.mpf(0)
            for k, (y, s) in enumerate(zip(exactly(outputs[row]), exactly(reference[row]), strict=True)):
                p, q = (1 / (1 + mpmath.exp(-each)) for each in (s, y))
                total += mpmath.log1p(mpmath.exp(y)) - mpmath.log1p(mpmath.exp(s)) - p * (y - s)
                assert relative_error(change[row, k], q - p) < DIGITS
            assert relative_error(divergence[row], total) < DIGITS


@pytest.mark.parametrize("name", NAMED)
def test_the_closed_forms_are_those_of_the_definition(name):
    """Against value and gradient of the same loss, far apart where nothing cancels, and against autograd's own."""
    outputs, reference = pair(1.0, 1.0)
    targets = torch.tensor([0, 1, 2, 4]) if name == "cross_entropy" else torch.rand(4, 5, dtype=torch.float64)
    loss = NAMED[name]
    plain = AutogradLoss(loss.value, name)
    for mine, theirs in (
        (loss.divergence(outputs, reference, targets), plain.divergence(outputs, reference, targets)),
        (loss.change(outputs, reference, targets), plain.change(outputs, reference, targets)),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
