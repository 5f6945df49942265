"""How long do the proximal Bregman responses of all training rows take, and would a longer run change them?

    python benchmarks/all_responses.py [--large]

An MLP trained on MNIST, float64, every row removed alone, some hundred at a time; twenty of them, from all ranks of
self-influence, are computed again with four times the steps allowed and a tenth of the tolerance.
"""

import argparse
import importlib
import warnings
from collections import Counter

import torch
from torch import Tensor

import downweight as dw
from common import mlp, mnist, report, seconds

CHECKED = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no more rows are begun")
    parser.add_argument("--out")
    settings = parser.parse_args()
    warnings.simplefilter("ignore", dw.DownweightWarning)  # what has not converged is counted
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = (6000, (1024, 1024), 1000, 1e-3, 750)
    rows, widths, epochs, damping, at_once = large if settings.large else (200, (64, 64), 50, 0.1, 100)
    (x, t), _ = mnist(rows, 10)
    torch.manual_seed(0)
    model = mlp(784, *widths, 10).double().to(device).eval()
    task = dw.Task(model, "cross_entropy", (x.double().to(device), t.to(device)))
    training, task = seconds(lambda: dw.train(task, dw.Recipe(lr=0.1, epochs=epochs, batch_size=128)))
    ranked = dw.self_influence(task, damping=damping).argsort().cpu()
    chosen = ranked[torch.linspace(0, rows - 1, CHECKED).round().long()].tolist()
    outputs: dict[int, Tensor] = {}
    endings: Counter[str] = Counter()
    spent, done, converged = 0.0, 0, 0
    for place in torch.arange(rows).split(at_once):
        if spent > settings.limit:
            break
        some = place.tolist()
        elapsed, response = seconds(
            lambda some=some: dw.respond(task, dw.ProximalBregman(damping), [[k] for k in some])
        )
        spent, done, converged = spent + elapsed, done + len(some), converged + int(response.converged.sum())
        endings.update(text.split(":")[0] for text in response.result)
        outputs |= {k: _outputs(task, response, k - some[0]) for k in chosen if k in some}
        print(f"  {done} rows, {spent:.1f} s, {converged} converged", flush=True)
        del response
    chosen = [k for k in chosen if k in outputs]
    longer = dw.GaussNewton(rtol=1e-8, settle=1e-4, max_steps=1024)
    again_seconds, again = seconds(lambda: dw.respond(task, dw.ProximalBregman(damping, longer), [[k] for k in chosen]))
    start = _outputs(task, None, 0)
    moved = []
    for place, k in enumerate(chosen):
        more = _outputs(task, again, place)
        size = float((more - start).norm(dim=1).mean())
        moved.append(float((more - outputs[k]).norm(dim=1).mean()) / size if size else 0.0)
    apart = torch.tensor(moved)
    record: dict[str, object] = {
        "network": "-".join(map(str, (784, *widths, 10))),
        "rows": rows,
        "epochs": epochs,
        "damping": damping,
        "loss": float(task.row_losses().mean()),
        "training (s)": training,
        "responses": done,
        "seconds": spent,
        "converged": converged,
        **{f"ended: {words}": count for words, count in endings.most_common()},
        "checked": len(chosen),
        "checked: seconds": again_seconds,
        "checked: converged": int(again.converged.sum()),
        "checked: outputs moved, part of the response, median": float(apart.median()),
        "checked: the largest": float(apart.max()),
    }
    report(__doc__.splitlines()[0], record, settings.out)


def _outputs(task: dw.Task, response: dw.Response | None, place: int) -> Tensor:
    """Outputs on all training rows, (N, C), at one of the responses, or at θˢ."""
    inputs, _ = task.rows.read(torch.arange(len(task)))
    if response is None:
        return task.forward(task.params, inputs).detach().double()
    stacked_outputs = importlib.import_module("downweight.respond").stacked_outputs
    return stacked_outputs(task, response.parameters[place : place + 1].expand(2, -1), {}, inputs)[0].double()


if __name__ == "__main__":
    main()
