"""What does a Gauss-Newton product cost, in gradients of the mean loss over the same rows?

    python benchmarks/product.py [--large]

The gradient is one forward and one backward pass of the same network in the same process; each
side takes turns, so that a slow spell of the machine hits them all.
"""

import argparse

import torch
from torch import nn

import downweight as dw
from common import alternating, mlp, mnist, report, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out")
    settings = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(2)
    widths, rows = ((784, 1024, 1024, 10), 6000) if settings.large else ((784, 256, 256, 10), 1000)
    train, _ = mnist(rows, 10)
    inputs, targets = (part.to(device) for part in train)
    for dtype in (torch.float32, torch.float64):
        model = mlp(*widths).to(device, dtype).eval()
        x = inputs.to(dtype)
        task = dw.Task(model, "cross_entropy", (x, targets))
        operator = dw.GaussNewtonMatrix(task)
        params = list(model.parameters())
        generator = torch.Generator(device).manual_seed(0)
        one = torch.randn(1, task.size, device=device, dtype=dtype, generator=generator)
        many = torch.randn(20, task.size, device=device, dtype=dtype, generator=generator)

        def gradient(model=model, params=params, x=x) -> None:
            torch.autograd.grad(nn.functional.cross_entropy(model(x), targets), params)

        record: dict[str, object] = {
            "network": "-".join(map(str, widths)),
            "rows": rows,
            "dtype": str(dtype).removeprefix("torch."),
        }
        record["set-up, with the first product (s)"] = seconds(lambda: operator @ one)[0]  # noqa: B023
        sides = [gradient, lambda: operator @ one, lambda: operator @ many]  # noqa: B023
        try:
            from curvlinops import GGNLinearOperator

            peer = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, targets)], check_deterministic=False)
            vector, vectors = one[0], many.T.contiguous()
            sides += [lambda: peer @ vector, lambda: peer @ vectors]  # noqa: B023
        except ImportError:
            pass
        times = alternating(*sides)
        record["gradient (ms)"] = 1e3 * times[0]
        record["one vector (gradients)"] = times[1] / times[0]
        record["20 vectors (gradients a vector)"] = times[2] / times[0] / 20
        if len(times) > 3:
            record["curvlinops: one vector (gradients)"] = times[3] / times[0]
            record["curvlinops: 20 vectors (gradients a vector)"] = times[4] / times[0] / 20
        report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
