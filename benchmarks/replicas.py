"""How much faster is one training step of many replicas than as many steps of single models?

    python benchmarks/replicas.py [--large]

Against plain eager PyTorch steps of the same network. Both sides take the same SGD steps in this process, in turns.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import downweight as dw
from common import alternating, mlp, report
from downweight.stack import Stack, stack
from downweight.train import Gradient, Problem, Steps

BATCH = 128


def ours(task: dw.Task, count: int) -> Callable[[], None]:
    """One step of `count` replicas, each with another row removed, in one shared order."""
    problem = Problem(task, "cost", 0.0, [[row] for row in range(count)], 1 / len(task))
    passes = Stack.of(task)
    leaves = {name: value.requires_grad_() for name, value in stack(task, count).items()}
    steps = Steps(Gradient(problem, passes), dw.Recipe(lr=1e-3, epochs=1, batch_size=BATCH), leaves, {})
    index = torch.arange(BATCH, device=task.device)

    def step() -> None:
        with task.evaluating():
            steps(index)

    return step


def singles(model: nn.Module, data: tuple[Tensor, Tensor], count: int) -> Callable[[], None]:
    """A step of `count` models, one after the other, in plain eager PyTorch."""
    x, t = (part[:BATCH] for part in data)
    models = [copy.deepcopy(model) for _ in range(count)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]

    def steps() -> None:
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(each(x), t).backward()
            optimizer.step()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out")
    settings = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths, counts = ((784, 1024, 1024, 10), (20, 100)) if settings.large else ((8, 128, 128, 10), (20,))
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(600, widths[0], generator=generator).to(device),
        torch.randint(0, 10, (600,), generator=generator).to(device),
    )
    model = mlp(*widths).to(device).eval()
    task = dw.Task(model, "cross_entropy", data)
    record: dict[str, object] = {"network": "-".join(map(str, widths)), "batch": BATCH, "dtype": "float32"}
    for count in counts:
        mine, theirs = alternating(ours(task, count), singles(model, data, count))
        record[f"{count} replicas: ours (ms)"] = 1e3 * mine
        record[f"{count} replicas: eager steps (ms)"] = 1e3 * theirs
        record[f"{count} replicas: times faster"] = theirs / mine
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
