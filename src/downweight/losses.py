r"""Losses in output space: value, gradient, Hessian product and root.

A row's loss L(y, t) is the *sum* over its outputs and positions, never a mean. All algebra here is
float64 and free of cancellation (p - 1 is minus the sum of the other probabilities), whatever the
network's own dtype: a float32 rounding of p - 1 at a confident output is all noise.

With y the outputs of B rows, shape (B, \*out), and v of shape (K, B, \*out):

    gradient(y, t)            dL/dy                          (B, *out)
    product(y, t, v)          H_y v                          (K, B, *out)
    root(y, t)                R with R^T R = H_y per row     (r, B, *out)
    divergence(y, s, t)       D(y, s) = L(y) - L(s) - dL(s)/ds . (y - s), the Bregman divergence, (B,)
    change(y, s, t)           dL(y)/dy - dL(s)/ds            (B, *out)

The last two keep their relative precision where y is so near to s that L(y) - L(s) is rounding noise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from downweight.errors import InvalidInput, InvalidType, NonFinite
from downweight.shapes import Float, Int, Shaped

IGNORED = -100  # torch.nn.functional.cross_entropy's ignore_index
_APART_ROWS = 4  # rows on which a function of a user's own is compared with itself, one by one; a guess


@runtime_checkable
class Loss(Protocol):
    """A loss of one's own: the loss of every row, never averaged over rows.

    `value(outputs, targets)` gets outputs (B, C) or (B, T, C) in float64, (B, 1) where the model
    returns (B,), and the targets as they were given; it returns one number a row, shape (B,), that
    depends on that row alone. Its gradient and Hessian in the outputs come from autograd, so it
    must be twice differentiable torch code. Gauss-Newton also needs it convex in the outputs. All
    of this is checked on the rows, and refused where it fails.
    """

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor: ...


@runtime_checkable
class OutputLoss(Protocol):
    """What the rest of the package asks of a loss; see the module's docstring."""

    @property
    def name(self) -> str: ...
    @property
    def convex(self) -> bool:
        """Known to be convex in the outputs, so that roots exist."""
        ...

    def check(self, outputs: Tensor, targets: Tensor, what: str) -> None: ...
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor: ...
    def root(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def root_size(self, output_shape: tuple[int, ...]) -> int: ...
    def divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor: ...
    def change(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor: ...


def _check_same_shape(outputs: Tensor, targets: Tensor, what: str, loss: str) -> None:
    shape = outputs.shape[1:]
    if targets.shape[1:] == shape or (targets.dim() == 1 and shape.numel() == 1):
        return
    raise InvalidInput(
        f"{what}: {loss} needs targets of the shape of the outputs, a row (…{tuple(shape)}), got "
        f"targets of shape {tuple(targets.shape)} for outputs {tuple(outputs.shape)}. "
        "Reshape the targets; nothing is broadcast."
    )


def _finite(targets: Tensor, what: str) -> None:
    if targets.is_floating_point() and not bool(targets.isfinite().all()):
        bad = (~targets.isfinite()).reshape(len(targets), -1).any(1).nonzero().flatten()
        raise NonFinite(
            f"{what}: {len(bad)} rows have a NaN or infinite target (first: row {int(bad[0])} of "
            "this part). Remove or repair them before computing influence."
        )


def _of_logits(outputs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    r"""log Σ p e^d - p . d, and softmax(y) - p, for p = softmax(s) and d = y - s, over the last dimension.

    With c = d - p . d the first is log1p(Σ p (e^c - 1 - c)), for Σ p c = 0, and the second p expm1(c - first). d is
    measured from the likeliest class, where p is near 1: nothing cancels.
    """
    p = reference.softmax(-1)
    moved = outputs - reference
    moved = moved - moved.gather(-1, p.argmax(-1, keepdim=True))
    centred = moved - (p * moved).sum(-1, keepdim=True)
    square = centred * centred
    # e^c - 1 - c by its series where the subtraction would cancel: the first term left out is c^8 / 8!.
    series = square * (1 / 2 + centred / 6 + square * (1 / 24 + centred / 120 + square * (1 / 720 + centred / 5040)))
    beyond = torch.where(centred.abs() < 0.02, series, centred.expm1() - centred)
    near = torch.log1p((p * beyond).sum(-1))
    far = (p.log() + centred).logsumexp(-1)  # where e^c overflows
    divergence = torch.where(centred.amax(-1) < 100, near, far)
    return divergence, p * (centred - divergence.unsqueeze(-1)).expm1()


def check_row_by_row(
    function: Callable[[Tensor, Tensor], Tensor],
    outputs: Shaped[Tensor, "B *out"],
    targets: Shaped[Tensor, "B *rest"],
    name: str,
) -> None:
    """Raise unless a function of a user's own gives one number a row, the same alone as among other rows."""

    def values(rows: Tensor) -> Tensor:
        y, t = outputs[rows], targets[rows.to(targets.device)]
        found = function(y, t)
        if isinstance(found, Tensor) and found.shape == (len(rows),):
            return found
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise InvalidInput(
            f"{name} must return one number a row, shape ({len(rows)},), got {got} for outputs of shape "
            f"{tuple(y.shape)} and targets of shape {tuple(t.shape)}. Sum over every dimension but the first. Outputs "
            "are (B, C) or (B, T, C), (B, 1) where the model returns (B,): compare them with targets of their own "
            "shape, as in outputs.squeeze(-1) - targets."
        )

    count = min(len(outputs), _APART_ROWS)
    spread = torch.linspace(0, len(outputs) - 1, count, device=outputs.device).round().long()
    with torch.no_grad():
        together, alone = values(spread), torch.cat([values(row) for row in spread.split(1)])
    # A loss may work in float32 inside; rows that enter each other's value differ by O(1).
    scale = float(together.nan_to_num(0, 0, 0).abs().max())
    apart = ~torch.isclose(alone, together, rtol=1e-3, atol=1e-5 * scale, equal_nan=True)
    if bool(apart.any()):
        row = int(apart.nonzero()[0])
        raise InvalidInput(
            f"{name} gives a row {alone[row].item():.6g} alone and {together[row].item():.6g} among {count} rows: rows "
            f"enter each other's value. Outputs of shape {tuple(outputs[spread].shape)} and targets of shape "
            f"{tuple(targets[:count].shape)} may broadcast against each other, or something is averaged over rows. "
            "Give the two one shape, and sum over every dimension but the first."
        )


def require_finite(values: Shaped[Tensor, "B *rest"], what: str, rows: Int[Tensor, " B"] | None = None) -> None:
    """Raise NonFinite, naming the row, where an entry of `values` is not finite."""
    finite = values.isfinite().reshape(len(values), -1).all(1)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0])
        row = f"row {place} of this part" if rows is None else f"row {int(rows[place])}"
        raise NonFinite(
            f"{what}: NaN or infinite for {row}. Check that row, the parameters, and any root or logarithm of 0."
        )


def _counted(targets: Tensor) -> Tensor:
    """Positions that are not ignored. As int64: in uint8 the number -100 is class 156."""
    return targets.long() != IGNORED


def _spread(weights: Tensor) -> Tensor:
    """(r, B, M) diagonal roots: row j of B rows holds `weights[:, j]` at output j."""
    return torch.diag_embed(weights).movedim(1, 0)


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(y)_t, summed over positions; targets of -100 count zero."""

    name: str = "cross_entropy"
    convex: bool = True

    def check(self, outputs: Tensor, targets: Tensor, what: str) -> None:
        classes = outputs.shape[-1]
        if classes < 2 or outputs.dim() < 2:
            raise InvalidInput(
                f"{what}: cross_entropy needs outputs (B, C) or (B, T, C) with C >= 2 classes, got "
                f"outputs of shape {tuple(outputs.shape)}. For one logit a row use "
                "loss='binary_cross_entropy'."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise InvalidType(
                f"{what}: cross_entropy needs integer class indices, got targets of dtype "
                f"{targets.dtype}. Convert with targets.long(); for soft labels write a dw.Loss."
            )
        if targets.shape != outputs.shape[:-1]:
            raise InvalidInput(
                f"{what}: cross_entropy needs one class index an output vector, shape "
                f"{tuple(outputs.shape[:-1])}, got targets of shape {tuple(targets.shape)}."
            )
        bad = ((targets < 0) & _counted(targets)) | (targets.long() >= classes)
        if bool(bad.any()):
            row = int(bad.reshape(len(targets), -1).any(1).nonzero()[0])
            raise InvalidInput(
                f"{what}: class {int(targets[bad][0])} (row {row} of this part) is outside the "
                f"model's {classes} classes, 0 to {classes - 1} ({IGNORED} marks a position to "
                "ignore)."
            )

    def _others(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Counted positions, safe indices (…, 1), and outputs with the target at minus infinity."""
        counted = _counted(targets)
        index = torch.where(counted, targets.long(), 0).unsqueeze(-1)
        return counted, index, outputs.scatter(-1, index, -torch.inf)

    def margins(self, outputs: Float[Tensor, "B *T C"], targets: Tensor) -> Tensor:
        """log p_t / (1 - p_t) of every position, 0 where it is ignored."""
        counted, index, others = self._others(outputs, targets)
        margin = outputs.gather(-1, index).squeeze(-1) - others.logsumexp(-1)
        return torch.where(counted, margin, 0.0)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # -log p_t = log(1 + exp(-margin)): relative precision also for a tiny loss.
        losses = torch.where(_counted(targets), -logsigmoid(self.margins(outputs, targets)), 0.0)
        return losses.reshape(len(losses), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counted, index, _ = self._others(outputs, targets)
        others = outputs.softmax(-1).scatter(-1, index, 0.0)
        gradient = others.scatter(-1, index, -others.sum(-1, keepdim=True))
        return gradient * counted.unsqueeze(-1)

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        # H is blind to a shift of v, so v is measured from the likeliest class: no cancellation.
        p = outputs.softmax(-1) * _counted(targets).unsqueeze(-1)
        top = p.argmax(-1, keepdim=True).expand(vectors.shape[:-1] + (1,))
        shifted = vectors - vectors.gather(-1, top)
        return p * (shifted - (p * shifted).sum(-1, keepdim=True))

    def root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""C - 1 rows a position: R = V^T diag(s), s = sqrt(p), V an orthonormal basis of s's
        complement, the Householder reflection that takes e_k to s without its column k.

        With k the likeliest class, R_jj = s_j (1 - s_j^2 / (1 + s_k)), R_ji = -s_j s_i^2 / (1 + s_k)
        and R_jk = -s_j s_k for j, i != k: nothing cancels.
        """
        shape, classes = outputs.shape, outputs.shape[-1]
        p = outputs.softmax(-1).reshape(-1, classes)
        counted = _counted(targets).reshape(-1, 1, 1)
        top = p.argmax(-1)
        s = p.sqrt()
        s_top = s.gather(-1, top[:, None])
        reflected = p / (1 + s_top)
        reflected.scatter_(-1, top[:, None], s_top)
        order = torch.arange(classes - 1, device=p.device).expand(len(p), -1)
        kept = order + (order >= top[:, None])  # every class but the likeliest
        s_kept = s.gather(-1, kept)
        rows = -s_kept[:, :, None] * reflected[:, None, :]
        rows.scatter_add_(2, kept[:, :, None], s_kept[:, :, None])
        rows = rows * counted
        if len(shape) == 2:
            return rows.movedim(1, 0)
        # One block a position: root (t, j) touches the outputs of position t only.
        positions = shape[1:-1].numel()
        blocks = rows.reshape(len(outputs), positions, classes - 1, classes)
        spread = torch.diag_embed(blocks.permute(0, 2, 3, 1), dim1=1, dim2=3)
        return spread.reshape(len(outputs), positions * (classes - 1), *shape[1:]).movedim(1, 0)

    def root_size(self, output_shape: tuple[int, ...]) -> int:
        return torch.Size(output_shape[:-1]).numel() * (output_shape[-1] - 1)

    def divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        divergence = torch.where(_counted(targets), _of_logits(outputs, reference)[0], 0.0)
        return divergence.reshape(len(outputs), -1).sum(1)

    def change(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        return _of_logits(outputs, reference)[1] * _counted(targets).unsqueeze(-1)


@dataclass(frozen=True)
class SquaredError:
    """(1/2) |y - t|^2, summed over outputs."""

    name: str = "squared_error"
    convex: bool = True

    def check(self, outputs: Tensor, targets: Tensor, what: str) -> None:
        _check_same_shape(outputs, targets, what, self.name)
        if targets.is_complex() or targets.dtype == torch.bool:
            raise InvalidType(f"{what}: squared_error needs real targets, got {targets.dtype}.")
        _finite(targets, what)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * self.gradient(outputs, targets).square().reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - targets.to(outputs.dtype).reshape(outputs.shape)

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return vectors

    def root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ones = torch.ones_like(outputs).reshape(len(outputs), -1)
        return _spread(ones).reshape(-1, *outputs.shape)

    def root_size(self, output_shape: tuple[int, ...]) -> int:
        return torch.Size(output_shape).numel()

    def divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - reference).square().reshape(len(outputs), -1).sum(1)

    def change(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        return outputs - reference


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """-t log s(y) - (1 - t) log s(-y) on logits, summed over outputs; t in [0, 1]."""

    name: str = "binary_cross_entropy"
    convex: bool = True

    def check(self, outputs: Tensor, targets: Tensor, what: str) -> None:
        _check_same_shape(outputs, targets, what, self.name)
        _finite(targets, what)
        if bool(((targets < 0) | (targets > 1)).any()):
            raise InvalidInput(
                f"{what}: binary_cross_entropy needs targets in [0, 1], got values from "
                f"{targets.min().item():g} to {targets.max().item():g}. For class indices above 1 "
                "use loss='cross_entropy'."
            )

    def margins(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(2 t - 1) y of every output."""
        return (2 * targets.to(outputs.dtype).reshape(outputs.shape) - 1) * outputs

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        t = targets.to(outputs.dtype).reshape(outputs.shape)
        losses = -t * logsigmoid(outputs) - (1 - t) * logsigmoid(-outputs)
        return losses.reshape(len(losses), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        t = targets.to(outputs.dtype).reshape(outputs.shape)
        return (1 - t) * outputs.sigmoid() - t * (-outputs).sigmoid()

    def _curvature(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return self._curvature(outputs) * vectors

    def root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = self._curvature(outputs).sqrt().reshape(len(outputs), -1)
        return _spread(weights).reshape(-1, *outputs.shape)

    def root_size(self, output_shape: tuple[int, ...]) -> int:
        return torch.Size(output_shape).numel()

    @staticmethod
    def _two_logits(outputs: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(outputs), outputs], -1)

    def divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        divergence, _ = _of_logits(self._two_logits(outputs), self._two_logits(reference))
        return divergence.reshape(len(outputs), -1).sum(1)

    def change(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        return _of_logits(self._two_logits(outputs), self._two_logits(reference))[1][..., 1]


@dataclass(frozen=True)
class AutogradLoss:
    """A user's loss, with its output gradient and Hessian from autograd."""

    function: Callable[[Tensor, Tensor], Tensor]
    name: str
    convex: bool = False  # unknown until `root` or `check_convex` has looked

    def check(self, outputs: Tensor, targets: Tensor, what: str) -> None:
        _finite(targets, what)
        check_row_by_row(self.value, outputs.double(), targets, f"{what}: the loss {self.name}")

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)

    def _total(self, leaf: Tensor, targets: Tensor) -> Tensor:
        values = self.value(leaf, targets)
        require_finite(values, f"The loss {self.name}")
        total = values.sum()
        if not total.requires_grad:
            raise InvalidInput(
                f"The loss {self.name} does not depend on the outputs through autograd (detach, numpy, a comparison?); "
                "write it in torch operations on the outputs."
            )
        return total

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        gradient = torch.autograd.grad(self._total(leaf, targets), leaf)[0]
        require_finite(gradient, f"The derivative of the loss {self.name}")
        return gradient

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        gradient = torch.autograd.grad(self._total(leaf, targets), leaf, create_graph=True)[0]
        if not gradient.requires_grad:  # linear in the outputs
            return torch.zeros_like(vectors)
        products = [
            torch.autograd.grad(gradient, leaf, vector, retain_graph=True, materialize_grads=True)[0]
            for vector in vectors
        ]
        if not products:
            return torch.zeros_like(vectors)
        stacked = torch.stack(products)
        require_finite(stacked.movedim(1, 0), f"The second derivative of the loss {self.name}")
        return stacked

    def hessian(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, "B M M"]:
        rows, size = len(outputs), outputs[0].numel()
        basis = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
        vectors = basis[:, None, :].expand(size, rows, size).reshape(size, *outputs.shape)
        return self.product(outputs, targets, vectors).reshape(size, rows, size).movedim(1, 0)

    def root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        hessian = self.hessian(outputs, targets)
        values, vectors = torch.linalg.eigh(hessian)
        # An eigenvalue of a convex loss may come out at minus rounding: of float64 on its own row's scale; where the
        # loss works in float32 (every entry is one) on that of p - 1 and the like, of which the largest row tells.
        if torch.equal(hessian, hessian.float().double()):
            floor = -1e-6 * values.abs().amax().clamp_min(1e-300)
        else:
            floor = -1e-9 * values.abs().amax(-1, keepdim=True).clamp_min(1e-300)
        if bool((values < floor).any()):
            row = int((values < floor).any(1).nonzero()[0])
            raise InvalidInput(
                f"The loss {self.name} is not convex in the outputs: its output Hessian has the "
                f"eigenvalue {values[row].min().item():.3g} (row {row} of this part). The "
                "Gauss-Newton matrix would not be positive semidefinite; use "
                "curvature='hessian', or a convex loss."
            )
        roots = values.clamp_min(0).sqrt()[:, :, None] * vectors.mT
        return roots.movedim(1, 0).reshape(-1, *outputs.shape)

    def root_size(self, output_shape: tuple[int, ...]) -> int:
        return torch.Size(output_shape).numel()

    def divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        linear = (self.gradient(reference, targets) * (outputs - reference)).reshape(len(outputs), -1).sum(1)
        return self.value(outputs, targets) - self.value(reference, targets) - linear

    def change(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        return self.gradient(outputs, targets) - self.gradient(reference, targets)


NAMED: dict[str, OutputLoss] = {loss.name: loss for loss in (CrossEntropy(), SquaredError(), BinaryCrossEntropy())}


def as_loss(loss: str | Loss | Callable[[Tensor, Tensor], Tensor]) -> OutputLoss:
    """One of the named losses, or a user's own with its derivatives from autograd."""
    if isinstance(loss, str):
        if loss not in NAMED:
            raise InvalidInput(
                f"loss is {loss!r}; expected one of {', '.join(map(repr, NAMED))}, or a dw.Loss of "
                "your own (an object with value(outputs, targets) -> one loss a row)."
            )
        return NAMED[loss]
    if isinstance(loss, type):
        raise InvalidType(f"loss is the class {loss.__name__}; expected an instance of it, such as {loss.__name__}().")
    if isinstance(loss, torch.nn.Module):
        raise InvalidType(
            f"loss is the module {type(loss).__name__}, which usually averages over rows. Pass a "
            f"name ({', '.join(map(repr, NAMED))}) or a dw.Loss that returns one loss a row."
        )
    if isinstance(loss, CrossEntropy | SquaredError | BinaryCrossEntropy | AutogradLoss):
        return loss
    if isinstance(loss, Loss):
        return AutogradLoss(loss.value, _name(loss))
    if callable(loss):
        return AutogradLoss(loss, _name(loss))
    raise InvalidType(
        f"loss is a {type(loss).__name__}; expected a name ({', '.join(map(repr, NAMED))}) or an "
        "object with value(outputs, targets) -> one loss a row."
    )


def _name(thing: object) -> str:
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def check_convex(loss: OutputLoss, outputs: Shaped[Tensor, "B *out"], targets: Shaped[Tensor, "B *rest"]) -> None:
    """Raise unless the output Hessian of these rows is positive semidefinite."""
    if not loss.convex:
        loss.root(outputs, targets)
