"""A network's outputs linearised at its parameters: J v and J^T u for many vectors at once."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from downweight.errors import InvalidInput
from downweight.shapes import Float, Shaped

Forward = Callable[[dict[str, Tensor]], Tensor]


def flatten(parts: Sequence[Tensor | None], like: Sequence[Tensor], count: int) -> Tensor:
    """(K, d) from one (K, *shape) a parameter, zero where a parameter plays no part."""
    columns = [
        template.new_zeros(count, template.numel()) if part is None else part.reshape(count, -1)
        for part, template in zip(parts, like, strict=True)
    ]
    return torch.cat(columns, dim=1)


def unflatten(vectors: Float[Tensor, "K d"], like: Sequence[Tensor]) -> list[Tensor]:
    """One (K, *shape) view a parameter."""
    pieces = vectors.split([template.numel() for template in like], dim=1)
    return [piece.reshape(len(vectors), *template.shape) for piece, template in zip(pieces, like, strict=True)]


@contextlib.contextmanager
def quiet_batching() -> Iterator[None]:
    """Without torch's advice that an operation is batched by a loop: the numbers are the same, and nobody asked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


def batched_grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Vector-Jacobian products for K seeds, each (K, *shape of its output); the graph stays."""
    count = len(seeds[0])
    if count > 1:
        try:
            with quiet_batching():
                return torch.autograd.grad(
                    outputs,
                    inputs,
                    seeds,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # An operation without a batching rule: one vector after the other, same numbers.
            pass
    results = [
        torch.autograd.grad(
            outputs,
            inputs,
            [seed[k] for seed in seeds],
            retain_graph=True,
            allow_unused=True,
        )
        for k in range(count)
    ]
    if count == 1:  # a view: the gradient of one vector need not be there twice
        return [None if part is None else part.unsqueeze(0) for part in results[0]]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True)]


class Linearization:
    r"""y(θ) ≈ y + J (θ - θˢ) for one chunk of rows; the forward pass is paid once.

    Reverse mode gives u -> J^T u with a graph, and that map is linear in u, so that its own
    reverse mode is v -> J v: no forward-mode rules are needed, and both directions reuse the
    activations. With a cotangent g(y) the same pass also gives (g . ∇²f) v, the part of a Hessian
    that Gauss-Newton leaves out.
    """

    def __init__(
        self,
        forward: Forward,
        params: dict[str, Tensor],
        cotangent: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._leaves = [value.detach().requires_grad_() for value in params.values()]
        with torch.enable_grad():
            self._outputs = forward(dict(zip(params, self._leaves, strict=True)))
            if not self._outputs.requires_grad:
                raise InvalidInput(
                    "The outputs do not depend on the chosen parameters through autograd. Check "
                    "that forward() does not detach or use torch.no_grad(), and `parameters`."
                )
            self.outputs = self._outputs.detach()
            seed = torch.zeros_like(self.outputs) if cotangent is None else cotangent(self.outputs)
            self._cotangent = seed.to(self.outputs.dtype).requires_grad_()
            pulled = torch.autograd.grad(
                self._outputs,
                self._leaves,
                self._cotangent,
                create_graph=True,
                allow_unused=True,
            )
        self._used = [place for place, part in enumerate(pulled) if part is not None]
        self._pulled = [pulled[place] for place in self._used]

    def push(self, vectors: Float[Tensor, "K d"]) -> Shaped[Tensor, "K B *out"]:
        """J v for every vector."""
        pushed = batched_grad(self._pulled, [self._cotangent], self._tangents(vectors))[0]
        return self._filled(pushed, len(vectors))

    def push_and_bend(self, vectors: Float[Tensor, "K d"]) -> tuple[Shaped[Tensor, "K B *out"], Float[Tensor, "K d"]]:
        """J v and (g . ∇²f) v, g the cotangent that the linearisation was made with."""
        pushed, *bent = batched_grad(self._pulled, [self._cotangent, *self._leaves], self._tangents(vectors))
        return self._filled(pushed, len(vectors)), flatten(bent, self._leaves, len(vectors))

    def pull(self, cotangents: Shaped[Tensor, "K B *out"]) -> Float[Tensor, "K d"]:
        """J^T u, summed over the rows, for every cotangent."""
        cotangents = cotangents.to(self.outputs.dtype)
        parts = batched_grad([self._outputs], self._leaves, [cotangents])
        return flatten(parts, self._leaves, len(cotangents))

    def _filled(self, pushed: Tensor | None, count: int) -> Tensor:
        return self.outputs.new_zeros(count, *self.outputs.shape) if pushed is None else pushed

    def _tangents(self, vectors: Tensor) -> list[Tensor]:
        pieces = unflatten(vectors, self._leaves)
        return [pieces[place] for place in self._used]
