"""Prompts for what decodes while a drafter is trained: from files, or from the validation data."""

from collections.abc import Sequence

import lightning.pytorch as pl

from specdec.data import TokenData
from specdec.evaluation.beginnings import beginnings
from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.skipping import Skipped, next_ids
from specdec.training.module import DrafterModule


def fixed_prompts(
    trainer: pl.Trainer,
    module: DrafterModule,
    prompts: Sequence[Prompt] | None,
    *,
    count: int,
    prompt_tokens: int,
    max_new_tokens: int,
    who: str,
    without: str,
) -> list[tuple[str, list[int]]]:
    """Ids and tokens of first turns, or of the validation documents' beginnings where no prompts are given.

    Args:
        who: whose arguments the messages name.
        without: how to go on without prompts.

    Raises:
        ValueError: there is no prompt, or one does not fit the target.
    """
    if prompts is None:
        data: TokenData = trainer.datamodule  # type: ignore[attr-defined]
        room = module.target.config.max_position_embeddings - max_new_tokens
        found = beginnings(data.splits.validation, count, prompt_tokens, room, who, without)
        return [(f"validation-{number}", ids) for number, ids in enumerate(found)]
    made: list[tuple[str, list[int]]] = []
    for prompt in prompts:
        ids = next_ids(Conversation(prompt, module.tokenizer), module.target, max_new_tokens)
        if isinstance(ids, Skipped):
            raise ValueError(f"{who}.prompts: prompt {prompt.prompt_id}: {ids.reason}")
        assert ids is not None
        made.append((prompt.prompt_id, ids))
    return made
