"""Without the start token."""

from specdec.robustness.conditions.no_bos import NoBos
from specdec.robustness.run import plan
from tests.robustness.made import CHAT, RAW, Pair, asked, clean, pair, setting


def test_the_start_token_goes_and_nothing_else(chat: Pair) -> None:
    found = setting(chat.target, [CHAT, RAW])
    for prompt in (CHAT, RAW):
        assert clean(prompt, found) == "<s>" + asked(NoBos(), prompt, found)
    assert clean(RAW, found) == "<s>the grass is"


def test_later_turns_lose_it_too(chat: Pair) -> None:
    found = setting(chat.target, [CHAT])
    conversation = NoBos().conversation(CHAT, found)
    conversation.next_ids()
    conversation.add_answer(found.tokenizer.encode("four", add_special_tokens=False))
    said = found.tokenizer.decode(conversation.next_ids())
    assert said == "[user]what is two plus two?[assistant]four</s>[user]and three?[assistant]"


def test_where_there_is_none_it_is_not_measured() -> None:
    target = pair(template="{% for m in messages %}{{ m['content'] }}{% endfor %}").target
    made = plan(NoBos(), setting(target, [CHAT]))
    assert made.skipped == "no prompt begins with a BOS token" and not made.prompts
