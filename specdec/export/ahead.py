"""What engines will not serve of a drafter, told from its config before it is trained."""

from typing import Any

from specdec.drafter import GQA, DrafterConfig, Narrow, TargetLayer
from specdec.export.engine_targets import target_facts
from specdec.export.subject import Subject
from specdec.export.switches import ENGINES, lint

# head widths that vLLM 0.32 declares for a CPU (vllm/v1/attention/backends/cpu_attn.py) and does not check; on a GPU
# FlashAttention takes multiples of 8 to 256, Triton any from 32 on, FlexAttention every one (their supports_head_size)
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def planned_subject(
    config: DrafterConfig, hf_config: Any, train_embed: bool, train_head: bool
) -> Subject:
    """What engines will be given of a drafter once it is trained.

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
    """By engine, the switches that it does not honour, each with the reason; engines that honour all are left out.

    A target's own module (MTP) is refused by none: ``export --format mtp`` puts it into the target.
    """
    if type(subject.config.attention) is TargetLayer:
        return {}
    reasons = {
        engine: "; ".join(f"{switch.name}: {reason}" for switch, reason in lint(subject, engine))
        for engine in ENGINES
    }
    return {engine: text for engine, text in reasons.items() if text}


def served(reasons: dict[str, str]) -> bool:
    """Whether there is an engine that :func:`unserved` gives no reasons of."""
    return len(reasons) < len(ENGINES)


def missing_kernels(config: DrafterConfig) -> str:
    """What to know of the width of the drafter's heads before it is served; nothing where every device has kernels."""
    width = config.head_dim
    if type(config.attention) is not GQA or width in CPU_HEADS:
        return ""
    widths = ", ".join(map(str, CPU_HEADS))
    return (
        f"head_dim {width}: vLLM's CPU build declares kernels for {widths}; with others the server may end (16 and 24) "
        "or not (48): check yours with specdec parity --engine vllm"
    )
