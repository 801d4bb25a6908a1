"""A drafter's weights as papers and checkpoints have them: one matrix for each projection."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.drafter import Drafter
from specdec.export import tensors


def published(drafter: Drafter) -> dict[str, Tensor]:
    """The parameters, with the joined ones under the names of one matrix a projection; gradients flow back."""
    return tensors.to_published(dict(drafter.named_parameters()), drafter.config)


@torch.no_grad()
def fill(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """The inverse: give the parameters the values of published weights."""
    parameters = dict(drafter.named_parameters())
    made = published(drafter)
    assert {name: x.shape for name, x in made.items()} == {
        name: x.shape for name, x in weights.items()
    }
    for name, values in tensors.from_published(parameters, weights, drafter.config).items():
        parameters[name].copy_(values)
