"""Slow dense float64 references in plain autograd loops; they share no code with the package.

One row goes through the network at a time, every derivative is a `torch.autograd.grad` of one number, every matrix
is explicit. Symbols as in the documentation: C is the curvature of the cost, A = C + damping I, and the score of row
i on query q is (1/N) grad m(q)^T A^-1 w_i grad L(z_i).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, softplus


def cross_entropy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """(B,): minus the log probability of the target, summed over the positions that are not -100."""
    classes = outputs.shape[-1]
    each = cross_entropy(outputs.reshape(-1, classes), targets.reshape(-1), reduction="none", ignore_index=-100)
    return each.reshape(len(outputs), -1).sum(1)


def squared_error_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """(B,): half the squared distance, summed over everything but the row."""
    return 0.5 * (outputs - targets.reshape(outputs.shape)).square().reshape(len(outputs), -1).sum(1)


def binary_cross_entropy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """(B,): -t log s(y) - (1 - t) log(1 - s(y)) on logits, summed over the outputs."""
    targets = targets.reshape(outputs.shape).to(outputs.dtype)
    return (softplus(outputs) - targets * outputs).reshape(len(outputs), -1).sum(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy_loss,
    "squared_error": squared_error_loss,
    "binary_cross_entropy": binary_cross_entropy_loss,
}


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """(B,): log p_t / (1 - p_t), written out with probabilities; summed over the positions that are not -100."""
    values = []
    for y, t in zip(outputs, targets, strict=True):
        y, t = y.reshape(-1, y.shape[-1]), t.reshape(-1)
        probabilities = y.softmax(-1)
        odds = [torch.log(p[k] / (1 - p[k])) for p, k in zip(probabilities, t.tolist(), strict=True) if k != -100]
        values.append(torch.stack(odds).sum())
    return torch.stack(values)


def row_of(inputs, index: int):
    """The batch of one that holds row `index`, of a tensor or of a dict of tensors."""
    if isinstance(inputs, dict):
        return {name: value[index : index + 1] for name, value in inputs.items()}
    return inputs[index : index + 1]


def length_of(inputs) -> int:
    """How many rows the inputs hold."""
    return len(next(iter(inputs.values()))) if isinstance(inputs, dict) else len(inputs)


@dataclass(eq=False)
class Oracle:
    """The dense truth about one case; `case` is a `cases.Case`, read and never changed."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor | dict[str, Tensor]
    targets: Tensor
    l2: float = 0.0
    loss_scale: float = 1.0
    weights: Tensor | None = None
    names: list[str] | None = None
    forward: Callable | None = None

    def __post_init__(self):
        """The model is used in eval mode; only this object's own copy is ever switched."""
        self.model.eval()

    @property
    def rows(self) -> int:
        return length_of(self.inputs)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters in question, in the order of `named_parameters()`, trainable ones only."""
        wanted = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return [p for name, p in wanted if self.names is None or name in self.names]

    @cached_property
    def theta(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @cached_property
    def row_weights(self) -> Tensor:
        return torch.ones(self.rows, dtype=self.theta.dtype) if self.weights is None else self.weights

    def run(self, inputs) -> Tensor:
        """The network's outputs; attention by its plain formula, which has second derivatives."""
        with sdpa_kernel(SDPBackend.MATH):
            if self.forward is not None:
                return self.forward(self.model, inputs)
            return self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)

    def flat_gradient(self, value: Tensor, create_graph: bool = False) -> Tensor:
        pieces = torch.autograd.grad(
            value, self.parameters, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        pieces = [torch.zeros_like(p) if g is None else g for g, p in zip(pieces, self.parameters, strict=True)]
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def row_gradient(self, inputs, targets: Tensor, index: int) -> Tensor:
        """grad L(z) of one row, (d,): loss_scale is in it, the row's weight is not."""
        loss = self.loss(self.run(row_of(inputs, index)), targets[index : index + 1])
        return self.loss_scale * self.flat_gradient(loss.sum())

    def row_gradients(self, inputs, targets: Tensor) -> Tensor:
        return torch.stack([self.row_gradient(inputs, targets, i) for i in range(length_of(inputs))])

    @cached_property
    def gradients(self) -> Tensor:
        """(N, d) gradients of the training rows, each times its weight: what removing the row takes away."""
        return self.row_weights[:, None] * self.row_gradients(self.inputs, self.targets)

    @cached_property
    def cost_gradient(self) -> Tensor:
        """(d,) gradient of J = (1/N) sum_i w_i L_i + (l2/2) |theta|^2."""
        return self.gradients.sum(0) / self.rows + self.l2 * self.theta

    def jacobian(self, index: int) -> Tensor:
        """(positions x outputs, d) derivative of one training row's outputs."""
        outputs = self.run(row_of(self.inputs, index)).reshape(-1)
        return torch.stack([self.flat_gradient(y) for y in outputs])

    def output_hessian(self, index: int) -> Tensor:
        """(positions x outputs) squared: second derivative of one row's loss in its outputs."""
        outputs = self.run(row_of(self.inputs, index)).detach().requires_grad_()
        loss = self.loss(outputs, self.targets[index : index + 1]).sum()
        (first,) = torch.autograd.grad(loss, outputs, create_graph=True)
        if not first.requires_grad:
            return torch.zeros(outputs.numel(), outputs.numel(), dtype=outputs.dtype)
        second = [torch.autograd.grad(g, outputs, retain_graph=True)[0].reshape(-1) for g in first.reshape(-1)]
        return self.loss_scale * torch.stack(second)

    @cached_property
    def gauss_newton(self) -> Tensor:
        """(1/N) sum_i w_i J_i^T H_i J_i + l2 I, without damping."""
        total = self.l2 * torch.eye(len(self.theta), dtype=self.theta.dtype)
        for index in range(self.rows):
            jacobian = self.jacobian(index)
            block = jacobian.T @ self.output_hessian(index) @ jacobian
            total = total + self.row_weights[index] * block / self.rows
        return total

    @cached_property
    def hessian(self) -> Tensor:
        """Second derivative of the cost: one backward pass a parameter, l2 in it, damping not."""
        losses = torch.stack(
            [self.loss(self.run(row_of(self.inputs, i)), self.targets[i : i + 1]).sum() for i in range(self.rows)]
        )
        flat = self.flat_gradient((self.row_weights * losses).sum() * self.loss_scale / self.rows, create_graph=True)
        lines = [self.flat_gradient(g) if g.requires_grad else torch.zeros_like(self.theta) for g in flat]
        return torch.stack(lines).detach() + self.l2 * torch.eye(len(flat), dtype=flat.dtype)

    @cached_property
    def empirical_fisher(self) -> Tensor:
        """(1/N) sum of gradient outer products with the data's labels: what Gauss-Newton is not."""
        return self.gradients.T @ self.gradients / self.rows + self.l2 * torch.eye(len(self.theta)).to(self.theta)

    def curvature(self, kind: str) -> Tensor:
        return {"gauss_newton": lambda: self.gauss_newton, "hessian": lambda: self.hessian}[kind]()

    def system(self, kind: str, damping: float) -> Tensor:
        """A = C + damping I."""
        curvature = self.curvature(kind)
        return curvature + damping * torch.eye(len(curvature), dtype=curvature.dtype)

    def definite_damping(self, kind: str) -> float:
        """A damping at which A is comfortably positive definite: 0.05, or twice the depth of the lowest eigenvalue."""
        return max(0.05, -2.0 * torch.linalg.eigvalsh(self.curvature(kind))[0].item())

    def measurement_gradients(self, queries, measurement: Callable | None = None) -> Tensor:
        """(Q, d) gradients of each query's measurement; None is its loss, with loss_scale."""
        inputs, targets = queries
        if measurement is None:
            return self.row_gradients(inputs, targets)
        lines = []
        for index in range(length_of(inputs)):
            value = measurement(self.run(row_of(inputs, index)), targets[index : index + 1])
            lines.append(self.flat_gradient(value.sum()))
        return torch.stack(lines)

    def scores(self, queries, kind: str, damping: float, *, measurement: Callable | None = None) -> Tensor:
        """(Q, N) predicted changes of each query's measurement when a row is removed."""
        solved = torch.linalg.solve(self.system(kind, damping), self.gradients.T)
        return self.measurement_gradients(queries, measurement) @ solved / self.rows

    def group_scores(self, queries, kind: str, damping: float, groups: list[list[int]]) -> Tensor:
        single = self.scores(queries, kind, damping)
        return torch.stack([single[:, group].sum(1) for group in groups], dim=1)

    def candidate_scores(self, queries, candidates, kind: str, damping: float) -> Tensor:
        """(Q, K): rows outside the training set, as if removed with weight 1/N."""
        lines = self.row_gradients(*candidates)
        return self.measurement_gradients(queries) @ torch.linalg.solve(self.system(kind, damping), lines.T) / self.rows

    def shifts(self, remove: list[list[int]], kind: str, damping: float, epsilon: float | None = None) -> Tensor:
        """(R, d): epsilon A^-1 of the summed gradients of each removal; epsilon None is 1/N."""
        epsilon = 1 / self.rows if epsilon is None else epsilon
        sums = torch.stack([self.gradients[group].sum(0) for group in remove])
        return epsilon * torch.linalg.solve(self.system(kind, damping), sums.T).T

    def self_influence(self, kind: str, damping: float) -> Tensor:
        """(N,): the change of each row's own loss, the diagonal of the scores with the training rows as queries."""
        return self.scores((self.inputs, self.targets), kind, damping).diagonal()

    def leverages(self, kind: str, damping: float) -> Tensor:
        """(N,): trace of (w_i / N) H_i J_i A^-1 J_i^T, the part of its own fit that a row carries."""
        system = self.system(kind, damping)
        values = []
        for index in range(self.rows):
            jacobian = self.jacobian(index)
            hat = self.output_hessian(index) @ jacobian @ torch.linalg.solve(system, jacobian.T)
            values.append(self.row_weights[index] * hat.trace() / self.rows)
        return torch.stack(values)

    # the cost away from theta, for retraining

    def outputs_at(self, theta: Tensor, inputs) -> Tensor:
        """The network's outputs at any flat theta; differentiable in theta."""
        pieces = theta.split([p.numel() for p in self.parameters])
        by_identity = {id(p): piece.view_as(p) for p, piece in zip(self.parameters, pieces, strict=True)}
        # Every slot once: with two names for one module, torch's own `tie_weights` leaves the substitute behind.
        values = {
            f"{path}.{name}" if path else name: by_identity[id(p)]
            for path, module in self.model.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in by_identity
        }
        assert self.forward is None, "a forward of one's own cannot be run at another theta here"
        with sdpa_kernel(SDPBackend.MATH):
            if isinstance(inputs, dict):
                return functional_call(self.model, values, (), inputs, tie_weights=False)
            return functional_call(self.model, values, (inputs,), tie_weights=False)

    def losses_at(self, theta: Tensor, inputs, targets: Tensor) -> Tensor:
        return self.loss_scale * self.loss(self.outputs_at(theta, inputs), targets)

    def cost_at(self, theta: Tensor) -> Tensor:
        losses = self.losses_at(theta, self.inputs, self.targets)
        return (self.row_weights * losses).sum() / self.rows + 0.5 * self.l2 * theta.square().sum()

    def downweighted_cost_at(self, theta: Tensor, removed: list[int], epsilon: float) -> Tensor:
        """Q(theta, epsilon) = J(theta) - epsilon sum of w_i L(z_i) over the removed rows."""
        losses = self.row_weights * self.losses_at(theta, self.inputs, self.targets)
        return self.cost_at(theta) - epsilon * losses[removed].sum()

    def bregman_response_cost_at(self, theta: Tensor, removed: list[int], epsilon: float, damping: float) -> Tensor:
        """Mean Bregman divergence to theta_s in output space, minus epsilon times the removed loss, plus proximity."""
        at_start = self.run(self.inputs).detach().requires_grad_()
        loss = self.loss_scale * self.loss(at_start, self.targets)
        (slope,) = torch.autograd.grad(loss.sum(), at_start)
        outputs = self.outputs_at(theta, self.inputs)
        losses = self.loss_scale * self.loss(outputs, self.targets)
        linear = (slope * (outputs - at_start.detach())).reshape(self.rows, -1).sum(1)
        divergence = (self.row_weights * (losses - loss.detach() - linear)).sum() / self.rows
        distance = 0.5 * (theta - self.theta).square().sum()
        return divergence - epsilon * (self.row_weights * losses)[removed].sum() + (self.l2 + damping) * distance


def newton(cost: Callable[[Tensor], Tensor], start: Tensor, gradient: float = 1e-14, max_steps: int = 50) -> Tensor:
    """The stationary point next to `start`: full Newton steps, then until the gradient cannot get smaller."""
    theta, best = start.clone(), torch.inf
    for _ in range(max_steps):
        here = theta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cost(here), here)
        if slope.norm() <= gradient or (slope.norm() < 1e-12 and slope.norm() >= best):
            return theta
        best = slope.norm()
        theta = theta - torch.linalg.solve(torch.autograd.functional.hessian(cost, theta), slope)
    raise AssertionError(f"Newton's method did not converge: gradient {best:.1e} after {max_steps} steps")


# closed forms


def softmax_fisher(probabilities: Tensor) -> Tensor:
    """sum_c p_c (e_c - p)(e_c - p)^T, term by term."""
    eye = torch.eye(len(probabilities), dtype=probabilities.dtype)
    terms = [p * torch.outer(e - probabilities, e - probabilities) for p, e in zip(probabilities, eye, strict=True)]
    return torch.stack(terms).sum(0)


def ridge(features: Tensor, targets: Tensor, l2: float, weights: Tensor) -> Tensor:
    """argmin of (1/N) sum_i w_i (x_i theta - t_i)^2 / 2 + (l2/2) |theta|^2, by the normal equations."""
    rows, width = features.shape
    matrix = features.T @ (weights[:, None] * features) / rows + l2 * torch.eye(width, dtype=features.dtype)
    return torch.linalg.solve(matrix, features.T @ (weights * targets) / rows)


@dataclass(eq=False)
class Logistic:
    """L2-regularised logistic regression on features that already hold the constant column; (N, d) and (N,) of 0/1."""

    features: Tensor
    targets: Tensor
    l2: float

    @property
    def rows(self) -> int:
        return len(self.features)

    def losses(self, theta: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        logits = features @ theta
        return softplus(logits) - targets * logits

    def gradient(self, theta: Tensor, weights: Tensor) -> Tensor:
        residual = torch.sigmoid(self.features @ theta) - self.targets
        return self.features.T @ (weights * residual) / self.rows + self.l2 * theta

    def hessian(self, theta: Tensor, weights: Tensor) -> Tensor:
        p = torch.sigmoid(self.features @ theta)
        eye = torch.eye(len(theta), dtype=theta.dtype)
        return self.features.T @ ((weights * p * (1 - p))[:, None] * self.features) / self.rows + self.l2 * eye

    def optimum(self, weights: Tensor | None = None, start: Tensor | None = None) -> Tensor:
        """theta with a gradient of at most 1e-14, by Newton's method; one in (1/N) sum_i weights_i L_i + penalty."""
        weights = torch.ones_like(self.targets) if weights is None else weights
        theta = torch.zeros(self.features.shape[1], dtype=self.features.dtype) if start is None else start.clone()
        for _ in range(100):
            gradient = self.gradient(theta, weights)
            if gradient.norm() <= 1e-14:
                return theta
            theta = theta - torch.linalg.solve(self.hessian(theta, weights), gradient)
        raise AssertionError(f"Newton's method stopped at a gradient of {self.gradient(theta, weights).norm():.1e}")

    def without(self, row: int, epsilon: float, start: Tensor) -> Tensor:
        """The optimum of J - epsilon L(z_row); epsilon = 1/N leaves the row out."""
        weights = torch.ones_like(self.targets)
        weights[row] -= epsilon * self.rows
        return self.optimum(weights, start)

    def leverages(self, theta: Tensor) -> Tensor:
        """(N,): h_i = (1/N) p_i (1 - p_i) x_i^T H^-1 x_i."""
        ones = torch.ones_like(self.targets)
        p = torch.sigmoid(self.features @ theta)
        inverse = torch.linalg.solve(self.hessian(theta, ones), self.features.T)
        return p * (1 - p) * (self.features * inverse.T).sum(1) / self.rows


# training


def train_plainly(
    model: nn.Module,
    value: Callable[[nn.Module, Tensor], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    epochs: range,
    order: Callable[[int], Tensor],
    rate: Callable[[int], float],
    size: int,
) -> nn.Module:
    """The loop that everybody writes, on a copy of the model: `value(model, rows)` is what a batch minimises.

    The copy stays in the mode that the model is in.
    """
    model = copy.deepcopy(model)
    stepping = optimizer([p for p in model.parameters() if p.requires_grad])
    for epoch in epochs:
        for group in stepping.param_groups:
            group["lr"] = rate(epoch)
        for rows in order(epoch).split(size):
            stepping.zero_grad()
            value(model, rows).backward()
            stepping.step()
    return model
