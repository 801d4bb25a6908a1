"""Prompts from training's own validation data: how its documents begin.

Legend: T tokens of a row.
"""

from specdec.data import Batch

SHORTEST = 8  # tokens of a prompt that is cut from a text


def beginnings(
    rows: Batch,
    count: int,
    prompt_tokens: int,
    room: int,
    who: str = "acceptance",
    without: str = "acceptance.every_n_validations=0",
) -> list[list[int]]:
    """The first ``count`` prompts that packed documents make, in their order.

    A document that is supervised from its first token on is text: its first ``prompt_tokens`` tokens, at most half of
    it, are the prompt. Any other is a conversation: all that stands before the first supervised token.

    Args:
        room: no prompt is longer; a text's is cut, a conversation is left out.
        who: whose arguments the message names.
        without: how to go on without prompts.

    Raises:
        ValueError: no document makes a prompt.
    """
    out: list[list[int]] = []
    for ids_T, mask_T, documents_T in zip(*rows, strict=True):
        for number in range(int(documents_T.max()) + 1):
            inside_T = documents_T == number
            ids, mask = ids_T[inside_T].tolist(), mask_T[inside_T].tolist()
            if True not in mask:
                continue
            length = mask.index(True)
            if length == 0:
                length = min(prompt_tokens, len(ids) // 2, room)
                if length < SHORTEST:
                    continue
            if length <= room:
                out.append(ids[:length])
            if len(out) == count:
                return out
    if not out:
        raise ValueError(
            f"no validation document can be made a prompt: texts of at least {2 * SHORTEST} tokens are needed, or "
            f"conversations whose first answer begins within {room} tokens, which is what the target's positions leave "
            f"beside {who}.max_new_tokens; or give {who}.prompts a file, or {without}"
        )
    return out
