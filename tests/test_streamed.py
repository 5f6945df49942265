"""Rows of a dataset that does not fit: read in chunks in every pass, never all at once, with the same answer."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import downweight as dw
import downweight.rows


class Counted(Dataset):
    """Rows made on demand, with a count of how many were read."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets, self.reads = inputs, targets, 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return self.inputs[index], self.targets[index]


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(downweight.rows, "_KEEP_FRACTION", 0.0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(23, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (23,), generator=generator)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval(), inputs, targets


@pytest.mark.parametrize("solver", ["dual", "cg", "cholesky"])
def test_streamed_rows_give_what_tensors_give(made, solver):
    model, inputs, targets = made
    queries = inputs[:4], targets[:4]
    streamed = dw.Task(model, "cross_entropy", Counted(inputs, targets), l2=0.01)
    assert isinstance(streamed.rows, downweight.rows.DatasetRows)
    held = dw.Task(model, "cross_entropy", (inputs, targets), l2=0.01)
    settings = {"damping": 0.01, "solver": solver}
    mine, theirs = (dw.influence(task, queries, **settings).values for task in (streamed, held))
    # The same sums in the same order of rows; CG stops at 1e-10.
    torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-12)
    assert streamed.fingerprint() == held.fingerprint()


def test_nothing_is_read_before_it_is_needed(made):
    model, inputs, targets = made
    dataset = Counted(inputs, targets)
    dw.Task(model, "cross_entropy", dataset)
    assert dataset.reads < 10  # the first rows, to learn their shapes and that they repeat


@pytest.mark.parametrize(("row", "target", "kind"), [(17, 3, dw.InvalidInput), (9, -1, dw.InvalidInput)])
def test_a_bad_target_is_found_when_its_chunk_is_read(made, row, target, kind):
    model, inputs, targets = made
    targets[row] = target
    task = dw.Task(model, "cross_entropy", Counted(inputs, targets))
    with pytest.raises(kind, match="class"):
        dw.influence(task, (inputs[:2], torch.tensor([0, 1])), damping=0.1)


def test_a_bad_query_of_a_streamed_dataset_is_found_too(made):
    model, inputs, targets = made
    task = dw.Task(model, "cross_entropy", (inputs, targets))
    asked = Counted(inputs[:4], torch.tensor([0, 1, 7, 2]))
    with pytest.raises(dw.InvalidInput, match=r"queries.*class 7"):
        dw.influence(task, asked, damping=0.1)


def test_nan_in_a_streamed_row_names_the_row(made):
    model, inputs, targets = made
    inputs[19, 2] = torch.nan
    task = dw.Task(model, "cross_entropy", Counted(inputs, targets))
    with pytest.raises(dw.NonFinite, match="row 19"):
        dw.influence(task, (inputs[:2], targets[:2]), damping=0.1)


def test_random_augmentation_is_refused(made):
    model, inputs, targets = made

    class Augmented(Counted):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index] + torch.randn(5), self.targets[index]

    with pytest.raises(dw.InvalidInput, match="random"):
        dw.Task(model, "cross_entropy", Augmented(inputs, targets))
