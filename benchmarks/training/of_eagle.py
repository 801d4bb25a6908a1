"""EAGLE-3's official step: the model of SafeAILab/EAGLE's ``eagle/traineagle3/cnets.py``, which is no part of this
repository. Its target, draft vocabulary scan and DeepSpeed are left out: states and logits are given.
"""

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.training import recipe
from benchmarks.training.recipe import Job, System

DECAY = 0.8  # of its training script's step weights


class Given(torch.nn.Module):
    """Stands where its target stands."""

    def __init__(self, states: list[torch.Tensor], logits: torch.Tensor) -> None:
        super().__init__()
        self.outputs = SimpleNamespace(hidden_states=states, logits=logits)

    def forward(self, **_: Any) -> Any:
        """What the target says of the batch."""
        return self.outputs


def load(path: str, target: Given) -> ModuleType:
    """The file as a module; what it imports from its own folder is the target and a config class that it never uses."""
    for name, values in {
        "modeling_llama_kv": {
            "LlamaForCausalLM": SimpleNamespace(from_pretrained=lambda *_, **__: target)
        },
        "configs": {"EConfig": None},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    spec = importlib.util.spec_from_file_location("eagle_cnets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(job: Job) -> System:
    """Options: the path of ``cnets.py``."""
    size, dtype = recipe.WORKLOADS[job.workload], getattr(torch, job.dtype)
    weights, data = recipe.draw(size, job.seed)
    positions = recipe.taught(size, job.mask)
    T = size.tokens
    logits = data.final[None, :T].to(dtype) @ weights.target_head_VH.to(dtype).T
    target = Given(list(data.aux_T3H[None].to(dtype).chunk(3, dim=-1)), logits)
    config = LlamaConfig(
        **recipe.llama_sizes(size), draft_vocab_size=size.draft_vocab, hidden_act="silu"
    )
    config.pretraining_tp, config.pad_token_id, config.rope_scaling = 1, None, None
    cnets = load(job.options[0], target)
    model = cnets.Model(
        config, None, SimpleNamespace(gradient_checkpointing=False), load_emb=False, path=""
    )
    del model.target_model  # so that fill sees the drafter alone
    values = {
        "embed_tokens": weights.embed_VH,
        "fc": weights.fc_H3H,
        "lm_head": weights.head_DH,
        "norm": weights.output_norm_H,
    }
    recipe.fill(model, values | recipe.layer(weights, "midlayer"))
    model.target_model = target
    in_draft_V = torch.zeros(size.vocab, dtype=torch.bool)
    in_draft_V[data.draft_ids_D] = True
    model.register_buffer("t2d", in_draft_V)
    model.to(dtype).train()
    # it trains slot t where the token of t's feature is an answer's: the mask of slots is what it is given
    batch = {
        "input_ids": data.ids[None, :T].clone(),
        "loss_mask": recipe.slot_mask(size, job.mask)[None].long(),
    }
    seen: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        model.zero_grad()
        seen[:] = model(**batch)[0]
        loss = torch.stack([DECAY**k * value for k, value in enumerate(seen)]).sum()
        loss.backward()
        return loss

    rows = recipe.per_step(size, recipe.known(data, weights, positions), positions)

    def losses() -> list[float]:
        """Undone: its mean is over all T slots, whatever counts."""
        return [float(value) * T / n for value, n in zip(seen, rows, strict=True)]

    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return System(
        backward,
        backward,
        partial(recipe.gradients, model, "midlayer"),
        losses,
        trainable,
        ("transformers",),
    )
