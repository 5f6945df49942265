"""Auto: the solver with the least arithmetic among those that fit in memory."""

from dataclasses import dataclass

from torch import Tensor

from downweight.curvature.gauss_newton import GaussNewtonMatrix
from downweight.curvature.operator import Damped, Operator
from downweight.memory import Budget, gibibytes
from downweight.shapes import Float
from downweight.solvers.cg import CG
from downweight.solvers.cholesky import Cholesky
from downweight.solvers.dual import Dual
from downweight.solvers.minres import MINRES
from downweight.solvers.solver import Indefinite, Solution, Solver

# Products that a CG to its tolerance takes a vector: 50 to 2,000 were seen, depending on λ. A guess.
_CG_STEPS = 200


@dataclass(frozen=True)
class Choice:
    """The solver that was chosen, and the reason in words."""

    solver: Solver
    reason: str


@dataclass(frozen=True)
class Auto:
    """Counts operations for each exact solver and for CG, and takes the cheapest that fits.

    `systems`: how many vectors will be solved for. Memory: what the operator's limit or its device allows.
    """

    systems: int = 1

    def choose(self, operator: Operator, *, indefinite: Indefinite = "raise") -> Choice:
        d, K = operator.size, self.systems
        curvature, damping = operator, 0.0
        while isinstance(curvature, Damped):
            damping += curvature.damping
            curvature = curvature.operator
        available = Budget(operator.device, operator.memory_limit).available()
        # One product with a vector: 8 operations a parameter and row (2 gradients' worth).
        product = 8.0 * d * (operator.rows or d)
        options: list[tuple[float, int, Solver, str]] = [
            (product * d + d**3 / 3, Cholesky.least_bytes(d), Cholesky(), f"d = {d:,}"),
        ]
        if isinstance(curvature, GaussNewtonMatrix) and damping + curvature.task.l2 > 0:
            size = len(curvature.task) * curvature.task.root_size
            cost = size**3 / 3 + 2.0 * size**2 * K + 8.0 * d * size
            kernel = f"N·C = {size:,}"
            options.append((cost, Dual.least_bytes(size), Dual(), kernel))
        iterative = MINRES() if indefinite == "allow" and not operator.positive else CG()
        # influence solves in blocks of systems, so that one system must fit.
        needed = int(iterative.blocks_held * 8 * d)
        options.append((product * _CG_STEPS * K, needed, iterative, f"{K:,} systems"))
        fitting = [option for option in options if option[1] <= available] or options[-1:]
        cost, needed, solver, why = min(fitting, key=lambda option: option[0])
        left_out = [
            f"{type(other).__name__} would need {gibibytes(bytes_)}"
            for _, bytes_, other, _ in options
            if bytes_ > available
        ]
        reason = (
            f"auto chose {type(solver).__name__} ({why}): about {cost:.1g} operations and "
            f"{gibibytes(needed)}" + (f"; {', '.join(left_out)}" if left_out else "") + "."
        )
        return Choice(solver, reason)

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> tuple[Choice, object]:
        choice = self.choose(operator, indefinite=indefinite)
        return choice, choice.solver.init(operator, indefinite=indefinite)

    def compute(self, state: tuple[Choice, object], vectors: Float[Tensor, "K d"]) -> Solution:
        choice, inner = state
        solution = choice.solver.compute(inner, vectors)
        return Solution(
            solution.value,
            solution.residual,
            solution.steps,
            solution.result,
            {**solution.stats, "chosen": choice.reason},
        )
