"""A check that a model is, after a call or an exception, bit for bit what it was before."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
]


def _state(model: nn.Module) -> dict:
    """Everything of a model that a careless library changes; tensors by identity, version and bits."""
    state: dict = {"random": torch.get_rng_state().tolist(), "grad enabled": torch.is_grad_enabled()}
    state["default dtype"] = torch.get_default_dtype()
    state["mha fast path"] = torch.backends.mha.get_fastpath_enabled()
    state["threads"] = torch.get_num_threads()
    for path, module in model.named_modules(remove_duplicate=False):
        state[path, "training"] = module.training
        state[path, "class"] = type(module)
        state[path, "identity"] = id(module)
        state[path, "attributes"] = sorted(module.__dict__)
        for hooks in HOOKS:
            state[path, hooks] = list(getattr(module, hooks))
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is None:
                    state[path, kind, name] = None
                    continue
                state[path, kind, name] = (
                    id(tensor),
                    type(tensor),
                    tensor.requires_grad,
                    tensor.device,
                    tensor.dtype,
                    tensor.data_ptr(),
                    tensor.detach().clone().nan_to_num(nan=123.0).tolist(),
                    None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist()),
                    None if tensor._backward_hooks is None else list(tensor._backward_hooks),
                )
    return state


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Fails if the block changes a model, the global random state or torch's global switches; also after an error."""
    before = [_state(model) for model in models]
    try:
        yield
    finally:
        for model, old in zip(models, before, strict=True):
            new = _state(model)
            changed = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
            assert not changed, f"changed: {sorted(map(str, changed))}"
