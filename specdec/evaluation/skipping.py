"""Prompts that cannot be decoded: left out by name, and the rest go on."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from specdec.decoding import check_length
from specdec.evaluation.conversation import BLANK, Conversation
from specdec.evaluation.prompts import Prompt
from specdec.target import Target

log = logging.getLogger(__name__)


class Skipped(NamedTuple):
    """A prompt that was left out, with all its turns."""

    prompt_id: str
    reason: str


def next_ids(
    conversation: Conversation, target: Target, max_new_tokens: int, nodes: int = 1
) -> list[int] | Skipped | None:
    """The next turn's ids, None after the last, or why it cannot be decoded; ``nodes`` as of :func:`check_length`."""
    prompt_id = conversation.prompt.prompt_id
    try:
        ids = conversation.next_ids()
        if ids is not None:
            check_length(target, ids, max_new_tokens, nodes)
    except ValueError as error:
        return Skipped(prompt_id, str(error).removeprefix(f"prompt {prompt_id}: "))
    return ids


def check_skipped(skipped: Sequence[Skipped], prompts: int) -> None:
    """Warn of prompts that were left out; raise ValueError if all were."""
    if not skipped:
        return
    name, reason = skipped[0]
    if len(skipped) == prompts:
        raise ValueError(f"prompt {name}: {reason}" + (f"; none of {prompts} can be decoded" if prompts > 1 else ""))
    names = ", ".join(one.prompt_id for one in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    log.warning("%d of %d prompts were left out (%s); %s: %s", len(skipped), prompts, names, name, reason)


def without_blank(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those that can be asked of whoever renders them itself.

    Raises:
        ValueError: none is left.
    """
    check_skipped([Skipped(prompt.prompt_id, BLANK) for prompt in prompts if prompt.text == ""], len(prompts))
    return [prompt for prompt in prompts if prompt.text != ""]


def first_turns(
    target: Target, prompts: Sequence[Prompt], max_new_tokens: int, nodes: int = 1
) -> tuple[list[list[int]], list[Skipped]]:
    """What the target is asked first by every prompt, and the prompts left out.

    Raises:
        ValueError: none is left; or the target has no chat template and a prompt needs one.
    """
    asked = [next_ids(Conversation(prompt, target.tokenizer), target, max_new_tokens, nodes) for prompt in prompts]
    skipped = [one for one in asked if isinstance(one, Skipped)]
    check_skipped(skipped, len(prompts))
    return [one for one in asked if isinstance(one, list)], skipped
