"""The table of small tasks that every curvature, solver and score is held against.

Each function returns one `Case`, in float64 and tiny (d < 400, N <= 12), seeded by itself. Adding a function marked
`@case` adds it to every test that runs over `CASES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import oracles
from oracles import LOSSES, Oracle


@dataclass(frozen=True)
class Case:
    """A task in the words of the contract, and the plain loss function that its oracle uses."""

    model: Any  # an nn.Module; any of the classes below, so that their parts can be reached
    loss: Any
    train: tuple[Any, Tensor]
    queries: tuple[Any, Tensor]
    candidates: tuple[Any, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    plain_loss: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def rows(self) -> int:
        return oracles.length_of(self.train[0])

    def oracle(self) -> Oracle:
        """The dense truth; on the same model, which it only reads."""
        settings = dict(self.settings)
        names = settings.pop("parameters", None)
        loss = LOSSES[self.loss] if self.plain_loss is None else self.plain_loss
        return Oracle(self.model, loss, *self.train, names=names, **settings)

    def task(self, **changes):
        """The same thing as a `dw.Task`."""
        import downweight as dw

        return dw.Task(self.model, loss=self.loss, train=self.train, **{**self.settings, **changes})


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Put a function into the table; it runs once, with its own seed."""

    @lru_cache
    def seeded() -> Case:
        with torch.random.fork_rng():
            torch.manual_seed(1 + len(make.__name__))
            made = make()
        made.model.double().eval()
        assert sum(p.numel() for p in made.model.parameters()) < 400
        assert made.rows <= 12
        return made

    CASES[make.__name__] = seeded
    return seeded


@lru_cache
def oracle_of(name: str) -> Oracle:
    """The oracle of a case, once: its dense matrices are cached on it."""
    return CASES[name]().oracle()


@lru_cache
def task_of(name: str):
    """The `dw.Task` of a case, once."""
    return CASES[name]().task()


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def classification(model: nn.Module, shape: tuple[int, ...], classes: int, rows: int = 10, **settings) -> Case:
    """Random inputs and labels; 4 queries and 3 candidates besides the training rows."""

    def some(n: int):
        return floats(n, *shape), torch.randint(classes, (n,))

    return Case(model, "cross_entropy", some(rows), some(4), some(3), settings)


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


@case
def mlp_smooth() -> Case:
    return classification(mlp(4, 6, 5, 3, activation=nn.SiLU), (4,), 3, l2=0.02)


@case
def mlp_relu() -> Case:
    return classification(mlp(4, 8, 3, activation=nn.ReLU), (4,), 3)


@case
def mlp_without_bias() -> Case:
    return classification(mlp(5, 6, 4, bias=False), (5,), 4, rows=12)


@case
def softmax_regression() -> Case:
    return classification(nn.Linear(5, 3), (5,), 3, rows=12, l2=0.05)


@case
def more_outputs_than_parameters_need() -> Case:
    """N*C is far above d: the dual system is the larger one."""
    return classification(mlp(2, 2, 9), (2,), 9, rows=12)


@case
def cnn() -> Case:
    """Groups, stride, dilation, circular and reflect padding, with and without bias, max and mean pools."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, stride=2, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv2d(4, 4, (3, 2), dilation=(2, 1), padding=(2, 1), groups=2, bias=False),
        nn.SiLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(4, 3, 2, padding=1, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d((1, 2)),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    return classification(model, (2, 7, 6), 3, rows=8)


@case
def cnn_one_dimensional() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding="valid"),
        nn.GELU(),
        nn.ConvTranspose1d(4, 3, 2, stride=2),
        nn.Conv1d(3, 3, 3, groups=3, padding="same", padding_mode="replicate"),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    return classification(model, (2, 9), 2, rows=7)


@case
def layer_norm() -> Case:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    )
    for module in model:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return classification(model, (4,), 3)


@case
def group_norm() -> Case:
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    return classification(model, (2, 3, 3), 3, rows=6)


@case
def batch_norm() -> Case:
    """In eval mode with running statistics that are not the trivial ones."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.BatchNorm2d(3),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(48, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )
    for module in model:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features)
            module.running_var = torch.empty(module.num_features).uniform_(0.3, 2.0)
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias)
    return classification(model, (2, 4, 4), 3)


class Twice(nn.Module):
    """One layer applied twice, and the same layer under a second name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.alias = self.first
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.alias(torch.tanh(self.first(x)))))


@case
def layer_used_twice() -> Case:
    return classification(Twice(), (4,), 3, l2=0.01)


class Bare(nn.Module):
    """Parameters that belong to no layer: a matrix, a vector, a scalar, and one that the outputs never use."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.matrix = nn.Parameter(torch.randn(4, 5) / 2)
        self.layer = nn.Linear(5, 3)
        self.offset = nn.Parameter(torch.randn(3))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(torch.sin(x @ self.matrix)) + self.offset.exp()


@case
def bare_parameters() -> Case:
    return classification(Bare(), (4,), 3, l2=0.03)


class InPlace(nn.Module):
    """Activations and additions that overwrite their argument."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.silu, self.relu = nn.SiLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.silu(self.first(x))
        after = self.second(hidden)
        after += hidden
        after.mul_(0.7)
        return self.last(self.relu(after))


@case
def in_place_activations() -> Case:
    return classification(InPlace(), (4,), 3)


class TinyLanguageModel(nn.Module):
    """Embedding, one causal attention block written by hand, and the embedding again as the output layer."""

    def __init__(self, words: int = 7, width: int = 4, length: int = 5):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(length, width) / 2)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("future", torch.triu(torch.ones(length, length, dtype=torch.bool), 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(self.future, -torch.inf).softmax(-1) @ self.value(x)
        return self.head(self.norm(x + self.mlp(x)))


class TorchLanguageModel(nn.Module):
    """The same out of PyTorch's own parts: `TransformerEncoderLayer` with a causal mask, tied weights."""

    def __init__(self, words: int = 7, width: int = 4, length: int = 5, norm_first: bool = True):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 6, dropout=0.1, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(width, words)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens), src_mask=self.mask.to(self.embed.weight.dtype), is_causal=True))


def language(model: nn.Module, rows: int = 6, words: int = 7, length: int = 5, **settings) -> Case:
    """Next-word prediction with some positions ignored; one training row has every position but one ignored."""

    def some(n: int, ignored: float):
        tokens = torch.randint(words, (n, length + 1))
        targets = tokens[:, 1:].clone()
        targets[torch.rand(n, length) < ignored] = -100
        targets[:, 1] = tokens[:, 2]
        return tokens[:, :-1].clone(), targets

    train, queries, candidates = some(rows, 0.3), some(3, 0.3), some(2, 0.0)
    train[1][0] = torch.tensor([-100, -100, 3, -100, -100])
    return Case(model, "cross_entropy", train, queries, candidates, settings)


@case
def language_model() -> Case:
    return language(TinyLanguageModel(), loss_scale=1 / 5, l2=0.01)


@case
def language_model_of_torch_parts() -> Case:
    return language(TorchLanguageModel())


@case
def language_model_post_norm() -> Case:
    return language(TorchLanguageModel(norm_first=False), rows=5)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` called the usual way, its weights thrown away."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.last(attended.mean(1))


@case
def multihead_attention() -> Case:
    return classification(SelfAttention(), (3, 4), 3, rows=7)


class FusedAttention(nn.Module):
    """`scaled_dot_product_attention` called directly; its fused kernels have no second derivative."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(query, key, value, is_causal=True).mean(1))


@case
def fused_attention() -> Case:
    return classification(FusedAttention(), (4, 4), 3, rows=6)


class EmptyPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.tanh(self.embed(tokens)))


@case
def a_row_without_counted_positions() -> Case:
    """Row 2 has nothing to learn from: its gradient and every one of its scores are exactly zero."""
    tokens, targets = torch.randint(5, (5, 3)), torch.randint(5, (5, 3))
    targets[2] = -100
    return Case(
        EmptyPositions(), "cross_entropy", (tokens, targets), (tokens[:2], targets[:2]), (tokens[3:], targets[3:])
    )


def regression(model: nn.Module, shape: tuple[int, ...], outputs: tuple[int, ...], rows: int = 10, **settings) -> Case:
    def some(n: int):
        return floats(n, *shape), floats(n, *outputs)

    return Case(model, "squared_error", some(rows), some(4), some(3), settings)


@case
def regression_three_outputs() -> Case:
    return regression(mlp(4, 7, 3), (4,), (3,), l2=0.01)


@case
def regression_one_output() -> Case:
    return regression(mlp(3, 5, 1), (3,), (1,), loss_scale=0.5)


@case
def regression_flat_targets() -> Case:
    """Targets (B,) against outputs (B, 1): never to be broadcast to (B, B)."""
    return regression(mlp(3, 5, 1), (3,), ())


@case
def regression_with_positions() -> Case:
    """Outputs (B, T, C)."""
    return regression(mlp(3, 4, 2), (4, 3), (4, 2), rows=6)


def binary(model: nn.Module, shape: tuple[int, ...], outputs: tuple[int, ...], rows: int = 10, **settings) -> Case:
    def some(n: int):
        return floats(n, *shape), torch.randint(2, (n, *outputs)).double()

    return Case(model, "binary_cross_entropy", some(rows), some(4), some(3), settings)


@case
def binary_flat_targets() -> Case:
    return binary(mlp(4, 5, 1), (4,), (), l2=0.02)


@case
def binary_one_output() -> Case:
    return binary(mlp(4, 5, 1), (4,), (1,))


@case
def binary_three_outputs() -> Case:
    return binary(mlp(4, 6, 3), (4,), (3,))


@case
def binary_with_soft_labels() -> Case:
    made = binary(mlp(4, 6, 2), (4,), (2,))
    return Case(made.model, made.loss, (made.train[0], torch.rand(10, 2).double()), made.queries, made.candidates)


class TwoInputs(nn.Module):
    """A model of two inputs, one of them integers; a dict is passed as keywords."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.mix = nn.Bilinear(3, 2, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, kind: Tensor, measured: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mix(self.embed(kind), measured)))


@case
def dict_inputs() -> Case:
    def some(n: int):
        return {"kind": torch.randint(4, (n,)), "measured": floats(n, 2)}, torch.randint(3, (n,))

    return Case(TwoInputs(), "cross_entropy", some(9), some(4), some(3), {"l2": 0.01})


class TakesADict(nn.Module):
    """A model that takes one dict and returns more than its logits."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(4, 5, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.layers(batch["pixels"] + batch["shift"]), "other": batch["pixels"]}


def logits_of_dict(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(inputs)["logits"]


@case
def custom_forward() -> Case:
    def some(n: int):
        return {"pixels": floats(n, 4), "shift": floats(n, 1)}, torch.randint(3, (n,))

    return Case(TakesADict(), "cross_entropy", some(8), some(4), some(3), {"forward": logits_of_dict})


@case
def frozen_parameters() -> Case:
    model = mlp(4, 6, 5, 3)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return classification(model, (4,), 3, l2=0.02)


@case
def some_parameters() -> Case:
    return classification(mlp(4, 6, 5, 3), (4,), 3, l2=0.02, parameters=["2.weight", "4.bias"])


@case
def row_weights() -> Case:
    """Weights that are neither equal nor of mean one; one of them is zero."""
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5, 3.0, 0.1, 1.0, 1.0, 0.7], dtype=torch.float64)
    return classification(mlp(4, 5, 3), (4,), 3, weights=weights, l2=0.01)


@case
def scaled_loss() -> Case:
    return classification(mlp(4, 5, 3), (4,), 3, loss_scale=0.03, l2=0.01)


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    """A convex loss that is none of the three: sum of log cosh(y - t)."""
    distance = outputs - targets
    return (F.softplus(2 * distance) - distance - 0.6931471805599453).sum(-1)


def poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    """Counts: exp(y) - t y, whose gradient and Hessian both depend on y."""
    return (outputs.exp() - targets * outputs).sum(-1)


@dataclass(frozen=True)
class UserLoss:
    """What a user writes for a loss of their own: the `dw.Loss` protocol."""

    function: Callable[[Tensor, Tensor], Tensor]

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)


@case
def own_loss() -> Case:
    made = regression(mlp(4, 6, 3), (4,), (3,), l2=0.01)
    return Case(made.model, UserLoss(log_cosh), made.train, made.queries, made.candidates, made.settings, log_cosh)


@case
def own_loss_of_counts() -> Case:
    made = regression(mlp(4, 6, 2), (4,), (2,))

    def counts(n: int):
        return floats(n, 4), torch.randint(5, (n, 2)).double()

    return Case(made.model, UserLoss(poisson), counts(9), counts(4), counts(2), plain_loss=poisson)


class Residual(nn.Module):
    """Blocks with skip connections, a concatenation and an einsum."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            x = x + torch.einsum("bi,oi->bo", torch.tanh(x), block.weight) + block.bias
        return self.last(torch.cat([start, x], -1))


@case
def residual() -> Case:
    return classification(Residual(), (4,), 3)


class TiedAutoencoder(nn.Module):
    """The decoder is the transposed encoder, through the functional interface."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, 3)
        self.offset = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.offset)


@case
def tied_autoencoder() -> Case:
    return regression(TiedAutoencoder(), (5,), (5,), rows=9, l2=0.005)


class Direction(nn.Module):
    """Weight normalisation in plain arithmetic, with the parameters of `parametrizations.weight_norm`."""

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return length * direction / direction.square().sum(1, keepdim=True).sqrt()

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.square().sum(1, keepdim=True).sqrt(), weight


@case
def weight_norm() -> Case:
    """A parametrised layer: the weight in the forward pass is not a parameter."""
    layer = nn.Linear(4, 5)
    parametrize.register_parametrization(layer, "weight", Direction())
    return classification(nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3)), (4,), 3)


class ElmanNetwork(nn.Module):
    """A recurrent network over positions, its weights reused at every step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(3, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 4)
        states = []
        for step in x.unbind(1):
            hidden = self.cell(step, hidden)
            states.append(hidden)
        return self.last(torch.stack(states, 1))


@case
def recurrent_cell() -> Case:
    inputs, targets = floats(9, 4, 3), torch.randint(3, (9, 4))
    targets[0, 2:] = -100
    train, queries, candidates = ((inputs[a:b], targets[a:b]) for a, b in ((0, 5), (5, 8), (7, 9)))
    return Case(ElmanNetwork(), "cross_entropy", train, queries, candidates)


@case
def prelu_and_softmax_inside() -> Case:
    model = nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 4), nn.Softmax(-1), nn.Linear(4, 3))
    return classification(model, (4,), 3)


@case
def confident() -> Case:
    """Outputs of a network that fits its rows with margins of 10 to 30 nats."""
    made = classification(mlp(4, 6, 3), (4,), 3, rows=8, l2=0.01)
    with torch.no_grad():
        made.model[2].weight.mul_(25.0)
        inputs = made.train[0]
        targets = made.model.double()(inputs).argmax(-1)
        targets[0] = (targets[0] + 1) % 3
    return Case(made.model, made.loss, (inputs, targets), made.queries, made.candidates, made.settings)


# layers of which some may be refused, by name, instead of answered


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.recurrent = kind(3, 3, batch_first=True)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0][:, -1])


class Cosines(nn.Module):
    """A head that compares with stored directions, the matrix times a learnt temperature."""

    def __init__(self):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(5, 4))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * F.cosine_similarity(x[:, None], self.directions[None], dim=-1)


class Bag(nn.Module):
    """The mean of some embeddings; `plain` is the same without `nn.EmbeddingBag`."""

    def __init__(self, plain: bool = False):
        super().__init__()
        self.bag = nn.Embedding(6, 4) if plain else nn.EmbeddingBag(6, 4, mode="mean")
        self.last = nn.Linear(4, 3)
        self.plain = plain

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.bag(tokens).mean(1) if self.plain else self.bag(tokens)
        return self.last(torch.tanh(words))


def exotic(name: str) -> Case:
    """Less common parts: a right answer or an error that names the layer, nothing in between."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = _exotic(name)
    made.model.double().eval()
    return made


def _exotic(name: str) -> Case:
    if name == "EmbeddingBag":
        tokens, labels = torch.randint(6, (12, 3)), torch.randint(3, (12,))
        train, queries, candidates = ((tokens[a:b], labels[a:b]) for a, b in ((0, 7), (7, 10), (10, 12)))
        return Case(Bag(), "cross_entropy", train, queries, candidates)
    if name in ("LSTM", "GRU", "RNN"):
        return classification(Recurrent(getattr(nn, name)), (4, 3), 3, rows=6)
    if name == "InstanceNorm2d":
        layers = [nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True), nn.Flatten(), nn.Linear(18, 3)]
        return classification(nn.Sequential(*layers), (1, 4, 4), 3, rows=6)
    if name == "Conv3d":
        return classification(nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(16, 3)), (1, 3, 3, 3), 3, 6)
    first: list[nn.Module] = {
        "RMSNorm": [nn.Linear(4, 5), nn.RMSNorm(5)],
        "SpectralNorm": [parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh()],
        "WeightNorm": [parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh()],
        "CosineSimilarity": [Cosines(), nn.Tanh()],
    }[name]
    return classification(nn.Sequential(*first, nn.Linear(5, 3)), (4,), 3, rows=6)


def exotic_oracle(name: str) -> Oracle:
    """The truth about an exotic case, the same function in plain arithmetic where PyTorch cannot be asked.

    Seen in torch 2.13: the second derivative of `weight_norm` is wrong (its Hessian is not symmetric) and that of
    `EmbeddingBag` does not exist.
    """
    made = exotic(name)
    if name == "EmbeddingBag":
        bag = Bag(plain=True).double()
        bag.load_state_dict(made.model.state_dict())
        made = replace(made, model=bag)
    if name == "WeightNorm":
        torch_layer = made.model[0]
        plain: Any = nn.Linear(4, 5).double()
        with torch.no_grad():
            plain.weight.copy_(torch_layer.parametrizations.weight.original1)
            plain.bias.copy_(torch_layer.bias)
        parametrize.register_parametrization(plain, "weight", Direction())
        with torch.no_grad():
            plain.parametrizations.weight.original0.copy_(torch_layer.parametrizations.weight.original0)
        made = replace(made, model=nn.Sequential(plain, *made.model[1:]))
    return made.oracle()


EXOTIC = [
    "Conv3d",
    "CosineSimilarity",
    "EmbeddingBag",
    "GRU",
    "InstanceNorm2d",
    "LSTM",
    "RMSNorm",
    "RNN",
    "SpectralNorm",
    "WeightNorm",
]
