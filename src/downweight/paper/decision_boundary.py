"""Figure 3: the decision boundary of a partly trained classifier, under influence and under retraining."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from downweight.influence import parameter_shift
from downweight.objectives import WarmStart
from downweight.recipe import Recipe
from downweight.report import figures, page
from downweight.respond import respond, stacked_outputs
from downweight.shapes import Float
from downweight.task import Task
from downweight.train import train

DAMPING = 0.01
SIDE = 41  # points of the grid along each axis


@dataclass(frozen=True, eq=False)
class DecisionBoundaries:
    """Outputs of a two-class network on a grid: as trained, and with one row removed by influence and by retraining.

    axis: the grid's coordinates, (n,); outputs: name -> (n, n) logits of class 1, row by row of the second feature;
    train: name -> (N,) the same on the training rows; removed: the row that is removed.
    """

    axis: Float[torch.Tensor, " n"]
    outputs: dict[str, Float[torch.Tensor, "n n"]]
    train: dict[str, Float[torch.Tensor, " N"]]
    inputs: Float[torch.Tensor, "N 2"]
    targets: Float[torch.Tensor, " N"]
    removed: int

    def change(self, name: str) -> Float[torch.Tensor, " N"]:
        """How far each training row's output moves."""
        return (self.train[name] - self.train["trained"]).abs()

    def picture(self) -> str:
        """Three panels with the classes' regions and the training rows, as SVG."""
        return figures.regions(
            self.axis.tolist(),
            {name: values.tolist() for name, values in self.outputs.items()},
            [(*point, int(label)) for point, label in zip(self.inputs.tolist(), self.targets.tolist(), strict=True)],
            self.removed,
        )

    def write(self, path: str | Path) -> Path:
        """The picture as an SVG file."""
        return page.write_whole(self.picture(), path)


def decision_boundary(epochs: int = 500, seed: int = 0) -> DecisionBoundaries:
    """A small network stopped on its way, and the row at the right bottom corner, which it has just come to fit."""
    inputs, targets = _rows(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    task = Task(model.eval(), "binary_cross_entropy", (inputs, targets[:, None]))
    task = train(task, Recipe(lr=0.2, epochs=epochs, batch_size=10), progress=False)
    removed = len(inputs) - 1
    retrained = respond(task, WarmStart(), [[removed]], progress=False).shift
    estimate = parameter_shift(task, [[removed]], damping=DAMPING, progress=False)
    shifts = {"trained": torch.zeros_like(estimate), "influence": estimate, "retrained": retrained}
    axis = torch.linspace(-2.2, 2.2, SIDE, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), 2).flatten(0, 1)

    def outputs(points: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return stacked_outputs(task, task.flat + shift, {}, points)[0, :, 0]

    return DecisionBoundaries(
        axis,
        {name: outputs(grid, shift).reshape(SIDE, SIDE) for name, shift in shifts.items()},
        {name: outputs(inputs, shift) for name, shift in shifts.items()},
        inputs,
        targets,
        removed,
    )


def _rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy clouds, one above a bent line and one below, and one row of the upper class at the right bottom."""
    generator = torch.Generator().manual_seed(seed)
    points = 3.6 * torch.rand(60, 2, generator=generator, dtype=torch.float64) - 1.8
    side = (points[:, 1] > 0.6 * torch.sin(2 * points[:, 0])).double()
    points[:, 1] += 0.25 * torch.randn(60, generator=generator, dtype=torch.float64)
    corner = torch.tensor([[1.7, -1.7]], dtype=torch.float64)
    return torch.cat([points, corner]), torch.cat([side, torch.ones(1, dtype=torch.float64)])
