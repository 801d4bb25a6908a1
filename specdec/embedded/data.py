"""The embedded target's text as data: rows to train a drafter on, and prompts that nothing was ever trained on."""

import random
import re
from collections import deque
from typing import Any

import torch

from specdec.data.loader import Document
from specdec.data.module import TokenData
from specdec.embedded.build import EmbeddedConfig
from specdec.embedded.corpus import CorpusFile, corpus, stream_rows

_STATEMENT = re.compile(r"^(?:@|async def |def |class )", re.MULTILINE)


class EmbeddedData(TokenData):
    """The corpus that the embedded target was trained on: the same split by file and the same kind of rows, each of
    which starts with ``<s>``."""

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """Rows of the training and of the held-out files."""
        if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
            raise ValueError(
                "EmbeddedData is for targets whose tokenizer begins and ends texts (<s>, </s>), as the embedded one: "
                "choose --data TextData or ChatData"
            )
        files = corpus(EmbeddedConfig().seed)
        return self._rows(files.train, tokenizer), self._rows(files.held_out, tokenizer)

    def _rows(self, files: list[CorpusFile], tokenizer: Any) -> list[Document]:
        rows_RT = stream_rows(tokenizer, [file.text for file in files], self.seq_len - 1)  # and <s>
        return [Document(row_T, torch.ones_like(row_T, dtype=torch.bool)) for row_T in rows_RT]


def held_out_prompts(count: int, prompt_tokens: int, seed: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Cut prompts from held-out files, each from the start of a file or of a top-level function or class.

    They do not overlap and are spread over the files: a file gives its second prompt after every other gave one.

    Args:
        count: how many.
        prompt_tokens: length of each in tokens, the ``<s>`` that encoding adds included.
        seed: of the order, and that of the target's :class:`EmbeddedConfig`: another seed holds out other files.
        tokenizer: the target's.

    Returns:
        One ``{"prompt_id": "path:line", "prompt": text, "category": path}`` each.

    Raises:
        ValueError: the files do not hold that many prompts of this length.
    """
    generator = random.Random(seed)
    files = [_prompts(source, prompt_tokens, tokenizer) for source in corpus(seed).held_out]
    for prompts in files:
        generator.shuffle(prompts)
    generator.shuffle(files)
    waiting, chosen = deque(deque(prompts) for prompts in files if prompts), list[dict[str, Any]]()
    while waiting and len(chosen) < count:
        prompts_left = waiting.popleft()
        chosen.append(prompts_left.popleft())
        if prompts_left:
            waiting.append(prompts_left)
    if len(chosen) < count:
        raise ValueError(
            f"count is {count}: the files hold {len(chosen)} prompts of {prompt_tokens} tokens; "
            "ask for fewer or shorter ones"
        )
    return chosen


def _prompts(source: CorpusFile, length: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Every prompt of a file, in order, none overlapping the one before."""
    prompts: list[dict[str, Any]] = []
    free = 0
    for start in _starts(source.text):
        if start < free:
            continue
        # More text than `length` tokens take, so that the cut lies inside it.
        ids = tokenizer.encode(source.text[start : start + 16 * length])[:length]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        # Text cut between two tokens may be tokenised otherwise, and text cut inside a character is spoilt.
        if source.text.startswith(text, start) and len(tokenizer.encode(text)) == length:
            line = source.text.count("\n", 0, start) + 1
            prompts.append({"prompt_id": f"{source.path}:{line}", "prompt": text, "category": source.path})
            free = start + len(text)
    return prompts


def _starts(text: str) -> list[int]:
    """Offsets of the file and of its top-level functions and classes, their decorators included."""
    starts = [0]
    for match in _STATEMENT.finditer(text):
        line_before = text[text.rfind("\n", 0, max(0, match.start() - 1)) + 1 : match.start()]
        if match.start() > 0 and not line_before.startswith("@"):
            starts.append(match.start())
    return starts
