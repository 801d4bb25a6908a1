import torch
from torch import nn

from specdec.embedded.optimizer import MuonAdamW


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
    matrix.grad, vector.grad = torch.randn(4, 6), torch.randn(6)
    return matrix, vector


def test_steps_as_the_two_alone() -> None:
    matrix, vector = parameters()
    MuonAdamW([matrix], [vector], lr=0.02, lr_rest=0.01).step()
    lone_matrix, lone_vector = parameters()
    torch.optim.Muon([lone_matrix], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW([lone_vector], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
    assert torch.equal(matrix, lone_matrix)
    assert torch.equal(vector, lone_vector)


def test_one_schedule_drives_both() -> None:
    matrix, vector = parameters()
    before = matrix.detach().clone(), vector.detach().clone()
    optimizer = MuonAdamW([matrix], [vector], lr=0.02, lr_rest=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    optimizer.step()
    assert torch.equal(matrix, before[0]) and torch.equal(vector, before[1])
    schedule.step()
    optimizer.step()
    assert not torch.equal(matrix, before[0]) and not torch.equal(vector, before[1])
    optimizer.zero_grad()
    assert matrix.grad is None and vector.grad is None


def test_closure() -> None:
    matrix, vector = parameters()
    optimizer = MuonAdamW([matrix], [vector], lr=0.02, lr_rest=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = matrix.square().sum() + vector.sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == parameters()[0].square().sum().item() + parameters()[1].sum().item()
    assert torch.equal(vector.grad, torch.ones(6))
