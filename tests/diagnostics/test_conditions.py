"""What every condition does to what is asked, and noise to what drafts."""

from typing import Any

import pytest
import torch

from specdec.decoding import Chain, PlainDecoder, Proposer, Sampling, SpeculativeDecoder
from specdec.decoding.sampling import ACCEPTANCE, DRAFT, TOKEN
from specdec.diagnostics.conditions import (
    CONDITIONS,
    EMBEDDING,
    HIDDEN,
    LANGUAGES,
    SYSTEM_PROMPTS,
    Condition,
    NoisyDrafter,
    blurred,
    gaussian,
    parse_conditions,
    with_first_words,
)
from specdec.diagnostics.robustness import CLEAN, SAME, planned_run
from specdec.evaluation.prompts import Prompt
from specdec.nn.view import View
from tests.diagnostics.chat_target import (
    CHAT,
    DOCUMENTS,
    OWN,
    RAW,
    ChatPair,
    asked,
    clean_run,
    pair,
    usual,
)
from tests.evaluation.test_conversation import TEMPLATE
from tests.tiny import HIDDEN as WIDTH
from tests.tiny import presets, tiny_drafter, tiny_target, variants

QUESTION = "what is two plus two?"
IDS = torch.tensor([[3, 5, 3, 9], [5, 5, 7, 9]])
PLACES = torch.arange(4).repeat(2, 1)


@pytest.fixture(scope="module")
def chat() -> ChatPair:
    """Its tokenizer begins texts and conversations with ``<s>``."""
    return pair(max_position_embeddings=4096)


@pytest.fixture(scope="module")
def base() -> ChatPair:
    """Without a chat template."""
    return pair(template=None)


def one(text: str) -> Condition:
    (found,) = parse_conditions([text])
    return found


FILLER = DOCUMENTS[0][:100]  # of bytes, a token is a letter


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("no_bos", CHAT, f"[user]{QUESTION}[assistant]"),
        ("no_bos", RAW, "the grass is"),
        ("no_template", CHAT, f"<s>{QUESTION}"),
        ("no_template", OWN, "<s>S\n\nfine"),
        ("template:family=chatml", OWN, "<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nfine<|im_end|>\n<|im_start|>assistant\n"),  # noqa: E501
        ("template:family=llama3", OWN, "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nfine<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),  # noqa: E501
        ("template:family=gemma", OWN, "<s><start_of_turn>user\nS\n\nfine<end_of_turn>\n<start_of_turn>model\n"),
        ("template:family=alpaca", OWN, "<s>S\n\n### Instruction:\nfine\n\n### Response:\n"),
        ("no_system", OWN, "<s>[user]fine[assistant]"),
        ("system:text=long", CHAT, f"<s>[system]{SYSTEM_PROMPTS['long']}[user]{QUESTION}[assistant]"),
        ("system:text=short", OWN, f"<s>[system]{SYSTEM_PROMPTS['short']}[user]fine[assistant]"),
        ("system:text=short", RAW, f"<s>{SYSTEM_PROMPTS['short']}\n\nthe grass is"),
        ("language:code=de", CHAT, f"<s>[user]{LANGUAGES['de']}\n\n{QUESTION}[assistant]"),
        ("language:code=zh", OWN, f"<s>[system]S[user]{LANGUAGES['zh']}\n\nfine[assistant]"),
        ("language:code=ar", RAW, f"<s>{LANGUAGES['ar']}\n\nthe grass is"),
        ("context:tokens=100", CHAT, f"<s>[user]{FILLER}\n\n{QUESTION}[assistant]"),
        ("context:tokens=100", OWN, f"<s>[system]S[user]{FILLER}\n\nfine[assistant]"),
        ("temperature:value=0.6", CHAT, f"<s>[user]{QUESTION}[assistant]"),
        ("noise_hidden:alpha=0.5", RAW, "<s>the grass is"),
    ],
)  # fmt: skip
def test_first_turns_under_each_condition(
    chat: ChatPair, text: str, prompt: Prompt, expected: str
) -> None:
    assert asked(one(text), prompt, clean_run(chat.target, [CHAT, OWN, RAW])) == expected


def test_later_turns_under_each_condition(chat: ChatPair) -> None:
    for text, expected in (
        ("no_bos", f"[user]{QUESTION}[assistant]four</s>[user]and three?[assistant]"),
        ("no_template", f"<s>{QUESTION}\n\nfour\n\nand three?"),
    ):
        clean = clean_run(chat.target, [CHAT])
        conversation = one(text).conversation(CHAT, clean)
        conversation.next_ids()
        conversation.add_answer(clean.target.tokenizer.encode("four", add_special_tokens=False))
        assert clean.target.tokenizer.decode(conversation.next_ids()) == expected


@pytest.mark.parametrize(
    ("text", "template", "prompt", "reason"),
    [
        ("no_bos", "{% for m in messages %}{{ m['content'] }}{% endfor %}", CHAT, SAME),
        ("no_system", TEMPLATE, CHAT, SAME),
        ("no_template", None, RAW, SAME),
        ("template:family=gemma", None, RAW, SAME),
        ("system:text=short", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none here') }}{% endif %}x", CHAT, "none here"),  # noqa: E501
        ("system:text=long", TEMPLATE, CHAT, "exceed the target's 512 positions"),
        ("context:tokens=300", None, RAW, "the filler has 5 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_says_why(
    text: str, template: Any, prompt: Prompt, reason: str
) -> None:
    clean = clean_run(pair(template=template).target, [prompt], documents=["short"])
    made = planned_run(one(text), clean)
    assert reason in str(made.skipped) and not made.prompts


def test_raw_prompts_and_too_long_ones_are_left_out(chat: ChatPair, base: ChatPair) -> None:
    both = planned_run(one("no_template"), clean_run(chat.target, [RAW, CHAT]))
    assert [prompt.prompt_id for prompt in both.prompts] == ["chat"] and both.left_out == {
        "raw": SAME
    }
    assert "exceed the target's 512 positions" in str(
        planned_run(Condition("context", 500), clean_run(base.target, [RAW])).skipped
    )
    spoilt = clean_run(
        base.target, [RAW], documents=["", "xx the grass is xx" * 40, "import re\n" * 90]
    )
    assert (
        asked(Condition("context", 50), RAW, spoilt)
        == "<s>" + "\n\n" + ("import re\n" * 90)[:48] + "\n\nthe grass is"
    )


def test_the_clean_run(chat: ChatPair) -> None:
    clean = clean_run(chat.target, [CHAT])
    assert usual(CHAT, clean) == f"<s>[user]{QUESTION}[assistant]" == asked(CLEAN, CHAT, clean)
    letters = clean_run(chat.target, [CHAT], documents=["äöü" * 20, "other"])
    assert letters.filler(5, without="x") == "äö"  # the third letter's first byte is left out
    assert letters.filler(4, without="ä") == "othe"
    huge = Prompt("huge", None, None, None, "x" * 5000)
    made = planned_run(CLEAN, clean_run(chat.target, [huge, RAW]))
    assert made.prompts == [RAW] and "positions" in made.left_out["huge"]
    with pytest.raises(ValueError, match=r"prompt huge: .*positions; none of 1 can be decoded"):
        planned_run(CLEAN, clean_run(chat.target, [huge]))


def test_the_first_words_are_found_and_replaced() -> None:
    for prompt, words in ((RAW, "the grass is"), (CHAT, QUESTION), (OWN, "fine")):
        other = with_first_words(prompt, lambda found: f"else, {found}")
        assert (
            other != prompt
            and with_first_words(other, lambda found: found.removeprefix("else, ")) == prompt
        )
        with_first_words(
            other, lambda found, words=words: str(found == f"else, {words}" or pytest.fail(found))
        )


def test_names_lead_back_to_the_conditions() -> None:
    every = parse_conditions([])
    assert (
        parse_conditions([one.name for one in every]) == every == parse_conditions(list(CONDITIONS))
    )
    assert len(every) == len({one.name for one in every})
    texts = ["no_bos", "noise_hidden:alpha=.5", "context:tokens=64", "no_bos"]
    names = ["no_bos", "noise_hidden:alpha=0.5", "context:tokens=64"]
    assert [one.name for one in parse_conditions(texts)] == names
    close = ["noise_hidden:alpha=0.1234567", "noise_hidden:alpha=0.1234568"]
    assert [one.name for one in parse_conditions(close)] == close
    assert one("temperature:value=0.6").sampling(Sampling(seed=3)) == Sampling(
        temperature=0.6, seed=3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clean", "expected one of no_bos, no_template"),
        ("no_bos:x=1", "expected no parameter"),
        ("context:tokens=1.5", "tokens=NUMBER"),
        ("context:", "tokens=NUMBER"),
        ("context:tokens=1,tokens=2", "tokens=NUMBER"),
        ("context:tokens=0", "at least 1"),
        ("temperature:value=0", "at least 0.01"),
        ("system:text=loud", r"text=short\|stranger\|long"),
        ("noise_hidden:alpha=nan", "at least 0"),
        ("noise_hidden:beta=1", "alpha=NUMBER"),
    ],
)
def test_unknown_conditions_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conditions([text])


def test_the_noise_is_standard_normal() -> None:
    z = gaussian(
        0, torch.arange(40)[:, None].expand(40, 50), torch.arange(50).repeat(40, 1), HIDDEN, 100
    )
    flat = z.flatten()
    assert abs(flat.mean()) < 0.01 and abs(flat.std() - 1) < 0.01
    assert abs((flat**3).mean()) < 0.03 and abs((flat**4).mean() - 3) < 0.06
    assert abs((z[..., :-1] * z[..., 1:]).mean()) < 0.01  # channels
    # places, tokens
    assert abs((z[:, :-1] * z[:, 1:]).mean()) < 0.01 and abs((z[:-1] * z[1:]).mean()) < 0.01


def test_noise_depends_on_seed_stream_token_and_place_alone() -> None:
    z = gaussian(1, IDS, PLACES, HIDDEN, 8)
    # the order of the batch
    assert torch.equal(gaussian(1, IDS.flip(0), PLACES, HIDDEN, 8), z.flip(0))
    assert torch.equal(gaussian(1, IDS[:1, 2:], PLACES[:1, 2:], HIDDEN, 8), z[:1, 2:])  # the pass
    assert torch.equal(z[0, 1], z[1, 1]) and not torch.equal(z[0, 0], z[0, 2])
    assert not torch.equal(z, gaussian(2, IDS, PLACES, HIDDEN, 8))
    assert not torch.equal(z, gaussian(1, IDS, PLACES, EMBEDDING, 8))


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_noise_is_that_much_on_the_input_and_nothing_else(name: str) -> None:
    drafter = tiny_drafter(presets()[name])
    h, view = torch.randn(2, 4, WIDTH, dtype=torch.float64), View.packed(torch.zeros_like(IDS))
    clean = drafter.step(IDS, h, view)
    for stream in (HIDDEN, EMBEDDING):
        assert torch.equal(
            NoisyDrafter(drafter, 0.0, 0, stream).step(IDS, h, view).h_BTH, clean.h_BTH
        )
    hidden = drafter.step(
        IDS, blurred(h, 0.5, gaussian(3, IDS, view.positions_BT, HIDDEN, WIDTH)), view
    )
    assert torch.equal(NoisyDrafter(drafter, 0.5, 3, HIDDEN).step(IDS, h, view).h_BTH, hidden.h_BTH)
    e = blurred(
        drafter.embed_tokens(IDS), 0.5, gaussian(3, IDS, view.positions_BT, EMBEDDING, WIDTH)
    )
    embedding = drafter.advance(drafter.entry.read(drafter.norms.embed(e)), h, view)
    assert torch.equal(
        NoisyDrafter(drafter, 0.5, 3, EMBEDDING).step(IDS, h, view).h_BTH, embedding.h_BTH
    )
    assert not torch.allclose(hidden.h_BTH, clean.h_BTH) and not torch.allclose(
        embedding.h_BTH, clean.h_BTH
    )
    assert torch.equal(drafter.step(IDS, h, view).h_BTH, clean.h_BTH)  # which stays as it was


def test_drafts_change_and_the_output_does_not() -> None:
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3_1"])
    noisy = one("noise_hidden:alpha=1").drafter(drafter, 7)
    assert isinstance(noisy, NoisyDrafter) and (noisy.alpha, noisy.seed, noisy.stream) == (
        1.0,
        7,
        HIDDEN,
    )
    made = [
        SpeculativeDecoder(target, each, Chain(3)).generate(list(range(3, 12)), 24)
        for each in (drafter, noisy)
    ]
    assert made[0].ids == made[1].ids


@pytest.mark.parametrize("stream", [HIDDEN, EMBEDDING])
def test_noise_reaches_a_block_drafter_too(stream: int) -> None:
    """Whose features and tokens are at nodes of their own: the same noise in any batch, and texts as without it."""
    target, drafter = tiny_target(), tiny_drafter(variants()["dflash"])
    noisy, prompts = NoisyDrafter(drafter, 0.5, 0, stream), [[3, 4, 5], [7, 8]]
    alone = [SpeculativeDecoder(target, noisy, Chain(3)).generate(prompt, 6) for prompt in prompts]
    assert [one.ids for one in alone] == [
        PlainDecoder(target).generate(prompt, 6).ids for prompt in prompts
    ]
    ids_11, aux = torch.tensor([[3]]), torch.ones(1, 1, 3, WIDTH, dtype=torch.float64)
    said = []
    for one in (drafter, noisy):
        proposer = Proposer(one, Chain(3), 8)
        count_1 = torch.ones(1, dtype=torch.int64)
        said.append(proposer.extend(torch.zeros_like(count_1), ids_11, aux, count_1).logits_BKD)
    assert (said[0] - said[1]).abs().amax(-1).min() > 1e-3


def test_noise_is_no_noise_of_decoding() -> None:
    """Whose drafts have a stream for each level, however deep."""
    assert max(TOKEN, ACCEPTANCE) < min(HIDDEN, EMBEDDING) <= max(HIDDEN, EMBEDDING) < DRAFT
