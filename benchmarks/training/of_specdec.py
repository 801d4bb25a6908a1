"""specdec's step: its own drafter, objective, unroll kernel and optimizer, in the order of a step under Lightning.

Options: ``compiled`` fuses the point-wise pieces, ``every`` trains rows whose likeliest target token the draft
vocabulary lacks too (speculators' definition), ``kl`` minimizes forward KL instead of soft cross-entropy, ``steps=3``
unrolls three steps.
"""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import specdec.training.step as step_module
from benchmarks.training import recipe
from benchmarks.training.recipe import Job, System
from specdec.data import Batch
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Norms, PreNorm
from specdec.nn.backend import compile_pointwise, keep_freed_memory, matmul_backend
from specdec.nn.kernels import unroll_kernel
from specdec.nn.optimizers import AdamW
from specdec.target import Target, TargetOutput
from specdec.training.divergences import ForwardKL
from specdec.training.losses import SoftCrossEntropy
from specdec.training.step import CUDA_PIECE, ObjectiveConfig, TrainStep, target_outputs

CLIP = 0.5  # specdec fit's default
BOUNDARIES = [1, 2, 3]


class Given(Target):
    """A target whose states are given, so that only its head is left to do."""

    states: TargetOutput

    def forward(self, *_: Any, **__: Any) -> TargetOutput:
        """The states."""
        return self.states


def make_target(
    size: recipe.Workload, weights: recipe.Weights, data: recipe.Data, dtype: torch.dtype
) -> Given:
    """The target of the data."""
    sizes = recipe.llama_sizes(size) | {
        "intermediate_size": 8,
        "num_hidden_layers": len(BOUNDARIES),
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        model.lm_head.weight.copy_(weights.target_head_VH)
    target, T = Given(model.to(dtype)), size.tokens
    aux_BTNH = data.aux_T3H.to(dtype).view(1, T, len(BOUNDARIES), size.hidden)
    target.states = TargetOutput(aux_BTNH, data.final[None, :T].to(dtype))
    return target


def make_drafter(
    size: recipe.Workload, weights: recipe.Weights, target: Target, ids_D: Tensor
) -> Drafter:
    """EAGLE-3's drafter with the common weights; all is trained but the embedding."""
    spec = DrafterSpec(
        norms=Norms(),
        recurrence=PreNorm(),
        draft_vocab_size=size.draft_vocab,
        aux_layers=BOUNDARIES,
        intermediate_size=size.feed_forward,
    )
    config = DrafterConfig.for_target(
        spec,
        target.config,
        vocab_size=size.vocab,
        num_target_layers=len(BOUNDARIES),
        identity={"source": "benchmark"},
    )
    drafter = Drafter(config, ids_D)
    qkv, H, layer = (
        torch.cat([weights.q, weights.k, weights.v]),
        size.hidden,
        drafter.layers.layers[0],
    )
    values: dict[nn.Module, Tensor] = {
        drafter.embed_tokens: weights.embed_VH,
        drafter.fusion.fc: weights.fc_H3H,
        drafter.entry.token_qkv_proj: qkv[:, :H],
        layer.attention.qkv_proj: qkv[:, H:],
        layer.attention.o_proj: weights.o,
        layer.mlp.gate_up_proj: torch.cat([weights.gate_IH, weights.up_IH]),
        layer.mlp.down_proj: weights.down_HI,
        drafter.lm_head: weights.head_DH,
        drafter.norms.embed: weights.embed_norm_H,
        drafter.norms.hidden: weights.feature_norm_H,
        layer.post_attention_norm: weights.middle_norm_H,
        drafter.norms.output: weights.output_norm_H,
    }
    with torch.no_grad():
        for module, value in values.items():
            module.weight.copy_(value)
    assert {id(p) for p in drafter.parameters()} == {id(module.weight) for module in values}
    drafter.embed_tokens.weight.requires_grad_(False)
    return drafter


# of the process: a context that nobody holds is left at once
UNTIL_THE_END = contextlib.ExitStack()


def build(job: Job) -> System:
    """See the file's head for the options."""
    size, dtype = recipe.WORKLOADS[job.workload], getattr(torch, job.dtype)
    weights, data = recipe.draw(size, job.seed)
    UNTIL_THE_END.enter_context(matmul_backend(torch.device(job.device)))
    keep_freed_memory()
    compile_pointwise("compiled" in job.options)
    target = make_target(size, weights, data, dtype)
    drafter = make_drafter(size, weights, target, data.draft_ids_D)
    if dtype == torch.float64:
        drafter = drafter.double()
    T = size.tokens
    _, kernel = unroll_kernel("auto", torch.device(job.device))
    loss = ForwardKL() if "kl" in job.options else SoftCrossEntropy()
    steps = next(
        (int(option[6:]) for option in job.options if option.startswith("steps=")), size.unroll
    )
    plan = ObjectiveConfig(loss, steps, in_vocab="every" not in job.options, kernel=kernel)
    if job.device == "cuda":
        plan = replace(plan, piece_bytes=CUDA_PIECE)
    batch = Batch(
        data.ids[None, :T],
        recipe.answers(size, job.mask)[None],
        torch.zeros(1, T, dtype=torch.long),
    )
    teacher = target_outputs(target, drafter, batch, plan, False)
    trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    optimizer = AdamW(trained)
    sums = _listen()

    def backward() -> Tensor:
        with torch.autocast(job.device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = TrainStep(drafter, plan)(batch, teacher, measure=False)
        out.loss.backward()
        return out.loss

    def step() -> None:
        backward()
        nn.utils.clip_grad_norm_([p for _, p in trained], CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def losses() -> list[float]:
        count_K, loss_KN = sums[-1]
        return (loss_KN[:, 0] / count_K).tolist()

    def gradients() -> dict[str, Tensor]:
        layer, keys = drafter.layers.layers[0], size.kv_heads * size.head_dim
        of = {p: p.grad for _, p in trained if p.grad is not None}
        both = [
            of[part.weight] for part in (drafter.entry.token_qkv_proj, layer.attention.qkv_proj)
        ]
        q, k, v = torch.cat(both, dim=1).split([size.hidden, keys, keys])
        gate, up = of[layer.mlp.gate_up_proj.weight].chunk(2)
        return {
            "fc": of[drafter.fusion.fc.weight], "lm_head": of[drafter.lm_head.weight],
            "norm": of[drafter.norms.output.weight], "input_layernorm": of[drafter.norms.embed.weight],
            "hidden_norm": of[drafter.norms.hidden.weight],
            "post_attention_layernorm": of[layer.post_attention_norm.weight],
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": of[layer.attention.o_proj.weight], "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": of[layer.mlp.down_proj.weight],
        }  # fmt: skip

    return System(
        step,
        backward,
        gradients,
        losses,
        sum(p.numel() for _, p in trained),
        ("specdec-lightning", "transformers"),
    )


def _listen() -> list:
    """The last sums of ``head_loss``, which the objective drops unless it counts for the metrics."""
    inner, heard = step_module.head_loss, []

    def head_loss(*given):
        loss, *sums = inner(*given)
        heard[:] = [sums]
        return loss, *sums

    step_module.head_loss = head_loss
    return heard
