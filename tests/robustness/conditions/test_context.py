"""Behind a long context."""

import pytest

from specdec.robustness.conditions.context import SEAM, Context
from specdec.robustness.run import plan, plan_clean
from tests.robustness.made import CHAT, DOCUMENTS, OWN, RAW, Pair, asked, clean, setting


def test_so_many_tokens_stand_before_what_the_user_says(chat: Pair) -> None:
    found = setting(chat.target, [CHAT, OWN])
    filler = DOCUMENTS[0][:100]  # of bytes, a token is a letter
    assert asked(Context(100), CHAT, found) == f"<s>[user]{filler}\n\nwhat is two plus two?[assistant]"
    assert asked(Context(100), OWN, found) == f"<s>[system]S[user]{filler}\n\nfine[assistant]"
    assert plan(Context(100), found).longest == len(found.asked["chat"]) + 100 + 2


def test_a_document_that_holds_the_prompt_is_not_its_filler(base: Pair) -> None:
    spoilt = ("", "xx the grass is xx" * 40, "import re\n" * 90)
    found = setting(base.target, [RAW], documents=lambda: spoilt)
    assert asked(Context(50), RAW, found) == "<s>" + "\n\n" + ("import re\n" * 90)[:48] + "\n\nthe grass is"
    assert "grass" not in asked(Context(50), RAW, found).removesuffix("the grass is")


def test_what_does_not_fit_is_cut_or_refused(base: Pair) -> None:
    found = setting(base.target, [RAW], new=100)
    room = 512 - len(found.asked["raw"]) - 100 - SEAM
    assert Context(400).taken(found) == room < 400 and Context(300).taken(found) == 300
    made = plan(Context(400), found)
    assert made.skipped is None and made.note == f"{room} tokens, which is what fits"
    assert made.longest == len(found.asked["raw"]) + room + 2
    assert plan(Context(300), found).note == ""
    assert plan(Context(513), found).skipped == "the target has 512 positions"
    tight = setting(base.target, [RAW], new=300)
    assert "prompts and answers leave" in str(plan(Context(512), tight).skipped)
    assert len(clean(RAW, found)) == len("<s>the grass is")


def test_too_short_a_filler_is_told(base: Pair) -> None:
    found = setting(base.target, [RAW], documents=lambda: ["short"])
    assert "the filler has 5 tokens" in str(plan(Context(60), found).skipped)

    def nothing() -> list[str]:
        raise ValueError("no sources here")

    absent = setting(base.target, [RAW], documents=nothing)
    assert plan_clean(absent).prompts == [RAW]
    assert plan(Context(60), absent).skipped == "no sources here"
    with pytest.raises(ValueError, match="at least 1"):
        Context(0)
