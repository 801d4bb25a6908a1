"""speculators' step: its own EAGLE-3 model, loss and optimizer, in the order of its trainer's epoch.

It freezes the drafter's head unless told otherwise; it is trained here, as in the other systems. The loss is its
eager one: the fused one needs Triton, and so a GPU.
"""

from functools import partial
from types import SimpleNamespace

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.optimizers import build_optimizers
from transformers import LlamaConfig

from benchmarks.training import recipe
from benchmarks.training.recipe import Job, System

DECAY, CLIP = 0.8, 1.0  # what EAGLE-3 and specdec use; what its trainer does


def make_model(
    size: recipe.Workload, weights: recipe.Weights, data: recipe.Data, attention: str
) -> Eagle3DraftModel:
    """Its drafter with the common weights; the target's head is cut to the draft vocabulary, as it always does."""
    layer = LlamaConfig(**recipe.llama_sizes(size))
    layer._attn_implementation = attention
    plan = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=size.unroll)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=size.draft_vocab,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=plan,
        )
    )
    ids_D = data.draft_ids_D
    in_draft_V = torch.zeros(size.vocab, dtype=torch.bool)
    in_draft_V[ids_D] = True
    model.load_vocab_mappings(in_draft_V, ids_D - torch.arange(size.draft_vocab))
    values = {
        "embed_tokens": weights.embed_VH,
        "fc": weights.fc_H3H,
        "lm_head": weights.head_DH,
        "norm": weights.output_norm_H,
        "verifier_lm_head": weights.target_head_VH[ids_D],
        "verifier_norm": torch.full((size.hidden,), data.final_scale),
    }
    recipe.fill(model, values | recipe.layer(weights, "layers.0"))
    model.lm_head.weight.requires_grad_(True)
    return model.train()


def build(job: Job) -> System:
    """Options: the attention's name."""
    size, dtype = recipe.WORKLOADS[job.workload], getattr(torch, job.dtype)
    weights, data = recipe.draw(size, job.seed)
    positions = recipe.taught(size, job.mask)
    model = make_model(size, weights, data, job.options[0])
    last = data.last
    if dtype == torch.float64:  # the target's states normed beforehand, for its norm has an epsilon
        model, last = model.double(), data.final
        model.verifier_norm = torch.nn.Identity()
    optimizers = build_optimizers(
        model, SimpleNamespace(optimizer="adamw", lr=1e-4, weight_decay=0.0)
    )
    arguments, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="eager",
        ttt_steps=size.unroll,
        ttt_step_loss_decay=DECAY,
    )
    T = size.tokens
    batch = {
        "hidden_states": data.aux_T3H[None].to(dtype),
        "input_ids": data.ids[None, 1:].clone(),
        # it applies the target's final norm itself
        "verifier_last_hidden_states": last[None, 1:].to(dtype),
        "document_ids": torch.zeros(1, T, dtype=torch.long),
        "loss_mask": recipe.slot_mask(size, job.mask)[None],
        # it counts from one; attention sees differences alone
        "position_ids": torch.arange(T)[None],
    }
    seen: dict[str, torch.Tensor] = {}

    def backward() -> torch.Tensor:
        with torch.autocast(job.device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            _, loss, metrics = model(
                **(batch | {"loss_mask": batch["loss_mask"].clone()}), **arguments
            )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        seen.update({name: value for name, value in metrics.items() if name.startswith("loss_")})
        return loss

    def step() -> None:
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()

    entropy = recipe.per_step(size, recipe.entropies(data, weights, positions), positions)
    rows = recipe.per_step(size, torch.ones(len(positions)), positions)

    def losses() -> list[float]:
        """Undone: the step's decay, and KL's missing entropy."""
        return [
            float(seen[f"loss_{k}_sum"]) / DECAY**k + entropy[k] / rows[k]
            for k in range(size.unroll)
        ]

    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients = partial(recipe.gradients, model, "layers.0")
    return System(step, backward, gradients, losses, trainable, ("speculators", "transformers"))
