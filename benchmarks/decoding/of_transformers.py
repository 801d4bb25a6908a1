"""transformers' ``generate``: plain, with prompt lookup, or with an assistant model."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.decoding.worker import Job, Made, System


class Measured(System):
    """Options: ``lookup``, tokens that a round of prompt lookup proposes; ``assisted``; neither is plain decoding."""

    packages = ("transformers",)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model, self.arguments, self.passes = _load(job.target, job.dtype), dict[str, Any](), 0
        if "lookup" in job.options:
            self.arguments["prompt_lookup_num_tokens"] = job.options["lookup"]
        if job.options.get("assisted"):
            assert job.assistant is not None
            self.arguments["assistant_model"] = assistant = _load(job.assistant, job.dtype)
            layers = assistant.config.num_hidden_layers
            self.more["assistant"] = f"{layers} layers, {assistant.num_parameters():,} parameters"
        self.more["attention"] = self.model.config._attn_implementation
        self.model.register_forward_hook(self._count)

    def before(self) -> None:
        self.passes = 0

    @torch.inference_mode()
    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        ids_1T = torch.tensor([prompt])
        mask_1T = torch.ones_like(ids_1T)
        out_1T = self.model.generate(
            ids_1T, attention_mask=mask_1T, do_sample=False, max_new_tokens=tokens, **self.arguments
        )
        return out_1T[0, len(prompt) :].tolist()

    def made(self, raw: list[int]) -> Made:
        return Made(raw, self.passes, len(raw))

    def _count(self, *_: Any) -> None:
        self.passes += 1


def _load(directory: str, dtype: str) -> PreTrainedModel:
    """A model that ends no text."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
