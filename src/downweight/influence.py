"""Influence: scores, self-influence and parameter shifts, for single rows and for groups."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from downweight.curvature.gauss_newton import GaussNewtonMatrix
from downweight.curvature.hessian import HessianMatrix
from downweight.curvature.operator import Damped
from downweight.curvature.over_rows import OverRows
from downweight.errors import InvalidInput, InvalidType, warn
from downweight.features import RowGradients
from downweight.gradients import Gradients, check_removals, of_losses, training
from downweight.measurements import Measurement, as_measurement, of_measurement
from downweight.memory import Budget, gibibytes, parse_bytes
from downweight.progress import reporting, track
from downweight.scores import Scores, jsonable
from downweight.settings import number
from downweight.shapes import Float
from downweight.solve import as_solver
from downweight.solvers.auto import Auto
from downweight.solvers.solver import (
    Indefinite,
    Pairing,
    Result,
    Solution,
    Solver,
    check_indefinite,
    dot,
    with_message,
)
from downweight.task import Task

Curvature = Literal["gauss_newton", "hessian"]
CURVATURES: dict[str, type[OverRows]] = {"gauss_newton": GaussNewtonMatrix, "hessian": HessianMatrix}

# The part of the available memory that the vectors of a block of systems may take, and that gradients of single rows
# may take beside them while these are formed. Guesses.
_VECTOR_MEMORY, _FORMING_MEMORY = 0.5, 0.3

# Blocks of vectors that a solver of the user's own is taken to hold, its right-hand sides among them.
_BLOCKS_HELD = 4.0


@torch.inference_mode(False)
def influence(
    task: Task,
    queries: Any,
    *,
    damping: float = 1e-3,
    curvature: Curvature = "gauss_newton",
    solver: Solver | str = "auto",
    measurement: str | Measurement | Callable[[Tensor, Tensor], Tensor] = "loss",
    rows: Any = None,
    candidates: Any = None,
    indefinite: Indefinite = "raise",
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Scores:
    r"""Scores (1/N) ∇m(q)ᵀ A⁻¹ ∇L(zᵢ): the predicted change of m(q) when row i is removed.

    A = C + λI at θˢ, with C the curvature of the whole cost (its l2 included) and λ = `damping`,
    absolute. First order in 1/N: exact for the derivative, an approximation for the removal itself,
    worst for rows of high leverage. Systems are solved for the queries or for the rows, whichever
    are fewer.

    queries: (inputs, targets) or a dataset. measurement: "loss", "margin", or a function.
    rows: None for all training rows, indices, or groups such as [[3], [5, 9]].
    candidates: (inputs, targets) outside the training set instead, scored as if removed.
    indefinite: "allow" solves an indefinite Hessian system (by MINRES or LDLᵀ) instead of raising.
    """
    with reporting(progress):
        warn_of_mode(task)
        check_indefinite(indefinite)
        measured = as_measurement(task, measurement)
        right, removals, of = choose_removals(task, rows, candidates)
        left = of_measurement(task, task.query_rows(queries), measured)
        systems, others = sorted((len(left), len(right)))
        scores = 8 * systems * others
        system = System.make(task, damping, curvature, solver, indefinite, memory_limit, systems, scores)
        estimate = system.memory_estimate(systems, others)
        pairing = system.pair(left, right)
        unfinished = system.warn_unless_converged(pairing)
        values = pairing.value.div_(len(task)).to(task.dtype)
        smallest = pairing.stats.get("smallest_eigenvalue")
        notes = [*task.notes, *system.notes, f"The peak of its memory was estimated at {gibibytes(estimate)}."]
        notes.extend(unfinished)
        if smallest is not None and smallest < 0:
            notes.append(
                f"The system is indefinite (smallest eigenvalue {smallest:.3g}): scores belong to a "
                "stationary point of the quadratic model, not to its minimum."
            )
        return Scores(
            values=values,
            residuals=pairing.residual,
            solved="queries" if pairing.solved == "left" else "rows",
            results=tuple(result.value for result in pairing.result),
            converged=_converged(pairing.result),
            removals=removals,
            of=of,
            method="influence",
            measurement=measured.name,
            higher_is_better=measured.higher_is_better,
            unit=measured.unit,
            damping=float(damping),
            l2=task.l2,
            curvature=system.curvature.describe(),
            solver=repr(system.solver),
            loss=task.loss.name,
            rows=len(task),
            coverage=task.coverage,
            fingerprint=task.fingerprint(),
            seed=getattr(system.solver, "seed", None),
            notes=tuple(notes),
            stats=jsonable({**pairing.stats, "memory_estimate": estimate}),
        )


@torch.inference_mode(False)
def self_influence(
    task: Task,
    *,
    damping: float = 1e-3,
    curvature: Curvature = "gauss_newton",
    solver: Solver | str = "auto",
    indefinite: Indefinite = "raise",
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Float[Tensor, " N"]:
    """(1/N) ∇L(zᵢ)ᵀ A⁻¹ wᵢ ∇L(zᵢ) of every training row: what its removal does to its own loss.

    The diagonal of `influence` of the training rows on themselves, in order N instead of N².
    """
    with reporting(progress):
        warn_of_mode(task)
        check_indefinite(indefinite)
        system = System.make(task, damping, curvature, solver, indefinite, memory_limit, len(task), 8 * len(task))
        answer = system.quadratic(of_losses(task, task.rows, "train"))
        system.warn_unless_converged(answer)
        # The row's own loss is asked for without its weight; what leaves the cost has it.
        removed = answer.value if task.weights is None else task.weights * answer.value
        return (removed / len(task)).to(task.dtype)


@torch.inference_mode(False)
def parameter_shift(
    task: Task,
    remove: Sequence[Sequence[int]],
    *,
    damping: float = 1e-3,
    epsilon: float | None = None,
    curvature: Curvature = "gauss_newton",
    solver: Solver | str = "auto",
    indefinite: Indefinite = "raise",
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Float[Tensor, "R d"]:
    """ε A⁻¹ Σ_S ∇L: the first-order θ − θˢ of downweighting each set S by ε; None is 1/N, removal.

    With row weights ∇L is wᵢ ∇L(zᵢ), so that ε = 1/N takes the row out of the cost.
    """
    with reporting(progress):
        warn_of_mode(task)
        check_indefinite(indefinite)
        groups = check_removals(as_groups(remove, "remove"), len(task))
        step = 1 / len(task) if epsilon is None else number(epsilon, "epsilon")
        shifts = len(groups) * task.size * task.dtype.itemsize
        system = System.make(task, damping, curvature, solver, indefinite, memory_limit, len(groups), shifts)
        solution = system.solve(training(task, groups))
        system.warn_unless_converged(solution)
        return solution.value.mul_(step)


@dataclass(frozen=True, eq=False)
class System:
    """A x = v for one task, ready to be solved: the curvature, the damping and the solver."""

    task: Task
    curvature: OverRows
    operator: Damped
    solver: Solver
    state: Any
    formed: RowGradients
    notes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        task: Task,
        damping: float,
        curvature: str,
        solver: Solver | str,
        indefinite: Indefinite,
        memory_limit: int | str | None,
        systems: int,
        results: int,
    ) -> "System":
        """Set-up for so many systems and bytes of results; MemoryLimit where not even one system at a time fits."""
        if not isinstance(curvature, str) or curvature not in CURVATURES:
            raise InvalidInput(f"curvature is {curvature!r}; expected one of {', '.join(map(repr, CURVATURES))}.")
        damping = number(damping, "damping")
        if damping < 0:
            raise InvalidInput(
                f"damping is {damping:g}; expected a number >= 0, the absolute λ added to every "
                "eigenvalue of the curvature."
            )
        chosen = as_solver(solver)
        budget = Budget(task.device, parse_bytes(memory_limit))
        least = results + RowGradients.least_plan_bytes(task)
        budget.require(least, f"{task.size:,} parameters with their results", _advice(task, least))
        # What is left of the limit when the results are there.
        limit = None if budget.limit is None else budget.limit - results
        matrix = CURVATURES[curvature](task, memory_limit=limit)
        operator = Damped(matrix, damping)
        notes: tuple[str, ...] = ()
        if isinstance(chosen, Auto):
            choice = Auto(systems).choose(operator, indefinite=indefinite)
            chosen, notes = choice.solver, (choice.reason,)
        blocks = getattr(chosen, "blocks_held", _BLOCKS_HELD)
        if not hasattr(chosen, "least_bytes"):  # those that factor a matrix know better what they need
            least = results + int(blocks * matrix.vector_bytes) + matrix.product_bytes(1)
            budget.require(least, f"One system at a time of {task.size:,} parameters by {chosen}", _advice(task, least))
        state = chosen.init(operator, indefinite=indefinite)
        return cls(task, matrix, operator, chosen, state, RowGradients(task, matrix.budget), notes)

    def pair(self, left: Gradients, right: Gradients) -> Pairing:
        """vᵀ A⁻¹ v' for all pairs, by the solver's own road where it has one."""
        own = getattr(self.solver, "pair", None)
        if own is not None:
            return own(self.state, left, right)
        turned = len(right) < len(left)
        solved, other = (right, left) if turned else (left, right)

        def score(start: int, stop: int) -> tuple[Tensor, Solution]:
            solution = self._solve_block(solved.only(start, stop))
            scores = other.dot(solution.value, self.curvature.chunk_rows, self.curvature.block).T
            return scores, without_value(solution)

        values, known = self._block_by_block(score, solved, len(other))
        side = "right" if turned else "left"
        return Pairing(values.T if turned else values, known.residual, known.result, side, known.stats)

    def memory_estimate(self, systems: int, others: int) -> int:
        """Peak bytes of pairing so many systems with so many others, beside what was there before."""
        values = 8 * systems * others
        own = getattr(self.state, "memory_estimate", None)
        if own is not None:
            return values + max(self.formed.plan_bytes, own(systems))
        start, stop = self._blocks(systems, others)[0]
        count, curvature = stop - start, self.curvature
        vectors = count * curvature.vector_bytes
        solving = count * self._system_bytes + curvature.product_bytes(count)
        measuring = vectors + 2 * 8 * count * others + curvature.kept_bytes
        measuring += curvature.chunk_bytes + curvature.pass_bytes(count)
        forming = 2 * vectors + curvature.kept_bytes + min(self._vector_rows(), count) * self._row_bytes
        setting_up = getattr(self.state, "set_up_bytes", 0)
        return values + max(setting_up, self.formed.plan_bytes, self._held_bytes + max(solving, measuring, forming))

    @property
    def _held_bytes(self) -> int:
        """Bytes that the solver holds from its set-up on."""
        return getattr(self.state, "held_bytes", 0)

    @property
    def _system_bytes(self) -> int:
        """Bytes that one more system in a block takes: the vectors of the solver, its right-hand side among them."""
        blocks = getattr(self.solver, "blocks_held", _BLOCKS_HELD)
        return getattr(self.state, "system_bytes", int(blocks * self.curvature.vector_bytes))

    @property
    def _row_bytes(self) -> int:
        """Bytes of forming the gradient of one row, its parts and the whole of it."""
        return 2 * (self.curvature.row_bytes + self.curvature.vector_bytes)

    def quadratic(self, family: Gradients) -> Pairing:
        """vᵀ A⁻¹ v of every vector."""
        own = getattr(self.solver, "quadratic", None)
        if own is not None:
            return own(self.state, family)

        def square(start: int, stop: int) -> tuple[Tensor, Solution]:
            vectors = family.only(start, stop).vectors(self.formed, self._vector_rows())
            solution = self.solver.compute(self.state, vectors)
            return dot(vectors, solution.value), without_value(solution)

        values, known = self._block_by_block(square, family, 1)
        return Pairing(values, known.residual, known.result, "left", known.stats)

    def _block_by_block(
        self, use: Callable[[int, int], tuple[Tensor, Solution]], family: Gradients, others: int
    ) -> tuple[Tensor, Solution]:
        """What `use` makes of the systems of a family, a block of them in memory at a time."""
        values: Tensor | None = None
        known = []
        for start, stop in track(self._blocks(len(family), others), f"Systems of {family.what}"):
            part, solution = use(start, stop)
            if values is None:
                values = part.new_empty(len(family), *part.shape[1:])
            values[start:stop] = part
            known.append(solution)
        assert values is not None  # a family has at least one vector
        return values, join(known)

    def solve(self, family: Gradients) -> Solution:
        """A⁻¹ v of every vector, (K, d)."""
        blocks = track(self._blocks(len(family), 0), f"Systems of {family.what}")
        return join([self._solve_block(family.only(start, stop)) for start, stop in blocks])

    def warn_unless_converged(self, answer: Solution | Pairing) -> list[str]:
        """Say once what is not solved, and what its solver advises; returns that advice, for the notes."""
        failed = [place for place, entry in enumerate(answer.result) if not entry.ok]
        if not failed:
            return []
        reasons = sorted({answer.result[place].value for place in failed})
        worth = "worth nothing" if Result.DIVERGED in answer.result else "approximate"
        advice = answer.stats.get("message")
        precise = "" if self.task.dtype == torch.float64 else " or float64"
        warn(
            f"{len(failed)} of {len(answer.result)} systems are not solved to the tolerance ({'; '.join(reasons)}), "
            f"worst relative residual {float(answer.residual.max()):.2g}. The numbers that rest on them are {worth}: "
            f"{advice or f'raise max_steps or the damping, or use an exact solver{precise}'}."
        )
        return [f"Not solved to the tolerance: {advice}."] if advice else []

    def _solve_block(self, family: Gradients) -> Solution:
        return self.solver.compute(self.state, family.vectors(self.formed, self._vector_rows()))

    def _blocks(self, count: int, others: int) -> list[tuple[int, int]]:
        one = self._system_bytes + 2 * 8 * others
        size = max(1, int(_VECTOR_MEMORY * self._room) // one)
        return [(start, min(start + size, count)) for start in range(0, count, size)]

    def _vector_rows(self) -> int:
        """Rows whose gradients may be formed at a time."""
        # A group adds copies of the rows that are in it.
        return max(1, int(_FORMING_MEMORY * self._room) // (self._row_bytes + self.curvature.vector_bytes))

    @property
    def _room(self) -> int:
        """Bytes for vectors and passes, beside what the solver holds."""
        return max(0, self.curvature.budget.available() - self._held_bytes)


def _advice(task: Task, needed: int) -> str:
    """What would fit: that limit, or fewer parameters."""
    return (
        f"Raise memory_limit to {gibibytes(needed)} at least, name fewer parameters (parameters=[...] of the task has "
        f"{task.size:,} now), or ask for fewer scores at a time."
    )


def without_value(solution: Solution) -> Solution:
    """What is known of a solution, once its value has been used: all blocks' values together may not fit.

    New memory, not a view: an empty slice would hold on to all of the value.
    """
    return replace(solution, value=solution.value.new_empty(len(solution.value), 0))


def join(solutions: Sequence[Solution]) -> Solution:
    """Solutions of blocks of vectors as one."""
    if len(solutions) == 1:
        return solutions[0]
    messages = [solution.stats["message"] for solution in solutions if solution.stats.get("message")]
    stats = with_message({**solutions[-1].stats, "message": None}, *messages)
    for name in ("matvecs", "rounds"):
        if name in stats:
            stats[name] = sum(solution.stats.get(name, 0) for solution in solutions)
    return Solution(
        torch.cat([solution.value for solution in solutions]),
        torch.cat([solution.residual for solution in solutions]),
        torch.cat([solution.steps for solution in solutions]),
        tuple(result for solution in solutions for result in solution.result),
        stats,
    )


def choose_removals(
    task: Task, rows: Any, candidates: Any
) -> tuple[Gradients, tuple[Any, ...], Literal["rows", "groups", "candidates"]]:
    """The family of gradients to score, a label for each, and what they are."""
    if candidates is not None:
        if rows is not None:
            raise InvalidInput("Give rows (of the training set) or candidates (outside it), not both.")
        others = task.query_rows(candidates, "candidates")
        return of_losses(task, others, "candidates"), tuple(range(len(others))), "candidates"
    ids = task.row_ids
    if rows is None:
        labels = range(len(task)) if ids is None else ids
        return training(task), tuple(labels), "rows"
    rows = list(rows) if isinstance(rows, Iterator) else rows
    if _is_groups(rows):  # one group among single rows makes each of them a group
        groups = check_removals(as_groups(rows, "rows"), len(task))
        labels = [tuple(row if ids is None else ids[row] for row in group) for group in groups]
        return training(task, groups), tuple(labels), "groups"
    chosen = [group[0] for group in check_removals(as_groups(rows, "rows"), len(task), whole=True)]
    if len(set(chosen)) < len(chosen):
        repeated = next(row for row in chosen if chosen.count(row) > 1)
        raise InvalidInput(f"rows names row {repeated} twice.")
    labels = [row if ids is None else ids[row] for row in chosen]
    return training(task, torch.tensor(chosen)), tuple(labels), "rows"


def _is_groups(rows: Any) -> bool:
    if isinstance(rows, Tensor | np.ndarray):
        return rows.ndim == 2
    return isinstance(rows, Iterable) and any(
        isinstance(entry, Sequence | set) or (isinstance(entry, Tensor | np.ndarray) and entry.ndim > 0)
        for entry in rows
    )


def as_groups(rows: Any, name: str) -> list[list[int]]:
    """Groups of rows from groups, from single indices, or from an array of either."""
    if isinstance(rows, Tensor | np.ndarray):
        if rows.dtype in (torch.bool, np.bool_):
            raise InvalidType(f"{name} is a mask; give indices, for example mask.nonzero().flatten().")
        rows = rows.tolist()
    if isinstance(rows, str | bytes) or not hasattr(rows, "__iter__"):
        raise InvalidType(f"{name} is {rows!r}; expected row indices such as [3, 5], or groups such as [[3], [5, 9]].")
    groups = []
    for entry in rows:
        if isinstance(entry, Tensor | np.ndarray):
            entry = entry.tolist()
        groups.append(list(entry) if isinstance(entry, Sequence | set | range) else [entry])
    return groups


def warn_of_mode(task: Task) -> None:
    """Say it when train mode would have changed the numbers."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    if any(module.training and isinstance(module, kinds) for module in task.model.modules()):
        warn(
            "The model is in train mode and has dropout or batch-norm layers; it is evaluated in "
            "eval mode and put back afterwards. Call model.eval() to make this explicit."
        )


def _converged(results: Sequence[Result]) -> Tensor:
    return torch.tensor([result.ok for result in results], dtype=torch.bool)
