r"""The proximal Bregman response to a tolerance: Gauss-Newton steps with the removed rows left out of the matrix.

With δ = θ − θˢ, cᵢ = wᵢ (1/N − ε [i ∈ S]) and μ = λ + ρ the objective is, up to a constant,

    P(δ) = Σ cᵢ D(f(θ, xᵢ), f(θˢ, xᵢ)) − ε Σ_S wᵢ ∇L(f(θˢ, xᵢ)) · (f(θ, xᵢ) − f(θˢ, xᵢ)) + (μ/2) ‖δ‖²

and A_S = (1/N) Σ_{i∉S} wᵢ Jᵢᵀ H_y Jᵢ + μI its Gauss-Newton matrix at θˢ: at ε = 1/N the removed rows enter linearly in
their outputs, so they are left out. Steps are −H ∇P, where H starts as A_S⁻¹ and learns what A_S does not know (the
network's bending away from θˢ) from changes of the gradient, by the limited memory BFGS formula. Every evaluation
teaches it, also one that is not accepted. On smooth networks this takes a few evaluations for ordinary rows and some
twenty for the largest residuals, where steps with A_S alone crawl. On piecewise-linear networks the minimiser sits on
kinks, where no gradient vanishes; there the response has settled when the second half of the work no longer moved the
outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from downweight.curvature.gauss_newton import GaussNewtonMatrix
from downweight.curvature.operator import Damped
from downweight.errors import MemoryLimit
from downweight.memory import Budget
from downweight.objectives import GaussNewton
from downweight.progress import track
from downweight.rows import Inputs, chunks
from downweight.shapes import Bool, Float
from downweight.solvers.cg import CG
from downweight.solvers.dual import Dual, DualState
from downweight.solvers.solver import Solver, dot, norms
from downweight.stack import Stack, stack
from downweight.task import Task

_MEMORY = 30  # changes of the gradient that are kept for each removal: as many as a hard row takes evaluations
_SHORTEST = 2.0**-24  # part of a step below which there is no descent along it
_FIRST_LOOK = 2  # evaluations before the outputs of a piecewise-linear network are looked at, and then at each doubling
_EARLY = 8  # up to here outputs may stand still because steps were refused: the next step must then be short as well
_FAR = 3.0  # a response this many times as long as its first step is followed from ε = 0
_FARTHEST = 10.0  # and one this long is let go
_STAGE = 64  # evaluations in one step of that continuation
_FINEST = 1 / 64  # of ε: the smallest step of that continuation
_HURRY = 16  # evaluations of a first round over many blocks: what takes longer is put off, and done together
_OUTPUT_NOISE = 4.0  # units of rounding in which the outputs of two passes differ by chance. A guess.


class Ending(Enum):
    """Why the work on a response stopped; the value is the sentence for humans."""

    GRADIENT = "converged: the relative gradient reached the tolerance"
    SETTLED = "converged: on kinks of the network; the second half of the work did not move its outputs"
    ZERO = "the removed rows have no gradient, or no weight is taken off them; nothing moves"
    LINEAR = "converged: so small that it is its first Gauss-Newton step"
    STEPS = "reached max_steps before the tolerance"
    STAGNATED = "no descent left along the step, and not settled"
    CURVATURE = "negative curvature along the last step: not a minimum"
    LEFT = "left the basin"
    RESOLUTION = "below the resolution of the parameters; this is its first Gauss-Newton step (use float64)"

    @property
    def ok(self) -> bool:
        return self in (Ending.GRADIENT, Ending.SETTLED, Ending.ZERO, Ending.LINEAR)


@dataclass(frozen=True, eq=False)
class Answer:
    """Responses δ (R, d), and for each why the work on it stopped and how far it came."""

    shift: Float[Tensor, "R d"]
    relative_gradient: Float[Tensor, " R"]
    endings: tuple[Ending, ...]
    words: tuple[str, ...]
    evaluations: tuple[int, ...]
    late: tuple[int, ...] = ()  # those that a hurried round put off


def proximal_bregman(
    task: Task,
    damping: float,
    removals: Sequence[Sequence[int]],
    epsilon: float,
    settings: GaussNewton,
    memory_limit: int | None = None,
) -> Answer:
    """The local minimisers of the proximal Bregman objective on the branch that starts at θˢ, one a removal."""
    rtol = settings.rtol or (1e-6 if task.dtype == torch.float64 else 1e-3)
    matrix = LeftOut.of(task, damping, memory_limit)
    passes, kinked = Stack.of(task), has_kinks(task)
    settings = replace(settings, rtol=rtol)
    shift = task.flat.new_zeros(len(removals), task.size)
    relative = torch.zeros(len(removals), dtype=torch.float64)
    endings, words = [Ending.STEPS] * len(removals), [""] * len(removals)
    evaluations = [0] * len(removals)

    def work_on(places: Sequence[int], what: str, *, hurried: bool) -> list[int]:
        """Those of the places that are not done, after a round over all of them."""
        late = []
        blocks = matrix.blocks([removals[place] for place in places])
        hurried = hurried and len(blocks) > 1 and settings.max_steps > _HURRY
        for block in track(blocks, what):
            chosen = [places[k] for k in block]
            work = _Work(task, damping, [removals[place] for place in chosen], epsilon, passes, matrix)
            answer = work.run(settings, kinked, hurried=hurried and len(block) > 1)
            shift[chosen], relative[chosen] = answer.shift, answer.relative_gradient
            for k, place in enumerate(chosen):
                endings[place], words[place] = answer.endings[k], answer.words[k]
                evaluations[place] += answer.evaluations[k]
            late += [chosen[k] for k in answer.late]
        return late

    # One hard removal would hold up all that share a block with it; the hard ones then share blocks of their own.
    late = work_on(range(len(removals)), "Removals by Gauss-Newton", hurried=True)
    if late:
        work_on(late, "Removals that take longer", hurried=False)
    return Answer(shift, relative, tuple(endings), tuple(words), tuple(evaluations))


# -- the network ----------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


_KINKS = {
    *("relu", "relu_", "threshold", "leaky_relu", "leaky_relu_", "prelu", "_prelu_kernel", "rrelu_with_noise"),
    *("hardtanh", "hardtanh_", "hardswish", "hardsigmoid", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max"),
    *("abs", "maximum", "minimum", "max", "min", "amax", "amin", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("max_pool2d", "adaptive_max_pool2d", "adaptive_max_pool3d", "softshrink", "hardshrink", "floor", "round", "sort"),
}


def has_kinks(task: Task) -> bool:
    """Whether the network is made with operations that are not differentiable everywhere."""
    inputs, _ = task.rows.read(torch.arange(1))
    with task.evaluating(), torch.no_grad(), _Operations() as seen:
        task.forward(task.params, inputs)
    return bool(seen.names & _KINKS)


# -- the matrix -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LeftOut:
    """A_S⁻¹ v, each vector with a set S of its own: through the kernel of the outputs where it fits, else by CG."""

    task: Task
    damping: float
    dual: DualState | None
    budget: Budget

    @classmethod
    def of(cls, task: Task, damping: float, memory_limit: int | None) -> "LeftOut":
        budget = Budget(task.device, memory_limit)
        operator = Damped(GaussNewtonMatrix(task, memory_limit=memory_limit), damping)
        try:
            return cls(task, damping, Dual().init(operator), budget)
        except MemoryLimit:
            return cls(task, damping, None, budget)

    def blocks(self, removals: Sequence[Sequence[int]]) -> list[list[int]]:
        """Removals that are worked on together: those of one size, as many as fit; a large group is alone."""
        one = (2 * _MEMORY + 10) * self.task.size * self.task.dtype.itemsize
        room = max(1, int(0.3 * self.budget.available()) // one)
        sizes: dict[int, list[int]] = {}
        for place, group in enumerate(removals):
            sizes.setdefault(len(group), []).append(place)
        blocks = []
        for size, places in sizes.items():
            at_once = 1 if self.dual is None or self._own_factor(size) else min(room, 64)
            blocks += [[places[k] for k in some.tolist()] for some in chunks(torch.arange(len(places)), at_once)]
        return blocks

    def _own_factor(self, size: int) -> bool:
        assert self.dual is not None
        return 8 * size * self.task.root_size > len(self.dual.gram)

    def ready(self, removals: Sequence[Sequence[int]]) -> "_Ready":
        if self.dual is None:
            return _ByCG(self.task, self.damping, removals)
        roots = self.task.root_size
        device = self.dual.gram.device
        where = torch.tensor([list(group) for group in removals], device=device)
        where = (where[:, :, None] * roots + torch.arange(roots, device=device)).flatten(1)  # (R, s)
        if self._own_factor(len(removals[0])):
            return _ByOwnFactor(self.dual, where[0])
        return _ByCorrection(self.dual, where)


class _Ready:
    def solve(self, vectors: Float[Tensor, "k d"], which: Sequence[int]) -> Float[Tensor, "k d"]:
        """A_S⁻¹ v, vector by vector for the removals `which`."""
        raise NotImplementedError


class _ByCorrection(_Ready):
    r"""With M = μN I + K and E the columns of the removed rows, y = M⁻¹b − M⁻¹E (Eᵀ M⁻¹ E)⁻¹ Eᵀ M⁻¹ b is zero on them
    and solves the other rows' own system."""

    def __init__(self, dual: DualState, where: Tensor) -> None:
        self.dual, self.where = dual, where
        count, size = where.shape
        unit = torch.zeros(len(dual.gram), count * size, dtype=torch.float64, device=where.device)
        unit[where.flatten(), torch.arange(count * size, device=where.device)] = 1.0
        self.columns = dual.inverse(unit).T.unflatten(0, (count, size))  # (R, s, m)
        self.inner = self.columns.gather(2, where[:, None, :].expand(-1, size, -1))  # (R, s, s)

    def solve(self, vectors: Tensor, which: Sequence[int]) -> Tensor:
        chosen = torch.tensor(which, device=self.where.device)
        y = self.dual.inverse(self.dual.seen(vectors).T).T
        inside = y.gather(1, self.where[chosen])
        weights = torch.linalg.solve(self.inner[chosen], inside.unsqueeze(2)).squeeze(2)
        y = y - torch.einsum("ks,ksm->km", weights, self.columns[chosen])
        return self.dual.combine(vectors, y)


class _ByOwnFactor(_Ready):
    """One removal of many rows: the kernel of the other rows, factored anew."""

    def __init__(self, dual: DualState, where: Tensor) -> None:
        self.dual = dual
        kept = torch.ones(len(dual.gram), dtype=torch.bool, device=where.device)
        kept[where] = False
        self.kept = kept.nonzero().flatten()
        matrix = dual.gram[self.kept][:, self.kept]
        matrix.diagonal().add_(dual.shift * len(dual.curvature.task))
        self.factor = torch.linalg.cholesky(matrix)

    def solve(self, vectors: Tensor, which: Sequence[int]) -> Tensor:
        y = torch.zeros(len(vectors), len(self.dual.gram), dtype=torch.float64, device=vectors.device)
        y[:, self.kept] = torch.cholesky_solve(self.dual.seen(vectors)[:, self.kept].T, self.factor).T
        return self.dual.combine(vectors, y)


class _ByCG(_Ready):
    """Where the kernel does not fit: one removal at a time, its rows at weight zero."""

    def __init__(self, task: Task, damping: float, removals: Sequence[Sequence[int]]) -> None:
        self.solver: Solver = CG(rtol=1e-8 if task.dtype == torch.float64 else 1e-4)
        self.states = []
        for group in removals:
            weights = torch.ones(len(task), dtype=torch.float64, device=task.device)
            weights = weights if task.weights is None else task.weights.clone()
            weights[list(group)] = 0.0
            self.states.append(self.solver.init(Damped(GaussNewtonMatrix(task.with_weights(weights)), damping)))

    def solve(self, vectors: Tensor, which: Sequence[int]) -> Tensor:
        parts = [
            self.solver.compute(self.states[k], vector[None]).value for k, vector in zip(which, vectors, strict=True)
        ]
        return torch.cat(parts)


# -- the work -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Point:
    """Where each replica is: δ, P, ∇P."""

    shift: Tensor
    value: Tensor
    gradient: Tensor

    def at(self, which: list[int]) -> "_Point":
        return _Point(self.shift[which], self.value[which], self.gradient[which])

    def put(self, which: list[int], other: "_Point", rows: list[int]) -> None:
        for name in ("shift", "value", "gradient"):
            getattr(self, name)[which] = getattr(other, name)[rows]


class _Work:
    """One block of removals."""

    def __init__(
        self,
        task: Task,
        damping: float,
        removals: Sequence[Sequence[int]],
        epsilon: float,
        passes: Stack,
        matrix: LeftOut,
    ) -> None:
        self.task, self.passes, self.epsilon = task, passes, epsilon
        self.penalty = damping + task.l2
        self.count = len(removals)
        self.matrix = matrix.ready(removals)
        self.removed = torch.zeros(self.count, len(task), dtype=torch.float64)
        for place, group in enumerate(removals):
            self.removed[place, list(group)] = 1.0
        self.removed = self.removed.to(task.device)
        work = 0.2 * matrix.budget.available() / max(1, self.count + 1)
        self.rows = int(max(1, min(len(task), work // task.row_bytes)))
        self.flat = task.flat

    # -- the objective

    def evaluate(
        self, shift: Float[Tensor, "k d"], which: list[int], scale: Float[Tensor, " k"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k d"]]:
        """P and ∇P of the replicas `which` at ε times `scale`."""
        task, short = self.task, self.passes.at_least - len(which)
        if short > 0:  # a companion, whose numbers nobody reads
            again = [which[0]] * short
            value, gradient = self.evaluate(
                torch.cat([shift, shift[:1].expand(short, -1)]),
                which + again,
                torch.cat([scale, scale[:1].expand(short)]),
            )
            return value[: len(which)], gradient[: len(which)]
        value = torch.zeros(len(which), dtype=torch.float64, device=task.device)
        gradient = self.penalty * shift
        value += 0.5 * self.penalty * dot(shift, shift)
        positions = stack(task, len(which), self.flat + shift)
        for leaf in positions.values():
            leaf.requires_grad_()
        with task.evaluating():
            for index in chunks(torch.arange(len(task)), self.rows):
                inputs, targets = task.rows.read(index)
                removed = self.removed[which][:, index.to(task.device)] * (self.epsilon * scale)[:, None]
                held = 1 / len(task) - removed
                weights = task.weights_of(index)
                if weights is not None:
                    held, removed = held * weights, removed * weights
                still = self._still(inputs, len(which))
                for block in self.passes.blocks(len(which)):
                    some = {name: leaf[block] for name, leaf in positions.items()}
                    outputs = self.passes.outputs(some, {}, inputs, shared=True)
                    shape = outputs.shape
                    y, s = outputs.detach().flatten(0, 1).double(), still[: shape[0]].flatten(0, 1).double()
                    t = targets.expand(shape[0], *targets.shape).flatten(0, 1)
                    slope = task.output_gradient(s, t)
                    moved = (slope * (y - s)).flatten(1).sum(1).unflatten(0, shape[:2])
                    apart = task.divergences(y, s, t).unflatten(0, shape[:2])
                    value[block] += (held[block] * apart - removed[block] * moved).sum(1)
                    tail = [1] * (len(shape) - 2)
                    a, m = (each[block].reshape(*each[block].shape, *tail) for each in (held, removed))
                    change = task.output_change(y, s, t).unflatten(0, shape[:2])
                    seeds = (a * change - m * slope.unflatten(0, shape[:2])).to(outputs.dtype)
                    grads = torch.autograd.grad(outputs, list(some.values()), seeds, allow_unused=True)
                    parts = [
                        torch.zeros_like(leaf) if grad is None else grad
                        for leaf, grad in zip(some.values(), grads, strict=True)
                    ]
                    gradient[block] += torch.cat([grad.flatten(1) for grad in parts], 1)
        return value, gradient

    def _still(self, inputs: Inputs, count: int) -> Tensor:
        """f(θˢ), riding along through the kernels that the replicas pass, so that at θ = θˢ the difference is 0."""
        alone = count if self.passes.batched else 1
        with torch.no_grad():
            outputs = self.passes.outputs(stack(self.task, alone), {}, inputs, shared=True)
        return outputs.expand(count, *outputs.shape[1:])

    # -- from θˢ to the response

    def run(self, settings: GaussNewton, kinked: bool, *, hurried: bool = False) -> Answer:
        """From θˢ to every response; hurried, only to those that a few evaluations reach."""
        if hurried:
            settings = replace(settings, max_steps=_HURRY)
        late: list[int] = []
        which = list(range(self.count))
        one = torch.ones(self.count, dtype=torch.float64, device=self.task.device)
        zero = self.flat.new_zeros(self.count, len(self.flat))
        start = _Point(zero, *self.evaluate(zero, which, one))
        self.size = norms(start.gradient)  # ε ‖Σ_S ∇L‖
        endings: dict[int, Ending] = {k: Ending.ZERO for k in which if self.size[k] == 0}
        words: dict[int, str] = {}
        self.evaluations = [1] * self.count
        shift, relative = zero.clone(), torch.zeros(self.count, dtype=torch.float64)
        moving = [k for k in which if k not in endings]
        if moving:
            shift[moving] = -self.matrix.solve(start.gradient[moving], moving)  # the Gauss-Newton step from θˢ
            self.first = norms(shift)
            assert settings.rtol is not None
            lost = self._lost(shift[moving], settings.rtol)
            # In float64 what rounding hides is far smaller than any bend of the network: nothing is lost.
            hidden = Ending.LINEAR if self.task.dtype == torch.float64 else Ending.RESOLUTION
            endings |= {k: hidden for k, gone in zip(moving, lost.tolist(), strict=True) if gone}
            going = [k for k in moving if k not in endings]
            found = (
                self._descend(start.at(going), going, one[going], settings, kinked, endings) if going else start.at([])
            )
            for place, k in enumerate(going):
                far = bool(norms(found.shift[place : place + 1]) > _FAR * self.first[k])
                # Far from done after all its steps: perhaps on the way out.
                astray = endings[k] is Ending.STEPS and bool(
                    norms(found.gradient[place : place + 1]) > self.size[k] / 2
                )
                hard = far or astray or endings[k] in (Ending.LEFT, Ending.CURVATURE, Ending.STAGNATED)
                if hurried and (hard or endings[k] is Ending.STEPS):
                    late.append(k)
                elif hard:
                    found.put([place], self._follow(k, start, settings, kinked, endings, words), [0])
            shift[going] = found.shift
            relative[moving] = (norms(self.evaluate(shift[moving], moving, one[moving])[1]) / self.size[moving]).cpu()
        known = tuple(endings[k] for k in which)
        said = tuple(words.get(k, ending.value) for k, ending in enumerate(known))
        return Answer(shift, relative, known, said, tuple(self.evaluations), tuple(late))

    def _lost(self, shift: Float[Tensor, "k d"], rtol: float) -> Bool[Tensor, " k"]:
        """Whether rounding hides a response at this tolerance: θˢ + δ changes δ, or the outputs' own their movement."""
        eps = torch.finfo(self.task.dtype).eps
        held = (self.flat + shift).double() - self.flat.double()
        coarse = norms(held - shift.double()) > rtol * norms(shift)
        start = self._outputs(torch.zeros_like(shift))[:1]
        moved = (self._outputs(shift) - start).double().flatten(1).norm(dim=1)
        return coarse | (moved < _OUTPUT_NOISE / rtol * eps * start.double().norm())

    def _follow(
        self,
        k: int,
        start: _Point,
        settings: GaussNewton,
        kinked: bool,
        endings: dict[int, Ending],
        words: dict[int, str],
    ) -> _Point:
        """The branch from ε = 0 in steps that stay short; `left the basin` where it cannot be followed to ε."""
        at, share, stride = start.at([k]), 0.0, 0.25
        stage = replace(settings, max_steps=min(settings.max_steps, _STAGE))
        rate = float(self.first[k])  # how far the response moves a unit of share, at first
        while share < 1:
            goal = min(1.0, share + stride)
            scale = torch.full((1,), goal, dtype=torch.float64, device=self.task.device)
            here = _Point(at.shift, *self.evaluate(at.shift, [k], scale))
            trial = self._descend(here, [k], scale, stage, kinked, endings)
            moved = float(norms(trial.shift - at.shift))
            if endings[k].ok and moved <= _FAR * rate * (goal - share):
                rate = moved / (goal - share)
                at, share, stride = trial, goal, min(2 * stride, 0.25)
                continue
            stride /= 2
            if stride < _FINEST:
                endings[k] = Ending.LEFT
                words[k] = (
                    f"{Ending.LEFT.value}: the branch from θˢ could be followed to {share:.2f} of ε = "
                    f"{self.epsilon:.3g} only; nothing holds the removed rows' outputs beyond it (raise the damping)"
                )
                break
        return at

    def _descend(
        self,
        point: _Point,
        which: list[int],
        scale: Float[Tensor, " k"],
        settings: GaussNewton,
        kinked: bool,
        endings: dict[int, Ending],
    ) -> _Point:
        """Descent from a point; why it stopped goes into `endings`."""
        assert settings.rtol is not None
        count, rtol = len(which), settings.rtol
        memory = _Memory(count, self.flat, min(_MEMORY, settings.max_steps))
        direction = self._direction(memory, point, which, list(range(count)))
        stride = torch.ones(count, dtype=torch.float64, device=self.task.device)
        # Where the value is rounding noise, the gradient decides.
        noise = torch.finfo(self.task.dtype).eps ** 0.5 * dot(point.gradient, -direction).abs()
        refused = [0] * count
        done: dict[int, Ending] = {
            place: Ending.GRADIENT
            for place, left in enumerate((norms(point.gradient) / self.size[which]).tolist())
            if left <= rtol
        }
        look, seen = _FIRST_LOOK, None
        for evaluation in range(1, settings.max_steps + 1):
            active = [place for place in range(count) if place not in done]
            if not active:
                break
            now, rows = point.at(active), [which[place] for place in active]
            moved = stride[active].to(now.shift.dtype)[:, None] * direction[active]
            trial = _Point(now.shift + moved, *self.evaluate(now.shift + moved, rows, scale[active]))
            slope, bent = dot(now.gradient, moved), dot(trial.gradient - now.gradient, moved)
            before, after = (norms(each.gradient) / self.size[rows] for each in (now, trial))
            fine = (trial.value <= now.value + 1e-4 * slope) | ((slope.abs() <= noise[active]) & (after <= before))
            teaches = bent > 1e-5 * slope.abs()
            far = norms(trial.shift) > _FARTHEST * self.first[rows]
            memory.add(active, moved, trial.gradient - now.gradient, bent, teaches)
            anew = []
            measured = (fine, teaches, far | ~trial.value.isfinite(), after, bent)
            for row, (good, new, lost, left, bending) in enumerate(zip(*(x.tolist() for x in measured), strict=True)):
                place = active[row]
                self.evaluations[which[place]] += 1
                if good and lost:
                    done[place] = Ending.LEFT
                elif good:
                    point.put([place], trial, [row])
                    stride[place], refused[place] = 1.0, 0
                    anew.append(place)
                    if left <= rtol:
                        done[place] = Ending.GRADIENT if bending > 0 else Ending.CURVATURE
                else:
                    refused[place] += 1
                    if new:
                        anew.append(place)
                        stride[place] = min(1.0, 2.0 ** (2 - refused[place]))
                    else:
                        stride[place] /= 2
                    if float(stride[place]) < _SHORTEST:
                        done[place] = Ending.STAGNATED
            anew = [place for place in anew if place not in done]
            if anew:
                direction[anew] = self._direction(memory, point, which, anew)
            if kinked and evaluation == look:
                short = norms(direction) <= settings.settle * norms(point.shift)
                may = [evaluation > _EARLY or close for close in short.tolist()]
                look, seen = 2 * look, self._settled(point, which, seen, settings.settle, may, done)
        for place, k in enumerate(which):
            endings[k] = done.get(place, Ending.STEPS)
        return point

    def _direction(self, memory: "_Memory", point: _Point, which: list[int], places: list[int]) -> Tensor:
        return -memory.apply(places, point.gradient[places], lambda v: self.matrix.solve(v, [which[p] for p in places]))

    def _settled(
        self,
        point: _Point,
        which: list[int],
        seen: Tensor | None,
        part: float,
        may: list[bool],
        done: dict[int, Ending],
    ) -> Tensor:
        """Outputs now, (k, N, outputs); what may, and has moved by no more than a part of the response, is done."""
        outputs = self._outputs(point.shift)
        if seen is not None:
            start = self._outputs(torch.zeros_like(point.shift))[:1]
            moved, response = ((outputs - other).norm(dim=2).mean(1) for other in (seen, start))
            for place, small in enumerate((moved <= part * response).tolist()):
                if small and may[place] and place not in done:
                    done[place] = Ending.SETTLED
        return outputs

    def _outputs(self, shift: Tensor) -> Float[Tensor, "k N o"]:
        short = self.passes.at_least - len(shift)
        if short > 0:
            return self._outputs(torch.cat([shift, shift[:1].expand(short, -1)]))[: len(shift)]
        params, parts = stack(self.task, len(shift), self.flat + shift), []
        with self.task.evaluating(), torch.no_grad():
            for index in chunks(torch.arange(len(self.task)), self.rows):
                inputs, _ = self.task.rows.read(index)
                parts.append(self.passes.outputs(params, {}, inputs, shared=True).flatten(2))
        return torch.cat(parts, 1)


class _Memory:
    """Changes of the gradient for each replica, newest first in a ring, and the BFGS matrix H that they make."""

    def __init__(self, count: int, like: Tensor, slots: int) -> None:
        self.slots = slots
        shape = (count, slots, len(like))
        self.steps, self.changes = like.new_zeros(shape), like.new_zeros(shape)
        self.inverse = torch.zeros(count, slots, dtype=torch.float64, device=like.device)  # 1 / (step · change)
        self.count = [0] * count

    def add(self, places: list[int], steps: Tensor, changes: Tensor, bent: Tensor, teaches: Tensor) -> None:
        for row, new in enumerate(teaches.tolist()):
            if new:
                place = places[row]
                slot = self.count[place] % self.slots
                self.steps[place, slot], self.changes[place, slot] = steps[row], changes[row]
                self.inverse[place, slot] = 1 / bent[row]
                self.count[place] += 1

    def apply(self, places: list[int], vectors: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """H v: the two loops of Nocedal and Wright, algorithm 7.4, around A_S⁻¹."""
        depth = min(self.slots, max((self.count[place] for place in places), default=0))
        chosen = torch.tensor(places, device=vectors.device)
        slots, known = [], []
        for age in range(depth):
            slots.append(torch.tensor([(self.count[p] - 1 - age) % self.slots for p in places], device=vectors.device))
            held = torch.tensor([age < min(self.slots, self.count[p]) for p in places], device=vectors.device)
            known.append(self.inverse[chosen, slots[age]] * held)
        v, shares = vectors.clone(), []
        for slot, inverse in zip(slots, known, strict=True):
            shares.append(inverse * dot(self.steps[chosen, slot], v))
            v -= shares[-1].to(v.dtype)[:, None] * self.changes[chosen, slot]
        v = base(v)
        for slot, inverse, share in zip(reversed(slots), reversed(known), reversed(shares), strict=True):
            left = share - inverse * dot(self.changes[chosen, slot], v)
            v = v + left.to(v.dtype)[:, None] * self.steps[chosen, slot]
        return v
