"""Without a system prompt."""

from specdec.robustness.conditions.no_system import NoSystem
from specdec.robustness.run import plan
from tests.robustness.made import CHAT, OWN, Pair, asked, setting


def test_what_the_prompts_and_the_user_bring_goes(chat: Pair) -> None:
    assert asked(NoSystem(), OWN, setting(chat.target, [OWN])) == "<s>[user]fine[assistant]"
    given = setting(chat.target, [CHAT], system="Be brief.")
    assert asked(NoSystem(), CHAT, given) == "<s>[user]what is two plus two?[assistant]"


def test_without_one_it_is_not_measured(chat: Pair) -> None:
    assert plan(NoSystem(), setting(chat.target, [CHAT])).skipped == "no prompt has a system prompt"
