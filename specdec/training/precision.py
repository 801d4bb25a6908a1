"""Lightning's precisions as dtypes."""

from typing import NamedTuple

import torch

ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}  # Lightning's


class Precision(NamedTuple):
    """What a drafter is trained in."""

    weights: torch.dtype
    autocast: torch.dtype | None  # of products, where it is another than the weights'

    @property
    def products(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return self.autocast or self.weights


KNOWN = {
    "64-true": Precision(torch.float64, None),
    "32-true": Precision(torch.float32, None),
    "bf16-true": Precision(torch.bfloat16, None),
    "16-true": Precision(torch.float16, None),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16),
    "16-mixed": Precision(torch.float32, torch.float16),
}


def precision(name: object) -> Precision | None:
    """What ``trainer.precision`` means, given as Lightning takes it; None for one that is not known."""
    said = str(name)
    return KNOWN.get(ALIASES.get(said, said))
