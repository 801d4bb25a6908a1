"""Without the chat template."""

from specdec.robustness.conditions.no_template import NoTemplate
from specdec.robustness.run import plan
from tests.robustness.made import CHAT, OWN, RAW, Pair, asked, setting


def test_the_contents_stay_behind_the_start_token(chat: Pair) -> None:
    found = setting(chat.target, [CHAT, OWN], thinking=False)
    assert asked(NoTemplate(), CHAT, found) == "<s>what is two plus two?"
    assert asked(NoTemplate(), OWN, found) == "<s>S\n\nfine"


def test_turns_go_on_without_it(chat: Pair) -> None:
    found = setting(chat.target, [CHAT])
    conversation = NoTemplate().conversation(CHAT, found)
    conversation.next_ids()
    conversation.add_answer(found.tokenizer.encode("four", add_special_tokens=False))
    assert found.tokenizer.decode(conversation.next_ids()) == "<s>what is two plus two?\n\nfour\n\nand three?"


def test_raw_text_has_none(chat: Pair) -> None:
    found = setting(chat.target, [RAW])
    assert plan(NoTemplate(), found).skipped == "no prompt is written by a chat template"
    both = plan(NoTemplate(), setting(chat.target, [RAW, CHAT]))
    assert [prompt.prompt_id for prompt in both.prompts] == ["chat"] and list(both.left_out) == ["raw"]
