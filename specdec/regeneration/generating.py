"""Prompts of different lengths into the tokens that follow them, by transformers' ``generate``.

Legend: B prompts of a batch, T tokens of the longest, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from specdec.decoding import Sampling
from specdec.decoding.sampling import Chance
from specdec.target import Target


class Generator:
    """What the target says to each prompt is what it says to it alone, up to rounding.

    With a temperature tokens are drawn from seed and place, as :class:`specdec.decoding.PlainDecoder` draws them. The
    generation config that the target brings is read for its end tokens alone.
    """

    def __init__(self, target: Target, sampling: Sampling, max_new_tokens: int) -> None:
        self.target, self.sampling = target, sampling
        self.ends = target.eos_token_ids
        target.model.generation_config = GenerationConfig(eos_token_id=sorted(self.ends) or None)  # no penalties of its
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,  # chance comes with the logits, see Drawing
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=min(self.ends, default=0),
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[list[int]]:
        """New tokens of each prompt, its end token included.

        Raises:
            ValueError: there is not enough memory for so many, or the target's logits are not numbers.
        """
        device, width, pad = self.target.device, max(map(len, prompts)), self.config.pad_token_id
        ids_BT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device)
        length_B = torch.tensor([len(ids) for ids in prompts], device=device)
        mask_BT = (torch.arange(width, device=device) >= width - length_B[:, None]).long()
        sound = Sound(torch.zeros(len(prompts), dtype=torch.bool, device=device))
        drawing = LogitsProcessorList([sound])
        if self.sampling.temperature > 0:
            none_B0 = torch.zeros(len(prompts), 0, dtype=torch.bool, device=device)
            chance = Chance(self.sampling, torch.tensor(seeds, device=device), none_B0)
            drawing.append(Drawing(chance, length_B - width))
        try:
            out_BT = self.target.model.generate(
                input_ids=ids_BT, attention_mask=mask_BT, generation_config=self.config, logits_processor=drawing
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"not enough memory for {len(prompts)} prompts of up to {width} tokens: give a smaller --batch_size"
            ) from error
        if sound.lost_B.any():
            raise ValueError(
                f"{self.target.source}: its logits are not numbers in {self.target.dtype}: load it in another dtype"
            )
        return [self._ended(ids) for ids in out_BT[:, width:].tolist()]

    def _ended(self, ids: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(ids, start=1) if token in self.ends), len(ids))
        return ids[:end]


class Sound(LogitsProcessor):
    """Notes which rows had a NaN among their logits, and changes nothing."""

    def __init__(self, lost_B: Tensor) -> None:
        self.lost_B = lost_B

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, T) and (B, V) to (B, V)."""
        self.lost_B |= scores.isnan().any(-1)
        return scores


class Drawing(LogitsProcessor):
    """Leaves one token possible, the one that is drawn.

    Args:
        shift_B: what a prompt's place in its own text is ahead of its column in the batch; not positive.
    """

    def __init__(self, chance: Chance, shift_B: Tensor) -> None:
        self.chance, self.shift_B = chance, shift_B

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, T) and (B, V) to (B, V)."""
        token_B = self.chance.draw(scores, self.shift_B + input_ids.shape[1])
        return torch.full_like(scores, float("-inf")).scatter(1, token_B[:, None], 0.0)
