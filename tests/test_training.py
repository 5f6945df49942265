"""The one training loop: it is the plain PyTorch loop, each replica is itself, and a stopped run goes on."""

import copy
import importlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import downweight as dw
import oracles
from oracles import LOSSES, train_plainly
from unchecked import downweight as unchecked
from untouched import untouched

loop: Any = importlib.import_module("downweight.train")  # the module; dw.train is the function

ROWS, BATCH = 13, 5  # two full batches and one of three rows
REMOVALS = [[3], [1, 12, 5], [7, 8]]

# Both sides add the same terms in another order, some 30 steps long: a few hundred roundings of 1e-16 each. Adam
# divides by the root of its second moment, which is no more than the gradients' own relative error.
SAME: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "momentum": {"lr": 0.1, "momentum": 0.8},
    "nesterov": {"lr": 0.1, "momentum": 0.8, "nesterov": True},
    "adam": {"lr": 0.02, "optimizer": "adam", "betas": (0.8, 0.95), "eps": 1e-6},
    "adamw": {"lr": 0.02, "optimizer": "adamw", "weight_decay": 0.1},
    "step": {"lr": 0.3, "schedule": "step", "milestones": (1, 3), "decay": 0.3},
    "cosine": {"lr": 0.1, "momentum": 0.5, "schedule": "cosine"},
}


def recipe_of(name: str, **changes: Any) -> dw.Recipe:
    return dw.Recipe(**{"epochs": 4, "batch_size": BATCH, "seed": 5, **OPTIMIZERS[name], **changes})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def network(kind: str) -> tuple[nn.Module, Tensor]:
    """A model in eval mode and its inputs, both float64."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        if kind == "cnn":
            layers = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 3)]
            model, inputs = nn.Sequential(*layers), torch.randn(ROWS, 1, 4, 4)
        elif kind == "attention":
            model, inputs = Attention(), torch.randn(ROWS, 3, 4)
        elif kind == "encoder":
            layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
            model, inputs = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)), torch.randn(ROWS, 3, 4)
        else:
            layers: list[nn.Module] = {
                "mlp": [nn.Linear(4, 6), nn.Tanh()],
                "relu": [nn.Linear(4, 6), nn.ReLU()],
                "wide": [nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 6)],
                "batchnorm": [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()],
            }[kind]
            model, inputs = nn.Sequential(*layers, nn.Linear(6, 3)), torch.randn(ROWS, 4)
        return model.double().eval(), inputs.double()


def targets_of(loss: str) -> Tensor:
    generator = torch.Generator().manual_seed(12)
    if loss == "cross_entropy":
        return torch.randint(3, (ROWS,), generator=generator)
    return torch.rand(ROWS, 3, generator=generator, dtype=torch.float64)


SETTINGS: dict[str, Any] = {
    "l2": 0.02,
    "loss_scale": 0.7,
    "weights": torch.linspace(0.0, 2.0, ROWS, dtype=torch.float64),
}


def task_of(kind: str = "mlp", loss: str = "cross_entropy", **settings: Any) -> dw.Task:
    model, inputs = network(kind)
    return dw.Task(model, loss=loss, train=(inputs, targets_of(loss)), **settings)


@lru_cache
def trained(kind: str, name: str) -> dw.Task:
    """A base run, once; tests only read it."""
    return dw.train(task_of(kind, l2=0.01), recipe_of(name, epochs=2))


def plain_value(
    loss: str = "cross_entropy",
    *,
    inputs: Tensor,
    l2: float = 0.0,
    loss_scale: float = 1.0,
    weights: Tensor | None = None,
    removed: list[int] | None = None,
    epsilon: float = 1 / ROWS,
    exact: bool = False,
    damping: float = 0.0,
    near: nn.Module | None = None,
) -> Callable[[nn.Module, Tensor], Tensor]:
    """What a batch of the plain loop minimises: written from design.md, section 2."""
    targets, removed = targets_of(loss), removed or []
    weights = torch.ones(ROWS).double() if weights is None else weights

    def losses(model: nn.Module, rows: Tensor) -> Tensor:
        return weights[rows] * loss_scale * LOSSES[loss](model(inputs[rows]), targets[rows])

    def value(model: nn.Module, rows: Tensor) -> Tensor:
        each = losses(model, rows)
        if exact:
            total = each.sum() / len(rows)
            if removed:
                total = total - epsilon * losses(model, torch.tensor(removed)).sum()
        else:
            kept = [1 - epsilon * ROWS if row in removed else 1.0 for row in rows.tolist()]
            total = (torch.tensor(kept, dtype=torch.float64) * each).sum() / len(rows)
        total = total + 0.5 * l2 * sum(p.square().sum() for p in model.parameters())
        if near is not None:
            pairs = zip(model.parameters(), near.parameters(), strict=True)
            total = total + 0.5 * damping * sum((p - q.detach()).square().sum() for p, q in pairs)
        return total

    return value


def torch_optimizer(recipe: dw.Recipe) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    settings: dict[str, Any] = {"lr": recipe.lr}
    if recipe.optimizer == "sgd":
        return lambda params: torch.optim.SGD(params, momentum=recipe.momentum, nesterov=recipe.nesterov, **settings)
    settings |= {"betas": recipe.betas, "eps": recipe.eps}
    if recipe.optimizer == "adam":
        return lambda params: torch.optim.Adam(params, **settings)
    return lambda params: torch.optim.AdamW(params, weight_decay=recipe.weight_decay, **settings)


def plainly(
    model: nn.Module, value: Callable[[nn.Module, Tensor], Tensor], recipe: dw.Recipe, epochs: range, **changes: Any
) -> nn.Module:
    """`train_plainly` with a recipe's optimiser, rates and orders; `own` is (first epoch, removal) of an own order."""
    start, group = changes.get("own", (len(epochs) + epochs.start, ()))
    return train_plainly(
        model,
        value,
        torch_optimizer(recipe),
        epochs,
        lambda epoch: recipe.order(ROWS, epoch, tuple(group) if epoch >= start else None),
        changes.get("rate", recipe.rate),
        recipe.batch_size or ROWS,
    )


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


# the base run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_plain_loop(name):
    """Penalty, row weights, loss_scale, a ragged last batch: the same parameters as torch.optim on the model itself."""
    task, recipe = task_of(**SETTINGS), recipe_of(name)
    value = plain_value(inputs=network("mlp")[1], **SETTINGS)
    plain = plainly(task.model, value, recipe, range(recipe.epochs))
    assert (vector(plain) - vector(task.model)).norm() > 0.05  # it went somewhere
    assert_close(dw.train(task, recipe).flat, vector(plain), **SAME)


@pytest.mark.parametrize("loss", ["squared_error", "binary_cross_entropy"])
def test_training_on_other_losses_in_one_batch(loss):
    task, recipe = task_of(loss=loss, **SETTINGS), recipe_of("sgd", batch_size=None)
    plain = plainly(task.model, plain_value(loss, inputs=network("mlp")[1], **SETTINGS), recipe, range(recipe.epochs))
    assert_close(dw.train(task, recipe).flat, vector(plain), **SAME)


def test_schedules_in_closed_form():
    """Beyond K a cosine repeats its second half, so that responses of K/2 epochs train on at the rates of the end."""
    cosine = dw.Recipe(lr=2.0, epochs=4, schedule="cosine")
    half = 0.5**0.5
    expected = [2.0, 1 + half, 1.0, 1 - half, 1.0, 1 - half]
    assert_close(torch.tensor([cosine.rate(epoch) for epoch in range(6)]), torch.tensor(expected))
    step = dw.Recipe(lr=2.0, epochs=4, schedule="step", milestones=(1, 3), decay=0.1)
    assert [round(step.rate(epoch), 12) for epoch in range(6)] == [2.0, 0.2, 0.2, 0.02, 0.02, 0.02]
    assert [dw.Recipe(lr=1.0, epochs=k).more_epochs for k in (1, 2, 5)] == [1, 1, 3]


def test_batch_norm_learns_its_statistics_in_the_base_run():
    """Parameters and running statistics are those of the model in train mode."""
    task, recipe = task_of("batchnorm"), recipe_of("momentum")
    model = copy.deepcopy(task.model).train()
    plain = plainly(model, plain_value(inputs=network("batchnorm")[1]), recipe, range(recipe.epochs))
    result = dw.train(task, recipe)
    found, expected = result.state_dict(), plain.state_dict()
    assert found["1.num_batches_tracked"] == expected["1.num_batches_tracked"] == 12
    for name, value in expected.items():
        assert_close(found[name], value, **SAME)


def test_frozen_parameters_stay_and_only_the_chosen_train():
    task = task_of(parameters=["2.weight"])
    result, before = dw.train(task, recipe_of("sgd")).state_dict(), task.model.state_dict()
    moved = [name for name in before if not torch.equal(result[name], before[name])]
    assert moved == ["2.weight"]


# L-BFGS compares values, and sees no decrease below 1e-16 of them: parameters are certain to the root of that.
LBFGS: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-7}


def linear(features: int, seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(features, 1, bias=False).double()


def test_lbfgs_finds_the_ridge_solution():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    task = dw.Task(linear(5, 1), loss="squared_error", train=(features, targets), l2=0.1, weights=weights)
    result = dw.train(task, dw.Recipe(optimizer="lbfgs", lr=1.0, epochs=30))
    assert_close(result.flat, oracles.ridge(features, targets[:, 0], 0.1, weights), **LBFGS)


def test_lbfgs_finds_the_logistic_optimum():
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    targets = (torch.rand(30, generator=generator) < 0.4).double()
    task = dw.Task(linear(4, 2), loss="binary_cross_entropy", train=(features, targets), l2=0.05)
    result = dw.train(task, dw.Recipe(optimizer="lbfgs", lr=1.0, epochs=40))
    assert_close(result.flat, oracles.Logistic(features, targets, 0.05).optimum(), **LBFGS)


@pytest.mark.parametrize("kind", ["mlp", "attention", "cnn", "batchnorm"])
def test_the_given_model_is_left_as_it_was(kind):
    model, inputs = network(kind)
    model[0].train() if isinstance(model, nn.Sequential) else model.train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    task = dw.Task(model, loss="cross_entropy", train=(inputs, targets_of("cross_entropy")))
    with untouched(model):
        result = dw.train(task, recipe_of("adam"))
    with untouched(model):
        for objective in (dw.ColdStart(), dw.WarmStart(), dw.TwoStage(), dw.Proximal(0.1)):
            dw.respond(result, objective, REMOVALS)
    with untouched(model), pytest.raises(dw.NonFinite):
        dw.train(dw.Task(model, "squared_error", (inputs, torch.ones(ROWS, 3))), recipe_of("sgd", lr=1e200))


def test_dropout_leaves_the_global_random_numbers_alone():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double().eval()
    task = dw.Task(model, "cross_entropy", (network("mlp")[1], targets_of("cross_entropy")))
    with untouched(model):
        with_it = dw.train(task, recipe_of("sgd", dropout=True, epochs=2))
    again = dw.train(task, recipe_of("sgd", dropout=True, epochs=2))
    without = dw.train(task, recipe_of("sgd", epochs=2))
    assert torch.equal(with_it.flat, again.flat)
    assert not torch.allclose(with_it.flat, without.flat)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])  # together and one by one
def test_dropout_is_the_same_in_a_replica_alone(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double().eval()
        image = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 3)).double().eval()
    net = model if kind == "mlp" else image
    task = dw.Task(net, "cross_entropy", (network(kind)[1], targets_of("cross_entropy")))
    task = task.with_recipe(recipe_of("sgd", dropout=True), initial=net.state_dict())
    for order in ("shared", "independent"):
        assert_alone_is_the_same(task, dw.WarmStart(), batch_order=order)


def test_the_answer_remembers_where_it_came_from():
    task, recipe = task_of("batchnorm"), recipe_of("momentum")
    result = dw.train(task, recipe)
    assert task.origin is None
    assert result.origin is not None
    assert result.origin.recipe == recipe
    assert result.origin.state is not None
    for name, value in network("batchnorm")[0].state_dict().items():
        assert torch.equal(result.origin.state[name], value)
    loaded, inputs = network("batchnorm")
    loaded.load_state_dict(result.state_dict())
    assert_close(loaded(inputs).detach(), result.outputs(inputs), rtol=1e-12, atol=1e-13)
    given = task.with_state(result.state_dict()).with_recipe(recipe, initial=network("batchnorm")[0].state_dict())
    cold = [dw.respond(each, dw.ColdStart(), [[2]]).parameters for each in (result, given)]
    assert torch.equal(*cold)


def test_a_run_is_repeated_bit_for_bit_and_another_seed_is_another_run():
    runs = [dw.train(task_of(), recipe_of("momentum", seed=seed)).flat for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.allclose(runs[0], runs[2])


# replicas


def assert_alone_is_the_same(task: dw.Task, objective: Any, **settings: Any) -> None:
    together = dw.respond(task, objective, REMOVALS, **settings)
    for place, group in enumerate(REMOVALS):
        alone = dw.respond(task, objective, [group], **settings)
        assert torch.equal(together.parameters[place], alone.parameters[0]), (objective, group)
        for name, value in together.buffers.items():
            assert torch.equal(value[place], alone.buffers[name][0]), name
    assert len({tuple(row.tolist()) for row in together.parameters}) == len(REMOVALS)


@pytest.mark.slow
@pytest.mark.parametrize("batch_order", ["shared", "independent"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "attention", "encoder", "batchnorm"])
def test_a_replica_is_the_same_alone(kind, name, batch_order):
    task = trained(kind, name)
    for objective in (dw.ColdStart(), dw.WarmStart()):
        assert_alone_is_the_same(task, objective, batch_order=batch_order)


@pytest.mark.parametrize("objective", [dw.TwoStage(), dw.Proximal(0.1), dw.ProximalBregman(0.1, optimizer="recipe")])
def test_a_replica_is_the_same_alone_under_every_objective(objective):
    for batch_order in ("shared", "independent"):
        assert_alone_is_the_same(trained("mlp", "momentum"), objective, batch_order=batch_order)
    assert_alone_is_the_same(trained("mlp", "momentum"), objective, exact_removal=True)


@pytest.mark.parametrize("batch_order", ["shared", "independent"])
@pytest.mark.parametrize("width", [16, 17])
def test_a_replica_is_the_same_at_any_place_among_many(width, batch_order):
    """To the last digits: MKL chooses a product's road by the address of its factors, and so by a replica's place.

    Twelve steps with a rounding each; a removal that leaked into its neighbours would show at 1e-3.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 3)).double().eval()
        inputs, targets = torch.randn(39, 7).double(), torch.randint(3, (39,))
    task = dw.Task(model, "cross_entropy", (inputs, targets)).with_recipe(dw.Recipe(lr=0.1, epochs=4, batch_size=13))
    together = dw.respond(task, dw.WarmStart(), [[row] for row in range(12)], batch_order=batch_order)
    for row in (3, 10):
        alone = dw.respond(task, dw.WarmStart(), [[row]], batch_order=batch_order)
        torch.testing.assert_close(together.parameters[row], alone.parameters[0], rtol=1e-12, atol=1e-14)


def test_a_replica_of_a_wide_network_is_the_same_alone():
    """Above 300,000 parameters replicas pass one by one on a CPU."""
    task = dw.train(task_of("wide"), recipe_of("momentum", epochs=1, batch_size=None))
    assert task.size > 300_000
    for batch_order in ("shared", "independent"):
        assert_alone_is_the_same(task, dw.WarmStart(), batch_order=batch_order)


def test_a_memory_limit_splits_replicas_and_changes_nothing():
    task = trained("mlp", "adam")
    whole = dw.respond(task, dw.WarmStart(), REMOVALS)
    split = dw.respond(task, dw.WarmStart(), REMOVALS, memory_limit=12_000)
    assert torch.equal(whole.parameters, split.parameters)


# batch order


def test_the_order_is_a_function_of_seed_epoch_and_removal():
    recipe, other = recipe_of("sgd"), recipe_of("adam", batch_size=2)
    for epoch in range(3):
        order = recipe.order(50, epoch)
        assert torch.equal(order.sort().values, torch.arange(50))
        assert torch.equal(order, other.order(50, epoch))  # of nothing else in the recipe
        torch.manual_seed(epoch)  # nor of the global random state
        assert torch.equal(recipe.order(50, epoch, (4, 2)), recipe.order(50, epoch, (2, 4)))
    orders = [recipe.order(50, 0), recipe.order(50, 1), replace(recipe, seed=6).order(50, 0)]
    orders += [recipe.order(50, 0, group) for group in ((), (3,), (4,), (3, 4))]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


def test_independent_orders_differ_between_removals_and_shared_ones_do_not():
    """At ε = 0 nothing is removed, and all that is left of a removal is its order."""
    task = trained("mlp", "sgd")
    shared, independent = (
        dw.respond(task, dw.WarmStart(), REMOVALS, epsilon=0.0, batch_order=order).parameters
        for order in ("shared", "independent")
    )
    assert torch.equal(shared[0], shared[1])
    assert torch.equal(shared[0], shared[2])
    apart = torch.cdist(independent, independent)[*torch.triu_indices(3, 3, 1)]
    assert bool((apart > 1e-4).all())


def test_an_order_belongs_to_the_removal_and_not_to_its_place():
    task = trained("mlp", "momentum")
    for objective in (dw.ColdStart(), dw.TwoStage()):
        one = dw.respond(task, objective, [[3], [1, 12, 5]], batch_order="independent").parameters
        two = dw.respond(task, objective, [[12, 5, 1], [7], [3]], batch_order="independent").parameters
        assert torch.equal(one[0], two[2])
        assert torch.equal(one[1], two[0])


# responses by the recipe


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("batch_order", ["shared", "independent"])
@pytest.mark.parametrize("name", ["momentum", "adam", "cosine"])
def test_responses_are_the_plain_loop(name, batch_order, exact):
    """Cold, warm and proximal, the optimiser started anew for each; removal as a weight of zero, or as its exact term.

    A cold start takes its first K epochs in the base run's order, whatever the rest.
    """
    recipe = recipe_of(name)
    task = dw.train(task_of(**SETTINGS), recipe)
    model, inputs = network("mlp")
    at_start = copy.deepcopy(model)
    at_start.load_state_dict(task.state_dict())
    late, group = range(4, 6), [1, 12, 5]
    for objective, start, epochs, held in (
        (dw.ColdStart(), model, range(6), {}),
        (dw.WarmStart(), at_start, late, {}),
        (dw.Proximal(damping=0.3), at_start, late, {"damping": 0.3, "near": at_start}),
    ):
        value = plain_value(inputs=inputs, removed=group, exact=exact, **held, **SETTINGS)
        own = {"own": (4, group)} if batch_order == "independent" else {}
        plain = plainly(start, value, recipe, epochs, **own)
        found = dw.respond(task, objective, [[3], group], batch_order=batch_order, exact_removal=exact)
        assert_close(found.parameters[1], vector(plain), **SAME)
        assert_close(found.shift, found.parameters - task.flat, rtol=0, atol=1e-15)
        without = plainly(start, plain_value(inputs=inputs, **held, **SETTINGS), recipe, epochs, **own)
        assert (vector(without) - vector(plain)).norm() > 1e-4  # the removal is seen


def test_any_epsilon_is_the_plain_loop():
    """ε of either sign, other than 1/N; ε = 0 is training on."""
    recipe, (model, inputs) = recipe_of("momentum"), network("mlp")
    task = dw.train(task_of(**SETTINGS), recipe)
    model.load_state_dict(task.state_dict())
    for epsilon in (0.0, -0.05, 0.2):
        value = plain_value(inputs=inputs, removed=[3], epsilon=epsilon, **SETTINGS)
        plain = plainly(model, value, recipe, range(4, 6))
        found = dw.respond(task, dw.WarmStart(), [[3]], epsilon=epsilon)
        assert_close(found.parameters[0], vector(plain), **SAME)


def test_a_cold_start_of_epsilon_zero_passes_through_the_base_run():
    """Its K epochs are those that led to θˢ: training on from there with plain SGD, which remembers nothing, agrees."""
    task = trained("mlp", "sgd")
    cold, warm = (dw.respond(task, o, REMOVALS, epsilon=0.0) for o in (dw.ColdStart(), dw.WarmStart()))
    assert torch.equal(cold.parameters, warm.parameters)


@pytest.mark.parametrize("linear", [False, True])
def test_proximal_bregman_by_the_recipe_is_the_plain_loop(linear):
    """At a tenth of the rate; the fidelity of a batch is written out, with nothing taken from the package.

    The steps are 1e-3 long and both sides round at 1e-16 of parameters of size one.
    """
    recipe, (model, inputs) = recipe_of("momentum"), network("mlp")
    task = dw.train(task_of(**SETTINGS), recipe)
    model.load_state_dict(task.state_dict())
    at_start, targets, group, damping = copy.deepcopy(model), targets_of("cross_entropy"), [1, 12, 5], 0.2
    weights, scale = SETTINGS["weights"], SETTINGS["loss_scale"]
    dense = oracles.Oracle(at_start, LOSSES["cross_entropy"], inputs, targets)
    jacobians = torch.stack([dense.jacobian(row) for row in range(ROWS)])

    def parts(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Fidelity and removal term of each row."""
        start = at_start(inputs[rows]).detach().requires_grad_()
        at = LOSSES["cross_entropy"](start, targets[rows])
        (slope,) = torch.autograd.grad(at.sum(), start)
        if not linear:
            outputs = model(inputs[rows])
            losses = LOSSES["cross_entropy"](outputs, targets[rows])
            return losses - at.detach() - (slope * (outputs - start.detach())).sum(1), losses
        moved = jacobians[rows] @ (parameters_to_vector(model.parameters()) - vector(at_start))
        p = start.detach().softmax(-1)
        curved = 0.5 * ((p * moved.square()).sum(1) - (p * moved).sum(1).square())
        return curved, (slope * moved).sum(1)

    def value(model: nn.Module, rows: Tensor) -> Tensor:
        fidelity, removal = parts(model, rows)
        hit = torch.tensor([1.0 if row in group else 0.0 for row in rows.tolist()]).double()
        each = weights[rows] * scale * (fidelity - hit * removal)  # ε N = 1
        pairs = zip(model.parameters(), at_start.parameters(), strict=True)
        distance = sum((p - q.detach()).square().sum() for p, q in pairs)
        return each.sum() / len(rows) + 0.5 * (damping + SETTINGS["l2"]) * distance

    plain = plainly(model, value, recipe, range(4, 6), rate=lambda epoch: 0.1 * recipe.rate(epoch))
    kind = dw.LinearizedProximalBregman if linear else dw.ProximalBregman
    found = dw.respond(task, kind(damping, optimizer="recipe"), [group])
    assert_close(found.shift[0], vector(plain) - vector(at_start), rtol=1e-10, atol=1e-14)
    assert found.shift.norm() > 1e-4


def test_batch_norm_in_responses():
    """A cold start learns its statistics in train mode; what starts at θˢ keeps those of θˢ, and says so."""
    recipe, (model, inputs) = recipe_of("momentum"), network("batchnorm")
    task = dw.train(task_of("batchnorm"), recipe)
    value = plain_value(inputs=inputs, removed=[3])
    cold = dw.respond(task, dw.ColdStart(), [[3], [5]])
    plain = plainly(copy.deepcopy(model).train(), value, recipe, range(6))
    assert_close(cold.parameters[0], vector(plain), **SAME)
    assert_close(cold.buffers["1.running_var"][0], plain.state_dict()["1.running_var"], **SAME)
    assert_close(cold.outputs(inputs)[0], plain.eval()(inputs).detach(), **SAME)
    model.load_state_dict(task.state_dict())
    warm = dw.respond(task, dw.WarmStart(), [[3], [5]])
    plain = plainly(model, value, recipe, range(4, 6))
    assert_close(warm.parameters[0], vector(plain), **SAME)
    assert_close(warm.outputs(inputs)[0], plain(inputs).detach(), **SAME)
    assert any("statistics" in note for note in warm.notes)
    assert not any("statistics" in note for note in cold.notes)
    with pytest.raises(dw.InvalidInput, match="batch norm"):
        dw.respond(task, dw.ColdStart(), [[3]], exact_removal=True)


def test_batch_norm_with_a_cumulative_average_trains():
    """momentum=None reads the count of batches as a number, which vmap cannot."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)).double().eval()
    inputs = network("mlp")[1]
    task, recipe = dw.Task(model, "cross_entropy", (inputs, targets_of("cross_entropy"))), recipe_of("sgd")
    plain = plainly(copy.deepcopy(model).train(), plain_value(inputs=inputs), recipe, range(4))
    assert_close(dw.train(task, recipe).state_dict(), dict(plain.state_dict()), **SAME)


# a run that was stopped


class Killed(BaseException):
    pass


@pytest.fixture
def killed_after(monkeypatch) -> Callable[[int], None]:
    """Checkpoints after every epoch, and an end after the `n`-th; 0 never ends."""
    original = loop.Keep.epoch

    def set_up(epochs: int) -> None:
        left = [epochs]

        def epoch(self: Any, *arguments: Any) -> None:
            self.every = 0.0
            original(self, *arguments)
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        monkeypatch.setattr(loop.Keep, "epoch", epoch)

    return set_up


@pytest.mark.parametrize("kind", ["mlp", "batchnorm"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_killed_base_run_goes_on_to_the_same_bits(tmp_path, killed_after, monkeypatch, kind, name):
    task, recipe, folder = task_of(kind), recipe_of(name), tmp_path / "run"
    whole = dw.train(task, recipe)
    for after in (1, 2):  # twice: epochs 0, and 1 to 2
        killed_after(after)
        with pytest.raises(Killed):
            dw.train(task, recipe, checkpoint=folder)
    epochs = []
    monkeypatch.setattr(loop.Run, "order", _noting(loop.Run.order, epochs))
    killed_after(0)
    result = dw.train(task, recipe, checkpoint=folder)
    assert epochs == [3]  # what was done is not done again
    for one, two in zip(result.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert result.origin is not None
    assert result.origin.state is not None
    assert torch.equal(result.origin.state["0.weight"], network(kind)[0].state_dict()["0.weight"])


def _noting(original: Callable, epochs: list[int]) -> Callable:
    def order(self: Any, epoch: int) -> Tensor:
        epochs.append(epoch)
        return original(self, epoch)

    return order


@pytest.mark.parametrize("objective", [dw.ColdStart(), dw.WarmStart(), dw.TwoStage(), dw.Proximal(0.1)])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_killed_response_goes_on_to_the_same_bits(tmp_path, killed_after, name, objective):
    task, folder = dw.train(task_of("batchnorm"), recipe_of(name)), tmp_path / "run"
    settings: dict[str, Any] = {"batch_order": "independent"}
    whole = dw.respond(task, objective, REMOVALS, **settings)
    killed_after(3 if isinstance(objective, dw.TwoStage) else 1)
    with pytest.raises(Killed):
        dw.respond(task, objective, REMOVALS, checkpoint=folder, **settings)
    killed_after(0)
    result = dw.respond(task, objective, REMOVALS, checkpoint=folder, **settings)
    assert torch.equal(result.parameters, whole.parameters)
    assert torch.equal(result.outputs(network("batchnorm")[1]), whole.outputs(network("batchnorm")[1]))


def test_a_finished_run_is_read_and_not_run_again(tmp_path, monkeypatch):
    task, recipe = task_of("batchnorm"), recipe_of("momentum")
    base = dw.train(task, recipe, checkpoint=tmp_path / "base")
    cold = dw.respond(base, dw.ColdStart(), REMOVALS, checkpoint=tmp_path / "cold")
    bregman = dw.respond(base, dw.ProximalBregman(0.5), REMOVALS, checkpoint=tmp_path / "bregman")

    def never(*_: Any) -> Any:
        raise AssertionError("this was finished before")

    monkeypatch.setattr(loop.Gradient, "batch", never)
    monkeypatch.setattr("downweight.proximal._Work.run", never)
    again = dw.train(task, recipe, checkpoint=tmp_path / "base")
    for one, two in zip(again.state_dict().values(), base.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    read = dw.respond(again, dw.ColdStart(), REMOVALS, checkpoint=tmp_path / "cold")
    assert torch.equal(read.parameters, cold.parameters)
    assert torch.equal(read.outputs(network("batchnorm")[1]), cold.outputs(network("batchnorm")[1]))
    read = dw.respond(again, dw.ProximalBregman(0.5), REMOVALS, checkpoint=tmp_path / "bregman")
    assert torch.equal(read.parameters, bregman.parameters)
    assert read.result == bregman.result


SCRIPT = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
import conftest, test_training as t
import downweight as dw

original, left = t.loop.Keep.epoch, [2]

def epoch(self, *arguments):
    self.every = 0.0
    original(self, *arguments)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)

t.loop.Keep.epoch = epoch
dw.train(t.task_of(), t.recipe_of("adam"), checkpoint={folder!r})
"""


@pytest.mark.slow
def test_kill_dash_nine(tmp_path):
    """Another process, really killed, continued in this one."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run"))
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["epoch"] == 2
    result = dw.train(task_of(), recipe_of("adam"), checkpoint=tmp_path / "run")
    assert torch.equal(result.flat, dw.train(task_of(), recipe_of("adam")).flat)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    task, recipe, folder = task_of(), recipe_of("sgd"), tmp_path / "run"
    base = dw.train(task, recipe, checkpoint=folder)
    other = task.with_parameters(task.flat + 1e-9)
    for asked, by in ((task, replace(recipe, seed=6)), (task, replace(recipe, epochs=5)), (other, recipe)):
        with pytest.raises(dw.ForeignResult, match="recipe" if asked is task else "task"):
            dw.train(asked, by, checkpoint=folder)
    folder = tmp_path / "warm"
    dw.respond(base, dw.WarmStart(), [[3], [4]], checkpoint=folder)
    for changes in ({"remove": [[3], [5]]}, {"epsilon": 0.1}, {"batch_order": "independent"}, {"exact_removal": True}):
        with pytest.raises(dw.ForeignResult):
            dw.respond(base, dw.WarmStart(), checkpoint=folder, **{"remove": [[3], [4]], **changes})
    folder = tmp_path / "bregman"
    dw.respond(base, dw.ProximalBregman(0.5), [[3], [4]], checkpoint=folder)
    for objective, remove in ((dw.ProximalBregman(0.6), [[3], [4]]), (dw.ProximalBregman(0.5), [[3]])):
        with pytest.raises(dw.ForeignResult):
            dw.respond(base, objective, remove, checkpoint=folder)


def test_a_cold_start_from_another_start_is_another_run(tmp_path):
    """θ⁰ is no part of θˢ: the same trained model with another θ⁰ must not read the first one's checkpoint."""
    task, recipe = task_of(), recipe_of("sgd")
    base = dw.train(task, recipe)
    dw.respond(base, dw.ColdStart(), [[3]], checkpoint=tmp_path / "cold")
    moved = {name: value + 0.1 for name, value in task.model.state_dict().items()}
    with pytest.raises(dw.ForeignResult):
        dw.respond(base.with_recipe(recipe, initial=moved), dw.ColdStart(), [[3]], checkpoint=tmp_path / "cold")


@pytest.mark.parametrize("damage", ["no meta", "cut short", "one bit", "no epoch", "an array less", "not JSON"])
def test_a_damaged_checkpoint_says_so(tmp_path, killed_after, damage):
    task, recipe, folder = task_of(), recipe_of("adam"), tmp_path / "run"
    killed_after(2)
    with pytest.raises(Killed):
        dw.train(task, recipe, checkpoint=folder)
    meta, shard = folder / "meta.json", sorted(folder.glob("state-0-exp_avg-*.safetensors"))[0]
    held = json.loads(meta.read_text())
    if damage == "no meta":
        meta.unlink()
    elif damage == "cut short":
        shard.write_bytes(shard.read_bytes()[:-3])
    elif damage == "one bit":
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)
    elif damage == "no epoch":
        del held["epoch"]
        meta.write_text(json.dumps(held))
    elif damage == "an array less":
        del held["arrays"]["leaf-1"]
        meta.write_text(json.dumps(held))
    else:
        meta.write_text(meta.read_text()[:100])
    with pytest.raises(dw.DamagedResult):
        dw.train(task, recipe, checkpoint=folder)


# errors before hours are spent


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e150},  # infinite after the first epoch
        {"lr": 1e3, "epochs": 60},  # somewhere on the way
        {"lr": 1e200, "epochs": 1, "batch_size": None},  # finite parameters of an infinite cost
        {"optimizer": "lbfgs", "batch_size": None, "lr": 1e305},
    ],
    ids=repr,
)
def test_a_rate_too_large_names_itself(changes):
    with pytest.raises(dw.NonFinite, match="lr"):
        dw.train(task_of(loss="squared_error"), recipe_of("sgd", **changes))


def test_a_cost_that_rose_is_said():
    with pytest.warns(dw.DownweightWarning, match=r"raised the cost.*lr = 5"):
        dw.train(task_of(loss="squared_error", l2=0.1), recipe_of("sgd", epochs=1, lr=5.0))


def test_a_response_that_diverged_is_no_minimum():
    """One removal of several, at an ε that turns the row's loss into a well without a bottom."""
    task = dw.train(task_of(loss="squared_error"), recipe_of("sgd", epochs=30, lr=0.05))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)
        found = dw.respond(task, dw.WarmStart(), [[3], [4]], epsilon=-1e30)
    assert not found.converged.any()
    assert all("diverged" in words for words in found.result)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgdm"},
        {"optimizer": None},
        {"schedule": "linear"},
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"lr": "0.1"},
        {"lr": True},
        {"epochs": 0},
        {"epochs": -3},
        {"epochs": 2.5},
        {"seed": -1},
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"nesterov": True},
        {"optimizer": "adam", "momentum": 0.9},
        {"weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": -0.1},
        {"optimizer": "lbfgs", "batch_size": 8},
        {"optimizer": "lbfgs", "schedule": "cosine"},
        {"schedule": "step"},
        {"milestones": (3,)},
        {"schedule": "step", "milestones": (3,), "decay": float("nan")},
        {"schedule": "step", "milestones": (2.5,)},
        {"schedule": "step", "milestones": (-1,)},
        {"schedule": "step", "milestones": 3},
        {"optimizer": "adam", "betas": (0.9,)},
        {"optimizer": "adam", "betas": (0.9, 1.0)},
        {"optimizer": "adam", "betas": (-0.1, 0.9)},
        {"optimizer": "adam", "betas": None},
        {"optimizer": "adam", "eps": -1e-8},
        {"optimizer": "adam", "eps": float("nan")},
    ],
    ids=repr,
)
def test_a_recipe_that_makes_no_sense(settings):
    with pytest.raises(unchecked.DownweightError) as caught:
        unchecked.Recipe(**{"lr": 0.1, "epochs": 2, **settings})
    assert isinstance(caught.value, ValueError | TypeError)
    assert any(name in str(caught.value) for name in settings)


@pytest.mark.parametrize(
    "remove",
    [[], [[]], [[ROWS]], [[-1]], [[2, 2]], [list(range(ROWS))], [[0], [1.5]], [[True]], "3", 3, None],
    ids=repr,
)
def test_removals_that_make_no_sense(remove):
    model, inputs = network("mlp")
    task = unchecked.Task(model, "cross_entropy", (inputs, targets_of("cross_entropy")))
    task = task.with_recipe(unchecked.Recipe(lr=0.1, epochs=1), initial=model.state_dict())
    for objective in (unchecked.ColdStart(), unchecked.ProximalBregman(0.1)):
        with untouched(model), pytest.raises(unchecked.DownweightError):
            unchecked.respond(task, objective, remove)


def test_responses_that_cannot_be_asked_for():
    model, inputs = network("mlp")
    dw = unchecked
    bare = dw.Task(model, "cross_entropy", (inputs, targets_of("cross_entropy")))
    recipe = dw.Recipe(lr=0.1, epochs=1)
    for objective in (dw.ColdStart(), dw.WarmStart(), dw.TwoStage(), dw.Proximal(0.1)):
        with pytest.raises(dw.InvalidInput, match="recipe"):
            dw.respond(bare, objective, [[1]])
    with pytest.raises(dw.InvalidInput, match="θ⁰"):
        dw.respond(bare.with_recipe(recipe), dw.ColdStart(), [[1]])
    task = bare.with_recipe(recipe, initial=model.state_dict())
    for order in ("both", None, 3):
        with pytest.raises(dw.InvalidInput, match="batch_order"):
            dw.respond(task, dw.WarmStart(), [[1]], batch_order=order)
    for wrong in (dw.WarmStart, "warm_start", None, dw.ProximalBregman):
        with pytest.raises(dw.InvalidType, match="objective"):
            dw.respond(task, wrong, [[1]])
    for epsilon in (float("nan"), float("inf"), "much"):
        with pytest.raises(dw.DownweightError, match="epsilon"):
            dw.respond(task, dw.WarmStart(), [[1]], epsilon=epsilon)
    for wrong in ("sgd", None, {"lr": 0.1}, dw.Recipe):
        with pytest.raises(dw.InvalidType, match="recipe"):
            dw.train(bare, wrong)
        with pytest.raises(dw.DownweightError, match="recipe"):
            dw.respond(bare.with_recipe(wrong), dw.WarmStart(), [[1]])


def test_objectives_that_make_no_sense():
    dw = unchecked
    for kind in (dw.Proximal, dw.ProximalBregman, dw.LinearizedProximalBregman):
        for damping in (-1.0, float("nan"), float("inf"), "0.1", None, True):
            with pytest.raises(dw.DownweightError, match="damping"):
                kind(damping=damping)
    for kind in (dw.ProximalBregman, dw.LinearizedProximalBregman):
        for optimizer in ("sgd", None, dw.GaussNewton):
            with pytest.raises(dw.DownweightError, match="optimizer"):
                kind(damping=0.1, optimizer=optimizer)
    for settings in ({"rtol": 0.0}, {"rtol": 2.0}, {"settle": 0.0}, {"max_steps": 0}, {"max_steps": 2.5}):
        with pytest.raises(dw.DownweightError, match=next(iter(settings))):
            dw.GaussNewton(**settings)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_leaves_are_laid_as_their_gradients_once_and_then_stay(optimizer):
    """Before a GPU's graphs are captured: they would go on with the memory of before. The steps are the same."""
    train_module = importlib.import_module("downweight.train")
    stack_module = importlib.import_module("downweight.stack")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double().eval()
    task = dw.Task(model, "cross_entropy", (torch.randn(20, 5).double(), torch.randint(0, 3, (20,))))
    recipe = dw.Recipe(lr=0.1, epochs=1, optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)

    def steps() -> Any:
        leaves = {name: value.requires_grad_() for name, value in stack_module.stack(task, 3).items()}
        gradient = train_module.Gradient(
            train_module.Problem(task, "cost", 0.0, [[0], [1], [2]], 1 / 20), stack_module.Stack(task, True)
        )
        return train_module.Steps(gradient, recipe, leaves, {})

    plain, laid = steps(), steps()
    laid.capturing = True
    places = []
    batches = [torch.arange(8), torch.arange(8, 16), torch.arange(16, 20), torch.arange(3, 4)]
    whole = laid.gradient.batch
    for number, batch in enumerate(batches):
        if number == 2:  # a gradient that comes in another layout than at first

            def turned(*arguments: Any) -> dict[str, Tensor]:
                return {name: value.contiguous() for name, value in whole(*arguments).items()}

            laid.gradient.batch = turned
        for each in (plain, laid):
            each._step(batch)
        places.append([leaf.data_ptr() for leaf in laid.leaves.values()])
        for name, leaf in plain.leaves.items():
            assert_close(laid.leaves[name], leaf, rtol=1e-12, atol=1e-14)
    assert laid.leaves["0.weight"].stride() != plain.leaves["0.weight"].stride()
    assert places[0] == places[1] == places[2] == places[3]
