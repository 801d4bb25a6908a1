"""specforge's step: its own strategy, EAGLE-3 model, loss and optimizer.

Its loss exists twice: a Triton kernel, which needs a GPU, and the compiled reference beside it, for CPUs.
"""

from functools import partial
from types import SimpleNamespace

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.core import loss as losses_module
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from transformers import LlamaConfig

from benchmarks.training import recipe
from benchmarks.training.recipe import Job, System


class ReferenceLoss:
    """Stands where the Triton function stands."""

    @staticmethod
    def apply(logits: torch.Tensor, target_p: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Its own reference."""
        return losses_module._compute_loss(logits, target_p, mask)


def make_drafter(
    size: recipe.Workload, weights: recipe.Weights, ids_D: torch.Tensor
) -> LlamaForCausalLMEagle3:
    """Its drafter with the common weights, the embedding frozen."""
    more = {"draft_vocab_size": size.draft_vocab, "hidden_act": "silu", "pad_token_id": 0}
    config = LlamaConfig(**recipe.llama_sizes(size), **more)
    config.pretraining_tp = 1
    drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    values = {
        "embed_tokens": weights.embed_VH,
        "fc": weights.fc_H3H,
        "lm_head": weights.head_DH,
        "norm": weights.output_norm_H,
    }
    recipe.fill(drafter, values | recipe.layer(weights, "midlayer"))
    drafter.t2d.zero_()[ids_D] = True
    drafter.d2t.copy_(ids_D - torch.arange(size.draft_vocab))
    drafter.embed_tokens.weight.requires_grad_(False)
    return drafter


def make_head(size: recipe.Workload, weights: recipe.Weights) -> TargetHead:
    """The frozen target's head. Its constructor wants a checkpoint on disk, so it is filled by hand."""
    head = TargetHead.__new__(TargetHead)
    torch.nn.Module.__init__(head)
    head.config = SimpleNamespace(vocab_size=size.vocab)
    head.fc = torch.nn.Linear(size.hidden, size.vocab, bias=False)
    with torch.no_grad():
        head.fc.weight.copy_(weights.target_head_VH)
    head.freeze_weights()
    return head.eval()


def build(job: Job) -> System:
    """Options: ``compact`` streams the target's head instead of holding its logits."""
    if job.device == "cpu":
        eagle3.LogSoftmaxLoss = ReferenceLoss
    size, dtype = recipe.WORKLOADS[job.workload], getattr(torch, job.dtype)
    weights, data = recipe.draw(size, job.seed)
    positions = recipe.taught(size, job.mask)
    drafter = make_drafter(size, weights, data.draft_ids_D).to(dtype)
    model = eagle3.OnlineEagle3Model(
        draft_model=drafter, length=size.unroll, attention_backend="sdpa"
    ).train()
    head = make_head(size, weights).to(dtype)
    strategy = Eagle3TrainStrategy(
        model, target_head=head, compact_teacher="compact" in job.options
    )
    optimizer = BF16Optimizer(model, lr=1e-4, max_grad_norm=0.5, total_steps=1000, warmup_ratio=0.0)
    T = size.tokens
    tensors = {  # it shifts tokens and states by one itself, and not the mask
        "input_ids": data.ids[None, :T].clone(),
        "attention_mask": torch.ones(1, T, dtype=torch.long),
        "loss_mask": recipe.slot_mask(size, job.mask)[None].long(),
        "hidden_state": data.aux_T3H[None].to(dtype),
        "target": data.final[None, :T].to(dtype),
    }
    batch = TrainBatch(
        sample_ids=["0"],
        strategy="eagle3",
        tensors=tensors,
        metadata={"target_repr": "hidden_state"},
    )
    seen: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        out = strategy.forward_loss(batch)
        out.loss.backward()
        seen[:] = out.metrics["plosses"]
        return out.loss

    def step() -> None:
        backward()
        optimizer.step()

    rows = recipe.per_step(size, recipe.known(data, weights, positions), positions)

    def losses() -> list[float]:
        """Undone: its mean is over all T slots, whatever counts."""
        return [float(value) * T / n for value, n in zip(seen, rows, strict=True)]

    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients = partial(recipe.gradients, drafter, "midlayer")
    return System(step, backward, gradients, losses, trainable, ("specforge", "transformers"))
