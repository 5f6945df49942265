"""The same scores by other libraries, each by its own documented road."""

import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Pair = tuple[Tensor, Tensor]


def kronfluence_ekfac(model: nn.Module, train: Pair, queries: Pair, damping: float) -> Tensor:
    """EK-FAC scores of kronfluence, (Q, N)."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            if not sample:
                return nn.functional.cross_entropy(logits, batch[1], reduction="sum")
            labels = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
            return nn.functional.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    task = Classification()
    held = TensorDataset(*(part.cpu() for part in train))
    asked = TensorDataset(*(part.cpu() for part in queries))
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("benchmark", prepare_model(model, task), task, disable_tqdm=True, output_dir=folder)
        analyzer.fit_all_factors(
            "ekfac",
            held,
            per_device_batch_size=1024,
            factor_args=FactorArguments(strategy="ekfac"),
            overwrite_output_dir=True,
        )
        analyzer.compute_pairwise_scores(
            "pairs",
            "ekfac",
            asked,
            held,
            per_device_query_batch_size=256,
            per_device_train_batch_size=1024,
            score_args=ScoreArguments(damping_factor=damping),
            overwrite_output_dir=True,
        )
        return analyzer.load_pairwise_scores("pairs")["all_modules"]


def _gradients(model: nn.Module, rows: Pair, parts: Iterable[str]) -> Tensor:
    """Per-row gradients (n, d) by torch.func, as a user of curvlinops would form them."""
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (x[None],))
        return nn.functional.cross_entropy(logits, t[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, *rows)
    return torch.cat([gradients[name].flatten(1) for name in parts], 1)


def _contract(solutions: Tensor, model: nn.Module, train: Pair, names: list[str]) -> Tensor:
    parts = zip(*(part.split(250) for part in train), strict=True)
    columns = [solutions.T @ _gradients(model, part, names).T for part in parts]
    return torch.cat(columns, 1) / len(train[1])


def curvlinops_cg(model: nn.Module, train: Pair, queries: Pair, damping: float, tolerance: float) -> Tensor:
    """Scores by curvlinops' Gauss-Newton operator and its block CG for all queries, (Q, N)."""
    from curvlinops import CGInverseLinearOperator, GGNLinearOperator
    from curvlinops.examples import IdentityLinearOperator

    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    data = list(zip(*(part.split(2000) for part in train), strict=True))
    ggn = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False)
    identity = IdentityLinearOperator([value.shape for value in params], train[0].device, train[0].dtype)
    inverse = CGInverseLinearOperator(
        ggn + damping * identity, eps=0, tolerance=tolerance, max_iter=1000, max_tridiag_iter=0
    )
    solutions = inverse @ _gradients(model, queries, names).T.contiguous()
    return _contract(solutions, model, train, names)


def curvlinops_ekfac(model: nn.Module, train: Pair, queries: Pair, damping: float) -> Tensor:
    """Scores by curvlinops' EK-FAC of the same rows, (Q, N)."""
    from curvlinops import EKFACLinearOperator, FisherType, KFACInverseLinearOperator

    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    data = list(zip(*(part.split(2000) for part in train), strict=True))
    ekfac = EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        params,
        data,
        fisher_type=FisherType.TYPE2,
        check_deterministic=False,
    )
    inverse = KFACInverseLinearOperator(ekfac, damping=damping, use_exact_damping=True)
    solutions = inverse @ _gradients(model, queries, names).T.contiguous()
    return _contract(solutions, model, train, names)
