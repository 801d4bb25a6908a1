"""A tiny chat target with a drafter, and clean runs of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specdec.diagnostics.conditions import CleanRun, Condition
from specdec.drafter import Concat, Drafter, DrafterConfig, DrafterSpec, Narrow, Norms, PreNorm
from specdec.evaluation.prompts import Prompt
from specdec.target import Target
from tests.evaluation.test_conversation import THINKS, made
from tests.tiny import HIDDEN, LAYERS, presets, tiny_target

RAW = Prompt("raw", None, None, None, "the grass is")
CHAT = Prompt("chat", None, ["what is two plus two?", "and three?"], None, None)
OWN = Prompt(
    "own",
    None,
    None,
    [{"role": "system", "content": "S"}, {"role": "user", "content": "fine"}],
    None,
)
DOCUMENTS = [
    "for i in range(3):\n    print(i)\n" * 40,
    "the grass is green, said " * 20,
    "import re\n" * 90,
]


class ChatPair(NamedTuple):
    """In float64."""

    target: Target
    drafter: Drafter


def pair(
    spec: DrafterSpec | None = None, template: str | None = THINKS, **overrides: Any
) -> ChatPair:
    """A random target of bytes, and a random drafter that is of its opinion about often enough."""
    tokenizer = made(template)
    target = Target(tiny_target(vocab_size=len(tokenizer), **overrides).model, tokenizer)
    config = DrafterConfig.for_target(
        spec or presets()["eagle3_1"],
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=LAYERS,
        identity={"source": "tiny"},
    )
    torch.manual_seed(0)
    drafter = Drafter(config, torch.arange(config.draft_vocab_size)).double().requires_grad_(False)
    return ChatPair(target, drafter)


def copycat() -> ChatPair:
    """A target whose next token hangs on the last one alone, and a drafter that reads the same of its embedding.

    Both leave their features out, so that every draft is right.
    """
    spec = DrafterSpec(
        Concat(),
        Narrow(bias=False),
        Norms(embed=False, hidden=False),
        PreNorm(),
        draft_vocab_size="all",
    )
    found = pair(spec, eos_token_id=None)
    found.target.tokenizer.eos_token = None
    with torch.no_grad():
        for name, weight in [
            *found.target.model.named_parameters(),
            *found.drafter.named_parameters(),
        ]:
            if any(part in name for part in ("o_proj", "down_proj", "feature_fc")):
                weight.zero_()
        found.drafter.entry.token_fc.weight.copy_(torch.eye(HIDDEN))
        found.drafter.embed_tokens.weight.copy_(found.target.embedding_weight())
        found.drafter.lm_head.weight.copy_(found.target.head_weight())
    return found


def clean_run(
    target: Target, prompts: Sequence[Prompt], new: int = 8, documents: Any = DOCUMENTS
) -> CleanRun:
    """Of answers of so many tokens."""
    found = CleanRun(target, prompts, new, 4)
    found.documents = documents
    return found


def asked(condition: Condition, prompt: Prompt, clean: CleanRun) -> str:
    """What a condition asks first, special tokens included."""
    ids = clean.first_ids(condition.conversation(prompt, clean))
    assert isinstance(ids, list), ids
    return str(clean.target.tokenizer.decode(ids, skip_special_tokens=False))


def usual(prompt: Prompt, clean: CleanRun) -> str:
    """What is asked first in the clean run."""
    return str(
        clean.target.tokenizer.decode(clean.asked[prompt.prompt_id], skip_special_tokens=False)
    )
