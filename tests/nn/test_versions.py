"""Tensors that are no longer what they were."""

import torch

from specdec.nn.versions import versions


def test_writing_and_moving_are_seen() -> None:
    with torch.inference_mode():
        fixed = torch.ones(2)
    tensors = [torch.ones(3), fixed]
    before = versions(tensors)
    assert versions(tensors) == before and before[1] == (fixed.data_ptr(), 0)
    tensors[0].add_(0)
    written = versions(tensors)
    assert written[0] != before[0] and written[1] == before[1]
    kept, tensors[0] = tensors[0], tensors[0].clone()
    assert versions(tensors)[0] != written[0] and versions([kept])[0] == written[0]
