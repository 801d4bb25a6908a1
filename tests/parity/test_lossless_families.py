"""Token for token the target's own greedy text, in float64, over further families, shapes, batches and ends."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdec.decoding import (
    Chain,
    DraftShape,
    DynamicTree,
    Generation,
    PlainDecoder,
    Request,
    SpeculativeDecoder,
    StaticTree,
)
from specdec.drafter import Drafter
from specdec.target import Target
from tests.parity.reference import generated
from tests.perfect import MIXED, WINDOW, disturb, make_markov, perfect_drafter, successors
from tests.tiny import llama_config, presets

NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
MORE = ("num_key_value_heads", "bos_token_id", "eos_token_id")
LIMIT = 128
SIZES: dict[str, Any] = {name: getattr(llama_config(), name) for name in (*NAMES, *MORE)} | {
    "max_position_embeddings": LIMIT,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": MIXED}
# others lack float64
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES: dict[str, Callable[[int], PreTrainedModel]] = {
    "qwen3": lambda d: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=d)),
    "gemma3": lambda d: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **SLIDING, head_dim=d)),
    "mixtral": lambda d: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, head_dim=d)),
}
# how far the context leads astray: often, not always
CONTEXT = {"qwen3": 0.45, "gemma3": 2.5, "mixtral": 0.25}
PRESETS = {"qwen3": "eagle3_1", "gemma3": "eagle1", "mixtral": "eagle3"}
SHAPES: dict[str, DraftShape] = {
    "chain": Chain(4),
    "static": StaticTree(),
    "dynamic": DynamicTree(depth=4, top_k=3, nodes=12),
}
LENGTHS = (1, 2, WINDOW, 30, LIMIT - 4)  # the last leaves four places
NEW = 24


@cache
def pair(family: str) -> tuple[Target, Drafter]:
    """A target that looks at its context, and a drafter that is right often and wrong often."""
    torch.manual_seed(0)
    target = Target(make_markov(FAMILIES[family](12), CONTEXT[family]))
    if family == "gemma3":  # its norms undo what markov_target does to the matrices before them
        for name, weight in target.model.named_parameters():
            if "post_" in name:
                weight.fill_(CONTEXT[family] - 1)  # it multiplies by one more
    return target, disturb(perfect_drafter(target, presets()[PRESETS[family]]), 0.4)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 61, (length,), generator=generator).tolist() for length in LENGTHS]
    return [Request(prompt, min(NEW, LIMIT - len(prompt))) for prompt in prompts]


@cache
def texts(family: str, end: tuple[int, ...] = ()) -> list[list[int]]:
    """What plain decoding says to each prompt, alone; transformers' own loop and cache say the same."""
    target, found = pair(family)[0], []
    for prompt, most, _ in requests():
        found.append(PlainDecoder(target).generate(prompt, most, end).ids)
        assert generated(target, prompt, most, end) == found[-1]
    return found


def decoded(
    family: str, shape: DraftShape, batch: int, end: tuple[int, ...] = ()
) -> list[Generation]:
    made = dict(SpeculativeDecoder(*pair(family), shape, batch=batch).generate_all(requests(), end))
    return [made[number] for number in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("family", "shape"), list(zip(FAMILIES, SHAPES.values(), strict=True)), ids=[*FAMILIES]
)
def test_every_token_is_the_targets(family: str, shape: DraftShape) -> None:
    """One by one and four at a time, from one token to the last place of the context, and up to an end in a run."""
    for batch in (1, 4):
        whole = decoded(family, shape, batch)
        assert [one.ids for one in whole] == texts(family)
    counts = Counter(count for one in whole for count in one.accepted)
    # it both refused and accepted
    assert counts[0] > 2 and sum(counts.values()) - counts[0] > 2, counts
    assert max(counts) > 1

    inside: Counter[int] = Counter()
    for one in whole:
        at = 1
        for count in one.accepted:
            run = one.ids[at : at + count - 1]  # drafts with another accepted one behind them
            inside.update(
                token for place, token in enumerate(run, at) if token not in one.ids[:place]
            )
            at += count + 1
    end = (inside.most_common(1)[0][0],)
    ended = decoded(family, shape, 4, end)
    assert [one.ids for one in ended] == texts(family, end)
    cut = [
        one.ids[-1] in end and one.accepted[-1] < full.accepted[len(one.accepted) - 1]
        for one, full in zip(ended, whole, strict=True)
        if one.accepted
    ]
    assert any(cut)


def test_these_targets_look_at_their_context() -> None:
    """A target that only reads the last token would hide a wrong mask, position or cache."""
    following = successors().tolist()
    for family in FAMILIES:
        ids = [token for text in texts(family) for token in text]
        astray = sum(
            following[a] != b for text in texts(family) for a, b in itertools.pairwise(text)
        )
        assert 0.05 < astray / len(ids) < 0.9, (family, astray / len(ids))
