"""What engines will make of a drafter, said before it is trained."""

from typing import Any

from specdec.drafter import GQA, DrafterConfig, Narrow, TargetLayer
from specdec.export.engine_targets import target_facts
from specdec.export.subject import Subject
from specdec.export.switches import ENGINES, lint

# Head widths that vLLM 0.32 declares for a CPU (vllm/v1/attention/backends/cpu_attn.py) and does not check; on a GPU
# FlashAttention takes multiples of 8 to 256, Triton any from 32 on, FlexAttention every one (their supports_head_size)
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def planned_subject(
    config: DrafterConfig, hf_config: Any, train_embed: bool, train_head: bool
) -> Subject:
    """Return the subject that engines will be given once a drafter is trained.

    Args:
        hf_config: the target's transformers config of its text model.
        train_embed: whether the token embedding will be trained.
        train_head: whether a head of the drafter's own will be.
    """
    narrower = config.hidden_size != config.target_hidden_size
    fewer = config.draft_vocab_size < config.vocab_size
    return Subject(
        config,
        own_embedding=train_embed or narrower,
        own_head=config.head == "own" and (train_head or fewer or narrower),
        entry_bias=type(config.entry) is Narrow and config.entry.bias,
        **target_facts(hf_config, (getattr(hf_config, "architectures", None) or [""])[0]),
    )


def unserved(subject: Subject) -> dict[str, str]:
    """Return, by engine, the switches that it does not honor, with the reasons; engines that honor all are left out.

    A target's own module (MTP) is refused by none: ``export --format mtp`` puts it into the target.
    """
    if type(subject.config.attention) is TargetLayer:
        return {}
    reasons = {}
    for engine in ENGINES:
        lacks = [f"{switch.name}: {reason}" for switch, reason in lint(subject, engine)]
        if lacks:
            reasons[engine] = "; ".join(lacks)
    return reasons


def served(reasons: dict[str, str]) -> bool:
    """Return whether :func:`unserved` gives no reasons for at least one engine."""
    return len(reasons) < len(ENGINES)


def missing_kernels(config: DrafterConfig) -> str:
    """Return a warning about the width of the drafter's heads; empty if every device has kernels for it."""
    width = config.head_dim
    if type(config.attention) is not GQA or width in CPU_HEADS:
        return ""
    widths = ", ".join(map(str, CPU_HEADS))
    return (
        f"head_dim {width}: vLLM's CPU build declares kernels for {widths}; with others the server may end (16 and 24) "
        "or not (48): check yours with specdec parity --engine vllm"
    )
