"""What the target says without any of our decoding."""

import torch

from specdec.target import Target


def generated(target: Target, prompt: list[int], most: int, end: tuple[int, ...] = ()) -> list[int]:
    """Greedy tokens by transformers' own loop and cache."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=most,
        eos_token_id=list(end) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
