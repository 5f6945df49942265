"""A task: a model, its loss and its training rows, at the parameters θˢ that the model holds."""

import contextlib
import copy
import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from downweight.errors import DownweightError, InvalidInput, InvalidType, NonFinite
from downweight.identity import absorb, digest, outline
from downweight.linearization import Linearization
from downweight.losses import Loss, as_loss, check_row_by_row, require_finite
from downweight.rows import Inputs, Rows, TensorRows, as_rows, chunks, map_tensors, tensors_of
from downweight.settings import nonnegative
from downweight.shapes import Float, Int, Shaped

_PROBE_ROWS = 3
_NO_HOOKS = "hooks on saved tensors (activation checkpointing, save_on_cpu) are not supported"


@dataclass(frozen=True)
class Coverage:
    """How many of the model's parameters an answer is about."""

    covered: int
    total: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        if not self.left_out:
            return f"all {self.total:,} parameters"
        return (
            f"{self.covered:,} of {self.total:,} parameters "
            f"({', '.join(self.left_out[:4])}{', …' if len(self.left_out) > 4 else ''} left out)"
        )


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a trained task came from: parameters and buffers at θ⁰, and the recipe that led to θˢ."""

    state: dict[str, Tensor] | None  # None where θ⁰ is not known
    recipe: Any  # a Recipe, which is made downstream


class _Caller(nn.Module):
    """The model behind one call signature, so that parameters can be swapped by name."""

    def __init__(self, model: nn.Module, forward: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, inputs: Inputs) -> Tensor:
        if self._forward is not None:
            return self._forward(self.model, inputs)
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        if isinstance(inputs, tuple):
            return self.model(*inputs)
        return self.model(inputs)


class Task:
    r"""A model, its loss and its training rows: the problem, and nothing of how it is solved.

    The cost is J(θ) = (1/N) Σ wᵢ L(f(θ, xᵢ), tᵢ) + (l2/2)‖θ‖², with θ the chosen trainable
    parameters in the order of `model.named_parameters()`. θˢ is what the model holds when a
    function is called; it need not be a minimiser. Removing row i takes wᵢ L(zᵢ)/N out of J.

    model: any module whose rows do not see each other; outputs (B, C) or (B, T, C). It is evaluated
        in eval mode, what it writes to its buffers and weights is written to copies, and it is left
        as it was.
    loss: "cross_entropy", "squared_error" (½‖y − t‖²), "binary_cross_entropy" (on logits), or a
        `Loss` of one's own. A row's loss is the sum over its outputs and positions, times
        `loss_scale`.
    train: (inputs, targets), inputs a tensor, a dict or a tuple of tensors; or a map-style dataset.
    parameters: names to restrict the analysis to; every other parameter counts as a constant.
    row_ids: names of the rows in results: texts, finite numbers, or tuples of these.
    forward: callable(model, inputs) -> outputs, where calling the model is not enough.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        loss: str | Loss | Callable[[Tensor, Tensor], Tensor],
        train: Any,
        *,
        l2: float = 0.0,
        loss_scale: float = 1.0,
        weights: Any = None,
        parameters: Sequence[str] | None = None,
        row_ids: Sequence[Any] | None = None,
        forward: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidType(f"model is a {type(model).__name__}; expected a torch.nn.Module that holds θˢ.")
        # A compiled module has no double backward; its original computes the same.
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.loss = as_loss(loss)
        self.l2 = nonnegative(l2, "l2")
        self.loss_scale = nonnegative(loss_scale, "loss_scale")
        if self.loss_scale == 0:
            raise InvalidInput("loss_scale is 0; expected a positive number.")
        if forward is not None and not callable(forward):
            raise InvalidType("forward must be a callable(model, inputs) -> outputs, or None.")
        self._forward = forward
        self._caller = _Caller(self.model, forward)
        self._slots = _slots(self.model)
        self._override: dict[str, Tensor] = {}
        self._written: frozenset[str] = frozenset()  # parameters that the forward pass changes in place
        self.origin: Origin | None = None
        self.names = _choose_parameters(self.model, parameters)
        chosen = dict(self.model.named_parameters())
        self._shapes = [chosen[name].shape for name in self.names]
        first = chosen[self.names[0]]
        self.dtype, self.device = first.dtype, first.device
        _check_parameters(chosen, self.dtype, self.device)
        _check_layers(self.model)
        self.rows = self.read_rows(train, "train")
        self.weights = _check_weights(weights, len(self.rows), self.device)
        self.row_ids = _check_row_ids(row_ids, len(self.rows))
        self.output_shape = self._probe()
        self._check_derivatives(map_tensors(lambda tensor: tensor[:1], self.rows.read(torch.arange(1))[0]))
        self._check_targets(self.rows, "train")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return (
            f"Task({type(self.model).__name__}, loss={self.loss.name!r}, rows={len(self)}, "
            f"parameters={self.size:,}, l2={self.l2:g}, dtype={self.dtype}, device={self.device})"
        )

    # -- parameters -------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """d, the number of covered parameters."""
        return sum(shape.numel() for shape in self._shapes)

    @property
    def params(self) -> dict[str, Tensor]:
        """The covered parameters by name, detached: θˢ, or what `with_parameters` was given."""
        live = self._values()
        for name in self.names:
            if (live[name].dtype, live[name].device) != (self.dtype, self.device):
                raise InvalidType(
                    f"Parameter {name} is {live[name].dtype} on {live[name].device}, and was {self.dtype} on "
                    f"{self.device} when the task was made. Make the Task after model.double(), .float() or .to()."
                )
        return {name: live[name] for name in self.names}

    def _values(self) -> dict[str, Tensor]:
        """Every parameter and buffer of the model, detached."""
        live = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: value.detach() for name, value in live} | self._override

    @property
    def flat(self) -> Float[Tensor, " d"]:
        """The covered parameters as one vector, a copy."""
        return torch.cat([value.reshape(-1) for value in self.params.values()])

    def with_parameters(self, flat: Shaped[Tensor, " d"]) -> "Task":
        """The same task at other parameters; the model is not touched."""
        flat = _as_tensor(flat, "with_parameters got", f"({self.size},)")
        if flat.shape != (self.size,):
            raise InvalidInput(
                f"with_parameters got a tensor of shape {tuple(flat.shape)}; expected "
                f"({self.size},), the covered parameters in the order of named_parameters()."
            )
        if not bool(flat.isfinite().all()):
            raise NonFinite("with_parameters got NaN or infinite parameters.")
        pieces = flat.detach().to(self.device, self.dtype).clone()
        pieces = pieces.split([shape.numel() for shape in self._shapes])
        task = copy.copy(self)
        task._override = self._override | {
            name: piece.reshape(shape) for name, piece, shape in zip(self.names, pieces, self._shapes, strict=True)
        }
        return task

    def with_state(self, state: Mapping[str, Tensor]) -> "Task":
        """The same task at the parameters and buffers of a state dict; the model is not touched."""
        values = self._values()
        unknown = [name for name in state if name not in self.model.state_dict()]
        wrong = [
            name for name in values if name not in state or torch.as_tensor(state[name]).shape != values[name].shape
        ]
        wrong = [name for name in wrong if name in self.model.state_dict()]
        if unknown or wrong:
            raise InvalidInput(
                f"The state dict does not fit the model: unknown {unknown}, missing or of another shape {wrong}."
            )
        for name in {name for name, _ in self.model.named_parameters()} & state.keys():
            if not bool(state[name].isfinite().all()):
                raise NonFinite(f"{name} of the state dict has NaN or infinite values (did training diverge?).")
        task = copy.copy(self)
        task._override = self._override | {
            name: state[name].detach().to(value).clone() for name, value in values.items() if name in state
        }
        return task

    def with_values(self, values: Mapping[str, Tensor]) -> "Task":
        """The same task with some parameters and buffers, by name, at other values; the model is not touched."""
        task = copy.copy(self)
        live = self._values()
        task._override = self._override | {name: value.detach().to(live[name]) for name, value in values.items()}
        return task

    def with_weights(self, weights: Float[Tensor, " N"]) -> "Task":
        """The same task with other weights of its rows."""
        task = copy.copy(self)
        task.weights = _check_weights(weights, len(self.rows), self.device)
        return task

    def with_recipe(self, recipe: Any, initial: Mapping[str, Tensor] | None = None) -> "Task":
        """The same task with the recipe that led to θˢ, for a model that was trained elsewhere.

        initial: a state dict of the model at θ⁰; without one there is no cold start, and everything else.
        """
        task = copy.copy(self)
        state = None if initial is None else self.with_state(initial)
        task.origin = Origin(None if state is None else {**state.params, **state.buffers}, recipe)
        return task

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers at the task's own values, as `model.load_state_dict` takes them."""
        values, slots = self._values(), dict(self._slots)
        return {place: values[slots[place]].clone() for place in self.model.state_dict() if place in slots}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name, detached."""
        live = self._values()
        return {name: live[name] for name, _ in self.model.named_buffers()}

    def restricted_to(self, names: Sequence[str]) -> "Task":
        """The same task with fewer covered parameters; the others become constants."""
        task = copy.copy(self)
        task.names = tuple(name for name in self.names if name in set(names))
        kept = dict(zip(self.names, self._shapes, strict=True))
        task._shapes = [kept[name] for name in task.names]
        return task

    @property
    def coverage(self) -> Coverage:
        sizes = {name: value.numel() for name, value in self.model.named_parameters()}
        left_out = tuple(name for name in sizes if name not in set(self.names))
        return Coverage(self.size, sum(sizes.values()), left_out)

    # -- rows -------------------------------------------------------------------------------

    def read_rows(self, data: Any, what: str) -> Rows:
        """Rows on the model's device and in its dtype, checked; `what` names them in errors."""
        return as_rows(data, self.device, self.dtype, what)

    def query_rows(self, data: Any, what: str = "queries") -> Rows:
        """As `read_rows`, checked against the training rows and the model."""
        rows = self.read_rows(data, what)
        self._check_inputs(rows, what)
        self._check_targets(rows, what)
        return rows

    def weights_of(self, index: Int[Tensor, " *B"]) -> Tensor | None:
        return None if self.weights is None else self.weights[index.to(self.device)]

    def mean(self, index: Int[Tensor, " n"], size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """(1/n) Σ over chunks of rows of `function(chunk)`: the only place that divides by n."""
        total: Tensor | None = None
        for chunk in chunks(index, size):
            part = function(chunk)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.div_(len(index))

    # -- the network ------------------------------------------------------------------------

    def forward(self, params: dict[str, Tensor], inputs: Inputs) -> Shaped[Tensor, "B *out"]:
        """Outputs at any parameters, (B, C) or (B, T, C); autograd sees `params` only."""
        values = self._values() | params
        # A buffer that counts and an embedding with max_norm are written to by forward: to copies, not to the user's.
        for name in {name for name, _ in self.model.named_buffers()} - params.keys() | self._written:
            values[name] = values[name].clone()
        swapped = {f"model.{slot}": values[name] for slot, name in self._slots}
        # Ties are in the slots. torch's own tie_weights swaps a module that is registered twice twice, and leaves the
        # user's model with the swapped tensors.
        outputs = functional_call(self._caller, swapped, (inputs,), tie_weights=False)
        if not isinstance(outputs, Tensor):
            raise InvalidType(
                f"The model returned a {type(outputs).__name__}; expected a tensor of outputs. "
                "Pick it with forward=, for example forward=lambda model, x: model(**x).logits."
            )
        return outputs.unsqueeze(-1) if outputs.dim() == 1 else outputs

    def outputs(self, inputs: Any) -> Shaped[Tensor, "B *out"]:
        """The outputs of these inputs at the task's parameters, without a graph."""
        rows = TensorRows(inputs, torch.zeros(len(tensors_of(inputs)[0][1])), self.device, self.dtype)
        moved, _ = rows.read(torch.arange(len(rows)))
        return self._attempt(self.params, moved, "outputs")

    def linearize(self, inputs: Inputs, cotangent: Callable[[Tensor], Tensor] | None = None) -> Linearization:
        params = self.params
        return Linearization(lambda swapped: self.forward(swapped, inputs), params, cotangent)

    @contextlib.contextmanager
    def evaluating(self, *, learning: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Eval mode, full precision and differentiable kernels; everything as before afterwards.

        The modules in `learning` are in train mode instead.

        TF32, autocast, fused attention and cuDNN's recurrent kernels are off inside: the first two
        lose digits that ε = 1/N needs, the others cannot be differentiated twice.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        recurrent = any(isinstance(module, nn.RNNBase) for module in self.model.modules())
        fastpath = torch.backends.mha.get_fastpath_enabled()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_exact_kernels(recurrent))
            if "torch._dynamo" in sys.modules:  # a part that is compiled has no double backward
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
            torch.backends.mha.set_fastpath_enabled(False)
            for module, mode in modes:
                stack.callback(setattr, module, "training", mode)
                module.training = any(module is one for one in learning)
            yield

    @property
    def layers(self) -> str:
        """The kinds of layers with parameters, for messages about what stands in the way."""
        kinds = {type(module).__name__ for module in self.model.modules() if module is not self.model}
        return ", ".join(sorted(kinds)) or type(self.model).__name__

    @property
    def notes(self) -> list[str]:
        """What a reader of any result on this task should know."""
        notes = []
        switched = [name for name, module in self.model.named_modules() if module.training]
        if switched:
            notes.append(
                "The model was in train mode; it was evaluated in eval mode (dropout off, running "
                "batch statistics) and put back."
            )
        if self.coverage.left_out:
            notes.append(f"Covers {self.coverage}.")
        return notes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes that the linearisation of one row holds, counted on a few rows."""
        live = {value.untyped_storage().data_ptr() for value in self._values().values()}
        seen: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in live:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        few = torch.arange(min(3, len(self)))
        inputs, _ = self.rows.read(few)
        with self.evaluating(), saved_tensors_hooks(count, lambda tensor: tensor):
            # Held until the sum is taken, so that no address is counted twice.
            linearization = self.linearize(inputs)
        held = sum(seen.values())
        del linearization
        return max(1, held // len(few))

    # -- losses -----------------------------------------------------------------------------

    def losses(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, " B"]:
        """L of every row, float64."""
        return self.loss_scale * self.loss.value(outputs.double(), targets)

    def row_losses(self, index: Tensor | None = None) -> Float[Tensor, " n"]:
        """L of every training row (or of these) at the task's parameters, float64."""
        return self.losses_of(self.rows, index)

    def losses_of(self, rows: Rows, index: Tensor | None = None) -> Float[Tensor, " n"]:
        index = torch.arange(len(rows)) if index is None else index
        parts, params = [], self.params
        with self.evaluating(), torch.no_grad():
            for chunk in chunks(index, 1024):
                inputs, targets = rows.read(chunk)
                parts.append(self.losses(self.forward(params, inputs), targets))
        return torch.cat(parts)

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Shaped[Tensor, "B *out"]:
        """∂L/∂y of every row, times its weight, float64."""
        gradient = self.loss_scale * self.loss.gradient(outputs.double(), targets)
        return gradient if weights is None else gradient * _column(weights, gradient, 0)

    def output_change(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Shaped[Tensor, "B *out"]:
        """∂L/∂y − ∂L/∂y at the reference, of every row, float64, in full precision however near the two are."""
        return self.loss_scale * self.loss.change(outputs.double(), reference.double(), targets)

    def divergences(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Float[Tensor, " B"]:
        """The Bregman divergence of the loss, of every row, float64."""
        return self.loss_scale * self.loss.divergence(outputs.double(), reference.double(), targets)

    def output_product(
        self, outputs: Tensor, targets: Tensor, vectors: Tensor, weights: Tensor | None = None
    ) -> Shaped[Tensor, "K B *out"]:
        """H_y v of every row, times its weight, float64."""
        product = self.loss.product(outputs.double(), targets, vectors.double())
        product = self.loss_scale * product
        return product if weights is None else product * _column(weights, product, 1)

    def output_root(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Shaped[Tensor, "r B *out"]:
        """R with RᵀR = w H_y for every row, float64."""
        root = math.sqrt(self.loss_scale) * self.loss.root(outputs.double(), targets)
        return root if weights is None else root * _column(weights.sqrt(), root, 1)

    @property
    def root_size(self) -> int:
        """Rows of the root of one training row's output Hessian."""
        return self.loss.root_size(self.output_shape)

    # -- identity ---------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, str]:
        """What identifies the task: θˢ, the rest of the model, training inputs and targets, loss, l2, dtype, weights.

        Made from what is there now: model and data are the user's, who may change them in place. "outputs", their
        norms on the first rows, tells apart what a description of a model cannot (an activation that is an
        attribute, a global variable); three digits, so that another device gives the same.
        """
        inputs, targets = hashlib.sha256(), hashlib.sha256()
        for chunk in chunks(torch.arange(len(self)), 4096):
            part, target = self.rows.read(chunk)
            for _, tensor in tensors_of(part):
                absorb(inputs, tensor)
            absorb(targets, target)
        values = self._values()
        first, _ = self.rows.read(torch.arange(min(_PROBE_ROWS, len(self))))
        norms = self._attempt(self.params, first, "train").double().flatten(1).norm(dim=1)
        return {
            "parameters": digest(self.flat),
            "model": digest(outline(self.model), *((name, values[name]) for name in values if name not in self.names)),
            "outputs": " ".join(f"{norm:.3g}" for norm in norms.tolist()),
            "inputs": inputs.hexdigest(),
            "targets": targets.hexdigest(),
            "settings": digest(
                self.loss, self._forward, self.l2, self.loss_scale, self.dtype, self.names, self.weights
            ),
        }

    # -- checks -----------------------------------------------------------------------------

    def _probe(self) -> tuple[int, ...]:
        """The outputs' shape a row; refuses outputs that depend on the batch or on chance."""
        few = torch.arange(min(_PROBE_ROWS, len(self.rows)))
        inputs, _ = self.rows.read(few)
        alone = map_tensors(lambda tensor: tensor[:1], inputs)
        copies = {name: value.clone() for name, value in self._values().items()}
        together = self._attempt(copies, inputs, "train")
        self._written = frozenset(
            name
            for name, value in self.model.named_parameters()
            if copies[name]._version or not torch.equal(copies[name], value)
        )
        try:
            single = self._attempt(self.params, alone, "train")
        except InvalidInput as error:
            raise InvalidInput(
                f"The model runs on a batch of {len(few)} rows and fails on a single one ({error.__cause__}). Rows "
                "must not see each other: influence of a row is not defined where batch statistics enter its outputs."
            ) from error
        if together.dim() not in (2, 3) or len(together) != len(few):
            raise InvalidInput(
                f"The model gives outputs of shape {tuple(together.shape)} for {len(few)} rows; "
                "expected (B, C) or (B, T, C), rows first. Reshape them with forward=, for example "
                "forward=lambda model, x: model(x).flatten(1)."
            )
        if single.shape != (1, *together.shape[1:]):
            raise InvalidInput(
                f"The model gives outputs of shape {tuple(together.shape)} for {len(few)} rows and "
                f"{tuple(single.shape)} for one; expected (1, …) for one. A .squeeze() in it drops the dimension over "
                "rows as well: use .squeeze(-1)."
            )
        if not bool(together.isfinite().all()):
            raise NonFinite(
                "The model's outputs on the first training rows are NaN or infinite. Check the "
                "parameters (did training diverge?) and the inputs."
            )
        scale = single.abs().max().clamp_min(1e-30)
        if bool((together[:1] - single).abs().max() > 1e-3 * scale):
            raise InvalidInput(
                "A row's outputs change with the other rows of its batch, or from call to call "
                "(batch statistics without running averages, dropout outside eval mode, other "
                "randomness). Influence of a row is not defined then; make the model "
                "deterministic and row by row in eval mode."
            )
        return tuple(together.shape[1:])

    def _attempt(self, values: dict[str, Tensor], inputs: Inputs, what: str) -> Shaped[Tensor, "B *out"]:
        """Outputs without a graph; an error of the model's own is told as one of these rows."""
        try:
            with self.evaluating(), torch.no_grad():
                return self.forward(values, inputs)
        except (DownweightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InvalidInput(
                f"{what}: the model refuses these rows, {_described(inputs)} ({type(error).__name__}: {error}). Give "
                "inputs as the model takes them: a tensor for model(x), a dict for model(**x), a tuple for model(*x); "
                "or call it with forward=."
            ) from error

    def _check_derivatives(self, inputs: Inputs) -> None:
        """Refuse, on one row, a model that autograd cannot differentiate or for which it is silently wrong."""
        try:
            with self.evaluating(), disable_saved_tensors_hooks(_NO_HOOKS), warnings.catch_warnings():
                # What a checkpoint says when it cuts off its part of the graph.
                warnings.filterwarnings("error", "None of the inputs have requires_grad")
                at = self.linearize(inputs)
                at.pull(torch.zeros_like(at.outputs).unsqueeze(0))
        except (DownweightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InvalidInput(
                f"The model's outputs cannot be differentiated by its parameters ({type(error).__name__}: {error}). "
                f"Its layers are {self.layers}. Switch activation checkpointing off (torch.utils.checkpoint), and "
                "write custom autograd functions in plain operations."
            ) from error

    def _check_inputs(self, rows: Rows, what: str) -> None:
        """Refuse rows of another make than the training rows, and rows that the model does."""
        inputs, _ = rows.read(torch.arange(1))
        expected, _ = self.rows.read(torch.arange(1))
        made, asked = (
            {name: tensor.is_floating_point() for name, tensor in tensors_of(part)} for part in (expected, inputs)
        )
        if made != asked:
            raise InvalidInput(
                f"{what}: a row is {_described(inputs)}, and a training row is {_described(expected)}. Give the same "
                "names or places, floats where they are floats and integers where they are integers."
            )
        outputs = self._attempt(self.params, inputs, what)
        if outputs.dim() != 1 + len(self.output_shape) or outputs.shape[-1] != self.output_shape[-1]:
            raise InvalidInput(
                f"{what}: {_described(inputs)} a row gives outputs of shape {tuple(outputs.shape)}; a training row, "
                f"{_described(expected)}, gives {(1, *self.output_shape)}."
            )

    def _check_targets(self, rows: Rows, what: str) -> None:
        """Check all targets that are held; those of a streamed dataset when they are read."""
        if isinstance(rows, TensorRows):
            example = torch.empty(0, dtype=self.dtype, device=rows.targets.device)
            outputs = example.expand(0).new_zeros(1, *self.output_shape)
            outputs = outputs.expand(len(rows), *self.output_shape)
            self.loss.check(outputs, rows.targets, what)

    def check_chunk(self, rows: Rows, outputs: Tensor, targets: Tensor, index: Tensor, what: str) -> None:
        """Refuse outputs and losses that are not finite, naming the row, and what only real outputs can show."""
        require_finite(outputs, f"The model's outputs for {what}", index)
        if not isinstance(rows, TensorRows):
            self.loss.check(outputs, targets, what)
        if not self.loss.convex:  # a user's own
            check_row_by_row(self.losses, outputs, targets, f"{what}: the loss {self.loss.name}")
            with torch.no_grad():
                require_finite(self.losses(outputs, targets), f"The loss {self.loss.name} for {what}", index)


def _slots(model: nn.Module) -> list[tuple[str, str]]:
    """(place, name) of every tensor of the model: each place once, under the one name of a tensor that is shared."""
    named = {id(value): name for name, value in (*model.named_buffers(), *model.named_parameters())}
    return [
        (f"{path}.{key}" if path else key, named[id(value)])
        for path, module in model.named_modules()
        for key, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    ]


def _column(weights: Tensor, like: Tensor, position: int) -> Tensor:
    shape = [1] * like.dim()
    shape[position] = -1
    return weights.to(like.dtype).reshape(shape)


def _check_weights(weights: Any, count: int, device: torch.device) -> Tensor | None:
    if weights is None:
        return None
    weights = _as_tensor(weights, "weights is", f"({count},)").detach().to(device, torch.float64)
    if weights.shape != (count,):
        raise InvalidInput(f"weights have shape {tuple(weights.shape)}; expected one a training row, ({count},).")
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        raise InvalidInput("weights must be finite and >= 0; a negative weight is no cost.")
    return weights


def _as_tensor(value: Any, got: str, shape: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidType(f"{got} {value!r}; expected numbers in a tensor of shape {shape}.") from error


def _check_row_ids(row_ids: Any, count: int) -> list[Any] | None:
    if row_ids is None:
        return None
    if isinstance(row_ids, str | bytes) or not isinstance(row_ids, Iterable):
        raise InvalidType(f"row_ids is {row_ids!r}; expected a list of {count} texts, numbers or tuples of these.")
    ids = [_row_id(entry) for entry in row_ids]
    if len(ids) != count:
        raise InvalidInput(f"row_ids has {len(ids)} entries for {count} training rows.")
    return ids


def _row_id(entry: Any) -> Any:
    """An id as a file can hold it: a text, a finite number, or a tuple of these."""
    if isinstance(entry, tuple):
        return tuple(_row_id(part) for part in entry)
    plain = entry.item() if isinstance(entry, Tensor | np.generic) and math.prod(entry.shape) == 1 else entry
    if isinstance(plain, str | int) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    raise InvalidInput(f"row_ids has the entry {entry!r}; expected texts, finite numbers, or tuples of these.")


def _choose_parameters(model: nn.Module, chosen: Sequence[str] | None) -> tuple[str, ...]:
    for name, value in model.named_parameters():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise InvalidInput(f"Parameter {name} is not initialised; run the model once first.")
    trainable = [name for name, value in model.named_parameters() if value.requires_grad]
    if not trainable:
        raise InvalidInput(
            "The model has no trainable parameters (requires_grad is False for all, or it has "
            "none). Influence acts through trainable parameters; switch requires_grad on."
        )
    if chosen is None:
        return tuple(trainable)
    if isinstance(chosen, str):
        raise InvalidType(f"parameters is the text {chosen!r}; expected a list of names.")
    unknown = [name for name in chosen if name not in trainable]
    if unknown or not chosen:
        raise InvalidInput(
            f"parameters={list(chosen)!r}: {unknown or 'an empty list'} not among the trainable "
            f"parameters. Choose from {trainable}."
        )
    return tuple(name for name in trainable if name in set(chosen))


def _check_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InvalidInput(
                f"Layer {name or type(model).__name__} has sparse gradients, which have no second derivative. Set its "
                "attribute sparse to False for the analysis; its outputs stay the same."
            )


def _check_parameters(params: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
    for name, value in params.items():
        if value.is_floating_point() and (value.dtype, value.device) != (dtype, device):
            raise InvalidType(
                f"Parameter {name} is {value.dtype} on {value.device}, others are {dtype} on "
                f"{device}; all must agree. Use model.to(device, dtype)."
            )
        if not bool(value.isfinite().all()):
            raise NonFinite(f"Parameter {name} has NaN or infinite values (did training diverge?).")
    if dtype not in (torch.float32, torch.float64):
        raise InvalidType(
            f"The model's parameters are {dtype}; influence at ε = 1/N needs float32 or float64. "
            "Use model.float() or model.double()."
        )


@contextlib.contextmanager
def _exact_kernels(recurrent: bool) -> Iterator[None]:
    """No TF32 inside, through whichever switch this version of torch has; for recurrent layers no cuDNN either."""
    holders = [torch.backends.cuda.matmul, *(getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn"))]
    if all(hasattr(holder, "fp32_precision") for holder in holders):
        switches: list[tuple[Any, str, Any]] = [(holder, "fp32_precision", "ieee") for holder in holders]
    else:
        switches = [(torch.backends.cuda.matmul, "allow_tf32", False), (torch.backends.cudnn, "allow_tf32", False)]
    if recurrent:
        switches.append((torch.backends.cudnn, "enabled", False))
    before = [getattr(holder, name) for holder, name, _ in switches]
    try:
        for holder, name, value in switches:
            setattr(holder, name, value)
        yield
    finally:
        for (holder, name, _), value in zip(switches, before, strict=True):
            setattr(holder, name, value)


def _described(inputs: Inputs) -> str:
    return ", ".join(f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype}" for name, tensor in tensors_of(inputs))
