"""Dual: the exact damped Gauss-Newton solution through the (N·C, N·C) kernel of the outputs."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from downweight.curvature.gauss_newton import GaussNewtonMatrix
from downweight.curvature.operator import Damped, Operator
from downweight.errors import InvalidInput, SingularSystem
from downweight.features import RowGradients
from downweight.gradients import Gradients, roots, training
from downweight.kernel import Kernel
from downweight.memory import Budget, parse_bytes
from downweight.progress import track
from downweight.shapes import Float
from downweight.solvers.solver import (
    Indefinite,
    Pairing,
    Result,
    Solution,
    check_indefinite,
    check_rtol,
    norms,
)

_REFINEMENTS = 3  # each gains about the digits that one solve has; two have always been enough

# Systems that are checked by products of the matrix itself, in float32. On an MNIST network (200 rows, λ from 1e-2 to
# 1e-5) the largest of eight such residuals lies above the true ones of 99 in 100 queries.
_CHECKED = 8
# Of eps ‖K‖ / (μN), where torch has no second derivatives to check with, or there is no room for it: the true ones were
# 1/60 to 1/200 of it.
_ROUNDING = 1 / 20

# Right-hand sides that are held, and that are at work, at a time: a quarter and an eighth of the kernel's width at
# most, so that they never take more than the kernel itself does (guesses); and the columns that each of them takes.
_BLOCKS = ((4, 2), (8, 4))


def _matrix_bytes(size: int) -> int:
    """Kernel, factor, and strips at work that are a quarter of one."""
    return 18 * size**2


@dataclass(frozen=True)
class Dual:
    r"""The exact solution for A = (1/N) BᵀB + μI, with B the N r rows Rᵢ Jᵢ and μ = λ + ρ > 0:

        A⁻¹ v = (v − Bᵀ (μN I + BBᵀ)⁻¹ B v) / μ

    r is C for a squared error and C − 1 for a softmax. The kernel BBᵀ is formed from the layers'
    inputs and output gradients where a parameter belongs to a linear map, from explicit per-row
    gradients elsewhere; kernel and factor are float64 whatever the network's dtype. Gauss-Newton
    with a convex loss only. Needs two (N r)² matrices in float64, and (N r)³/3 operations.

    With w the error of the dual system, w = Bv − (μN I + K) y, the residual of the primal one is
    Bᵀw / (μN), of norm √(wᵀKw) / (μN): known for every vector without another pass over the rows.

    That formula takes B and v for exact. In float32 they carry the rounding of the network, about eps ‖K‖ / (μN) at
    worst, which decides for a small μ. So a few systems are solved and checked with products of the matrix itself,
    which share no rounding with the kernel, and no residual is reported below the largest of theirs: an estimate of
    the true residual of the others, not a bound. Float64 needs none of this and does without.

    - `rtol`: solutions are refined until their relative residual is below it (at most three times);
      above it they are returned as STAGNATED. None is 1e-10 in float64, 1e-4 in float32.
    - `memory_limit`: bytes (or "8GiB") that may be used; None is the free memory.
    """

    rtol: float | None = None
    memory_limit: int | str | None = None

    def __post_init__(self) -> None:
        check_rtol(self.rtol)
        parse_bytes(self.memory_limit)

    @staticmethod
    def least_bytes(size: int) -> int:
        """Kernel, factor and strips at work, and a fifth for what they are made of; right-hand sides fit themselves."""
        return 5 * _matrix_bytes(size) // 4

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> "DualState":
        check_indefinite(indefinite)
        curvature, damping = operator, 0.0
        while isinstance(curvature, Damped):
            damping += curvature.damping
            curvature = curvature.operator
        if not isinstance(curvature, GaussNewtonMatrix) or curvature.rows != len(curvature.task):
            raise InvalidInput(
                f"Dual solves Gauss-Newton systems over all training rows, got {operator.describe()}: "
                "only JᵀH_yJ has a kernel in the outputs. Use Cholesky(), MINRES() or CG()."
            )
        task = curvature.task
        shift = damping + task.l2
        if shift <= 0:
            raise SingularSystem(
                "Dual divides by damping + l2, which is 0. Give a damping > 0, or use Cholesky() or "
                "CG(), which can solve a Gauss-Newton system without damping if it is not singular."
            )
        size = len(task) * task.root_size
        limit = parse_bytes(self.memory_limit) or operator.memory_limit
        budget = Budget(task.device, limit)
        needed, available = self.least_bytes(size), budget.available()
        fits = int(size * math.sqrt(available / needed))
        budget.require(
            needed,
            f"Dual's kernel for {len(task):,} rows × {task.root_size} outputs",
            f"A kernel of {fits:,} would fit: {fits // task.root_size:,} rows, or use solver='cg', "
            "which needs no matrix.",
        )
        # Half of what the matrices leave is for features, the rest for right-hand sides.
        room = (available - _matrix_bytes(size)) // 2
        kernel = Kernel(RowGradients(task, budget), room, curvature.row_bytes)
        family = roots(task)
        gram = kernel.gram(family, family)
        factor = gram.clone().T  # column-major, as LAPACK wants it, so that nothing is copied again
        factor.diagonal().add_(shift * len(task))
        failed = torch.empty((), dtype=torch.int32, device=task.device)
        torch.linalg.cholesky_ex(factor, out=(factor, failed))
        if bool(failed):
            raise SingularSystem(
                f"The kernel system with damping + l2 = {shift:g} is singular to the precision of "
                f"float64 (largest kernel entry {float(gram.diagonal().max()):.3g}). Raise the damping."
            )
        rtol = self.rtol or (1e-10 if task.dtype == torch.float64 else 1e-4)
        # The matrices are there by now: products with vectors get what they leave.
        curvature = GaussNewtonMatrix(task, memory_limit=room)
        operator = Damped(curvature, damping)
        # Right-hand sides and answers of the held, and four temporaries of those at work, each for half of the room.
        held, work = (max(1, min(math.ceil(size / part), room // (2 * count * 8 * size))) for part, count in _BLOCKS)
        return DualState(operator, curvature, kernel, gram, factor, shift, rtol, room, held, work)

    def compute(self, state: "DualState", vectors: Float[Tensor, "K d"]) -> Solution:
        return state.solve(vectors)

    def pair(self, state: "DualState", left: Gradients, right: Gradients) -> Pairing:
        return state.pair(left, right)

    def quadratic(self, state: "DualState", family: Gradients) -> Pairing:
        return state.quadratic(family)


@dataclass(frozen=True, eq=False)
class DualState:
    """The kernel K = BBᵀ and the factor of K + μN I."""

    operator: Operator
    curvature: GaussNewtonMatrix
    kernel: Kernel
    gram: Float[Tensor, "m m"]
    factor: Float[Tensor, "m m"]
    shift: float
    rtol: float
    room: int  # bytes for vectors, beside the matrices
    held: int  # right-hand sides at a time
    work: int  # and of those, at work at a time

    def memory_estimate(self, systems: int) -> int:
        """Peak bytes of solving so many systems, beside what was there before."""
        size, train, others = len(self.gram), roots(self.curvature.task), training(self.curvature.task)
        blocks = sum(
            count * min(systems, most) for (_, count), most in zip(_BLOCKS, (self.held, self.work), strict=True)
        )
        kernel = self.kernel
        passing = max(kernel.forming_bytes(train), kernel.forming_bytes(others, self.work))
        features = kernel.feature_bytes(train)
        forming = 9 * size**2 + features * (1 if kernel.holds(train) else 2) + passing
        pairing = 8 * size * blocks + features + kernel.feature_bytes(others, self.work) + passing
        checked = min(self._checked, systems)
        checking = checked * self.system_bytes + self.curvature.product_bytes(checked)
        return max(forming, _matrix_bytes(size), self.held_bytes + max(pairing, checking))

    @property
    def held_bytes(self) -> int:
        return self.gram.nbytes + self.factor.nbytes

    @property
    def system_bytes(self) -> int:
        """Bytes that one more vector takes in `solve`, itself among them; counted."""
        return 6 * self.curvature.vector_bytes + 6 * 8 * len(self.gram)

    @property
    def _checked(self) -> int:
        """Systems to check by products in float32, as many as there is room for."""
        if self.curvature.dtype == torch.float64:
            return 0
        return max(0, min(_CHECKED, (self.room - self.curvature.product_bytes(1)) // self.system_bytes))

    @property
    def _scale(self) -> float:
        """μN."""
        return self.shift * len(self.curvature.task)

    # -- between families, in the kernel's space ----------------------------------------------

    def pair(self, left: Gradients, right: Gradients) -> Pairing:
        """vᵀ A⁻¹ v' for all pairs; systems are solved for the smaller family."""
        train = roots(self.curvature.task)
        turned = len(right) < len(left)
        solved, other = (right, left) if turned else (left, right)
        squared_norms = self.kernel.squared_norms(solved)
        residual = torch.empty_like(squared_norms)
        values = squared_norms.new_empty(len(solved), len(other))
        for start in track(range(0, len(solved), self.held), f"Systems of {solved.what}"):
            part = slice(start, min(start + self.held, len(solved)))
            piece = solved.only(part.start, part.stop)
            seen = piece.reduce(self.kernel.gram(train, piece), 1)
            dual, residual[part] = self._solve_dual(seen, squared_norms[part])
            del seen
            # The other family may be all N rows: its columns come in blocks.
            for first in track(range(0, len(other), self.work), f"Scores of {other.what}"):
                columns = slice(first, min(first + self.work, len(other)))
                theirs = other.only(columns.start, columns.stop)
                direct = theirs.reduce(piece.reduce(self.kernel.gram(piece, theirs), 0), 1)
                across = theirs.reduce(self.kernel.gram(train, theirs), 1)
                values[part, columns] = direct.sub_(dual.T @ across)
        values /= self.shift
        residual = self._with_rounding(residual, solved)
        return self._pairing(values.T if turned else values, residual, "right" if turned else "left")

    def quadratic(self, family: Gradients) -> Pairing:
        """vᵀ A⁻¹ v of every vector: (vᵀv − (Bv)ᵀ (K + μN I)⁻¹ Bv) / μ."""
        train = roots(self.curvature.task)
        values = self.kernel.squared_norms(family)
        residual = torch.empty_like(values)
        for start in track(range(0, len(family), self.held), f"Systems of {family.what}"):
            part = slice(start, min(start + self.held, len(family)))
            piece = family.only(part.start, part.stop)
            seen = piece.reduce(self.kernel.gram(train, piece), 1)
            dual, residual[part] = self._solve_dual(seen, values[part])
            values[part] -= (seen * dual).sum(0)
        return self._pairing(values / self.shift, self._with_rounding(residual, family), "left")

    def _pairing(self, values: Tensor, residual: Tensor, solved: Literal["left", "right"]) -> Pairing:
        results = tuple(Result.DIRECT if left <= self.rtol else Result.STAGNATED for left in residual.tolist())
        return Pairing(values, residual, results, solved, self.stats)

    @property
    def stats(self) -> dict[str, object]:
        return {
            "kernel_size": len(self.gram),
            "kernel": self.kernel.formed.describe(),
        }

    def inverse(self, wanted: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """(K + μN I)⁻¹ b, by two triangular solves: cholesky_solve would copy the factor."""
        half = torch.linalg.solve_triangular(self.factor, wanted, upper=False)
        return torch.linalg.solve_triangular(self.factor.T, half, upper=True)

    def _solve_dual(
        self, seen: Float[Tensor, "m n"], squared_norms: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "m n"], Float[Tensor, " n"]]:
        """y with (K + μN I) y = B v, refined, and the relative residual of the primal system."""
        dual = torch.empty_like(seen)
        residual = torch.empty_like(squared_norms)
        for start in range(0, seen.shape[1], self.work):
            part = slice(start, start + self.work)
            wanted, sizes = seen[:, part], squared_norms[part].sqrt()
            y, rounds = self.inverse(wanted), 0
            while True:
                missing = torch.addmm(wanted, self.gram, y, alpha=-1).sub_(y, alpha=self._scale)
                squared = (missing * (self.gram @ missing)).sum(0).clamp_min_(0)
                left = squared.sqrt() / (self._scale * torch.where(sizes > 0, sizes, 1.0))
                if rounds == _REFINEMENTS or bool((left <= self.rtol).all()):
                    break
                y += self.inverse(missing)
                rounds += 1
            dual[:, part], residual[part] = y, left
        return dual, residual

    def _with_rounding(self, residual: Float[Tensor, " n"], solved: Gradients) -> Float[Tensor, " n"]:
        """The residuals that the kernel knows, none below what the float32 of the network leaves over."""
        if self.curvature.dtype == torch.float64:
            return residual
        eps = torch.finfo(self.curvature.dtype).eps
        order = residual.argsort()
        few = order[torch.linspace(0, len(order) - 1, min(self._checked, len(order))).round().long()].tolist()
        floor = float(_ROUNDING * eps * torch.linalg.matrix_norm(self.gram) / self._scale)
        # The matrix differentiates twice, the kernel once.
        with contextlib.suppress(InvalidInput, NotImplementedError):
            if few:
                size = self.kernel.pass_rows(1)
                vectors = [solved.only(place, place + 1).vectors(self.kernel.formed, size) for place in few]
                floor = float(self.solve(torch.cat(vectors)).residual.max())
        # A vector of zeros is solved exactly; others, and their scores, are held to a few units of rounding only.
        return torch.where(residual > 0, residual.clamp_min(max(floor, 4 * eps)), residual)

    # -- for any vectors ----------------------------------------------------------------------

    def solve(self, vectors: Float[Tensor, "K d"]) -> Solution:
        """Solutions for any vectors, refined with products of the operator itself."""
        sizes = norms(vectors)
        safe = torch.where(sizes > 0, sizes, 1.0)
        value = self._apply(vectors)
        best = torch.full_like(sizes, torch.inf)
        kept = value
        matvecs = 0
        for remaining in reversed(range(_REFINEMENTS + 1)):
            missing = vectors - self.operator.product(value)
            matvecs += len(vectors)
            residual = norms(missing) / safe
            # In float32 a refinement that gains little adds more error than it removes.
            better = residual < best / 2
            kept = torch.where(better[:, None], value, kept)
            best = torch.minimum(best, residual)
            if remaining == 0 or bool((best <= self.rtol).all()) or not bool(better.any()):
                break
            value = kept + self._apply(missing)
        results = tuple(
            Result.ZERO if size == 0 else Result.DIRECT if left <= self.rtol else Result.STAGNATED
            for left, size in zip(best.tolist(), sizes.tolist(), strict=True)
        )
        steps = torch.ones(len(vectors), dtype=torch.long, device=vectors.device)
        return Solution(kept, best, steps, results, {**self.stats, "matvecs": matvecs})

    def _apply(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        return self.combine(vectors, self.inverse(self.seen(vectors).T).T)

    def seen(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K m"]:
        """B v: what the outputs' roots see of each vector, row by row of the training set."""
        blocks = vectors.split(self.curvature.block)
        parts = [
            torch.cat(
                [torch.einsum("kbo,rbo->kbr", at.push(block).flatten(2).double(), root).flatten(1) for block in blocks]
            )
            for at, root in self._linearized()
        ]
        return torch.cat(parts, 1)

    def combine(self, vectors: Float[Tensor, "K d"], dual: Float[Tensor, "K m"]) -> Float[Tensor, "K d"]:
        """(v − Bᵀ y) / μ, the primal solution of a dual one."""
        pulled, start, block = torch.zeros_like(vectors), 0, self.curvature.block
        for at, root in self._linearized():
            count = root.shape[1] * root.shape[0]
            part = dual[:, start : start + count].unflatten(1, (root.shape[1], root.shape[0]))
            start += count
            cotangents = torch.einsum("kbr,rbo->kbo", part, root).unflatten(2, self.curvature.task.output_shape)
            for first in range(0, len(vectors), block):
                pulled[first : first + block] += at.pull(cotangents[first : first + block])
        return (vectors - pulled).div_(self.shift)

    def _linearized(self) -> Iterator[tuple]:
        """(linearisation, roots (r, B, outputs)) by chunks of the training rows."""
        task = self.curvature.task
        with task.evaluating():
            for chunk in self.curvature.chunks():
                at = chunk.linearization
                root = task.output_root(at.outputs, chunk.targets, chunk.weights)
                yield at, root.flatten(2)
