"""The family's own head, run on a given state."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specdec.target.head import Head
from tests.target.zoo import VOCAB, WIDTH, make


@pytest.mark.parametrize(
    ("family", "after"),
    [
        ("granite", lambda logits: logits / 3.0),
        ("hyperclovax", lambda logits: logits * 3.0),
        ("gemma2", lambda logits: 3.0 * torch.tanh(logits / 3.0)),
        ("cohere2", lambda logits: logits * 0.3),
    ],
)
def test_what_the_family_does_after_the_head(family: str, after: Callable[[Tensor], Tensor]) -> None:
    model = make(family)
    head = model.get_output_embeddings()
    state_1TH = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    logits_1TV = Head(model, model.get_decoder(), head)(state_1TH, None)
    torch.testing.assert_close(logits_1TV, after(state_1TH @ head.weight.T))


def test_rows_keep_their_bias() -> None:
    model = make("phi")
    head = model.get_output_embeddings()
    state_1TH, rows_D = torch.randn(1, 3, WIDTH, dtype=torch.float64), torch.tensor([7, 7, VOCAB - 1])
    logits_1TD = Head(model, model.get_decoder(), head)(state_1TH, rows_D)
    torch.testing.assert_close(logits_1TD, state_1TH @ head.weight[rows_D].T + head.bias[rows_D])


def test_a_head_elsewhere_is_refused() -> None:
    model = make("llama")
    with pytest.raises(ValueError, match="not its own direct parts"):
        Head(model, model.get_decoder(), nn.Linear(2, 2))
