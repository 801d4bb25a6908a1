"""A drafter in Hugging Face's ``model.generate``, through its argument ``custom_generate``.

Legend: T prompt tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode

from specdec.decoding.accept import Sampling
from specdec.decoding.checks import warn_unless_made_for
from specdec.decoding.decoder import SpeculativeDecoder
from specdec.decoding.generation import Generation, Request
from specdec.decoding.parse import parse_shape
from specdec.decoding.shapes import Chain, DraftShape
from specdec.drafter import Drafter, load_drafter
from specdec.target import Target

# what transformers makes of generate's temperature, top_k, top_p and min_p; by class the name of the value
WARPERS: Mapping[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# what generate can return beside the tokens, of passes that it makes itself
UNAVAILABLE = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# arguments that generate passes on: the decoder makes them itself, or _check_inputs checks them
KNOWN = (
    "attention_mask",
    "cache",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "token_type_ids",
    "use_cache",
)


class DraftedGenerate:
    """Speculative decoding for ``model.generate(..., custom_generate=...)``; the output is the model's own.

    Greedy decoding gives the tokens that ``generate`` gives without it, up to rounding; sampling has the same
    distribution, and ``torch.manual_seed`` repeats it. Stopping criteria work as usual; give a streamer as
    ``token_streamer``.

    Example::

        drafted = DraftedGenerate(model, "runs/mine/drafter")
        model.generate(**inputs, custom_generate=drafted, max_new_tokens=256)
        print(drafted.generation.acceptance_length)

    The model is put in evaluation mode, its parameters are frozen, and its attention is set to one of specdec's, which
    also verifies draft trees.

    Args:
        model: the target, loaded. Its hidden states, logits and cached verification are checked first, as for training.
        drafter: a drafter, or the directory or run that holds it, or its name on the Hub.
        shape: of the drafts, as text (``chain:depth=4``) or an object.
        compiled: whether target and drafter run as compiled graphs. The first call compiles them.

    Attributes:
        generation: what the last call generated and how, its acceptance length among it; None before the first.

    Raises:
        ValueError: the drafter cannot be read, was trained for another model, or specdec does not support the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | str | Path,
        shape: DraftShape | str = Chain(),  # noqa: B008  frozen
        compiled: bool = False,
    ) -> None:
        self.target = Target(model, source=model.name_or_path or "in memory")
        self.target.prove()
        if not isinstance(drafter, Drafter):
            drafter = load_drafter(drafter)
        self.drafter = drafter.to(device=self.target.device, dtype=self.target.dtype)
        warn_unless_made_for(self.target, self.drafter, refuse=True)
        self.shape = parse_shape(shape) if isinstance(shape, str) else shape
        self.compiled = compiled
        self.generation: Generation | None = None
        self._decoder = self._new_decoder(Sampling())

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        token_streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after one prompt; ``generate`` calls this with what it has prepared.

        Args:
            input_ids: (1, T) int64.
            logits_processor: what ``generate`` made of its arguments; temperature, top-k, top-p and min-p alone.
            token_streamer: gets the prompt, every new token, and the end. ``generate`` puts the prompt to its own
                ``streamer`` and does not hand it on (transformers 5.16 to 5.24).

        Returns:
            Prompt and new tokens, (1, T + new) int64; within transformers' output class if
            ``return_dict_in_generate`` is set.

        Raises:
            ValueError: an argument of ``generate`` is not supported; the message names it.
        """
        if model is not self.target.model:
            raise ValueError(
                "this drafter was prepared for another model object: make one for this"
            )
        _check_inputs(input_ids, generation_config, model_kwargs)
        prompt = input_ids[0].tolist()
        sampling = _sampling(logits_processor, generation_config)
        if sampling != self._decoder.sampling:
            self._decoder = self._new_decoder(sampling)
        seed = int(torch.randint(2**31, ())) if generation_config.do_sample else 0
        request = Request(prompt, generation_config.max_length - len(prompt), seed)
        if token_streamer is not None:
            streamer = token_streamer
            streamer.put(input_ids.cpu())
        tokens = input_ids
        for generation in self._decoder.passes(request, _end_tokens(generation_config)):
            is_done = False
            for token in generation.ids[tokens.shape[1] - len(prompt) :]:
                new = tokens.new_tensor([[token]])
                tokens = torch.cat([tokens, new], dim=1)
                if streamer is not None:
                    streamer.put(new[0].cpu())
                # after every token: what a pass committed behind the one that ends the text is not part of it
                is_done = bool(stopping_criteria(tokens, None).all())
                if is_done:
                    break
            self.generation = _cut(generation, tokens.shape[1] - len(prompt))
            if is_done:
                break
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=tokens)
        return tokens

    def _new_decoder(self, sampling: Sampling) -> SpeculativeDecoder:
        """Return a decoder with these sampling parameters; it serves further calls with the same ones."""
        return SpeculativeDecoder(
            self.target, self.drafter, self.shape, sampling, compiled=self.compiled
        )


def _check_inputs(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError for what plain ``generate`` takes and speculative decoding does not."""
    if config.num_beams != 1:
        raise ValueError(
            f"num_beams={config.num_beams}: beam search cannot be drafted for; leave it out"
        )
    if len(input_ids) != 1:
        raise ValueError(
            f"a drafter decodes one sequence at a time, not {len(input_ids)}: call generate for each prompt, or use "
            "specdec.SpeculativeDecoder, which has batches"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"{mode.value} cannot be drafted for: only greedy search and sampling can")
    for name, value in model_kwargs.items():
        if value is not None and name not in KNOWN:
            raise ValueError(f"{name} cannot be given to a drafter: leave it out")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("the prompt has padding (attention_mask has zeros): give it without")
    positions = model_kwargs.get("position_ids")
    plain_positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    if positions is not None and not torch.equal(positions[0], plain_positions):
        raise ValueError("position_ids must count from 0: leave them out")
    types = model_kwargs.get("token_type_ids")
    if types is not None and bool(types.any()):
        raise ValueError("token_type_ids must be 0, of text alone")
    for name in ("past_key_values", "cache"):  # the new name, from transformers 5.24 on
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length():
            raise ValueError(f"{name} holds tokens already: give the whole text as input_ids")
    unavailable = [name for name in UNAVAILABLE if getattr(config, name)]
    if unavailable:
        raise ValueError(f"{unavailable[0]}=True is not available with a drafter: leave it out")


def _sampling(processors: LogitsProcessorList, config: GenerationConfig) -> Sampling:
    """Return the sampling that these logits processors make; ValueError for any that is not among :data:`WARPERS`."""
    order = list(WARPERS)
    places = []
    for processor in processors:
        if type(processor) not in WARPERS:
            raise ValueError(
                f"{type(processor).__name__} cannot be applied to drafts: only temperature, top_k, top_p and min_p "
                "can; leave out the argument of generate that asks for it, or generate without custom_generate"
            )
        places.append(order.index(type(processor)))
    if sorted(set(places)) != places:
        raise ValueError("logits processors must be temperature, top_k, top_p and min_p, once each")
    if not config.do_sample:
        return Sampling()
    values: dict[str, Any] = {"temperature": 1.0}
    for processor in processors:
        name = WARPERS[type(processor)]
        values[name] = getattr(processor, name)
    return Sampling(**values)


def _end_tokens(config: GenerationConfig) -> Sequence[int]:
    ids = config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids


def _cut(generation: Generation, length: int) -> Generation:
    """Return the generation up to this many tokens, of which the last pass gave at least one."""
    surplus = len(generation.ids) - length
    if not surplus or not generation.accepted:
        return generation
    accepted = (*generation.accepted[:-1], generation.accepted[-1] - surplus)
    return dataclasses.replace(generation, ids=generation.ids[:length], accepted=accepted)
