from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specdec.embedded.corpus import _starts, corpus, held_out_prompts, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([source.text for source in corpus(0).train[:60]], 1024, 2048)


def test_prompts_come_from_held_out_files(tokenizer: Any) -> None:
    prompts = held_out_prompts(60, 48, 0, tokenizer)
    texts = {source.path: source.text for source in corpus(0).held_out}
    assert len(prompts) == 60 == len({prompt["prompt_id"] for prompt in prompts})
    for prompt in prompts:
        path, line = prompt["prompt_id"].rsplit(":", 1)
        assert prompt["category"] == path
        rest = "".join(texts[path].splitlines(keepends=True)[int(line) - 1 :])
        assert rest.startswith(prompt["prompt"])
        assert int(line) == 1 or rest.startswith(("def ", "class ", "async def ", "@"))
        assert len(tokenizer.encode(prompt["prompt"])) == 48
    assert prompts == held_out_prompts(60, 48, 0, tokenizer)
    assert prompts != held_out_prompts(60, 48, 1, tokenizer)


def test_prompts_are_spread_over_files(tokenizer: Any) -> None:
    files = [prompt["category"] for prompt in held_out_prompts(12, 32, 0, tokenizer)]
    assert len(set(files)) == 12


def test_prompts_do_not_overlap(tokenizer: Any, library: Path) -> None:
    prompts = _all_prompts(tokenizer, 16)
    texts = {source.path: source.text for source in corpus(0).held_out}
    for path, text in texts.items():
        spans = []
        for prompt in prompts:
            if prompt["category"] == path:
                line = int(prompt["prompt_id"].rsplit(":", 1)[1])
                start = len("".join(text.splitlines(keepends=True)[: line - 1]))
                spans.append((start, start + len(prompt["prompt"])))
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def _all_prompts(tokenizer: Any, length: int) -> list[dict[str, Any]]:
    with pytest.raises(ValueError, match="ask for fewer or shorter ones") as error:
        held_out_prompts(10**6, length, 0, tokenizer)
    available = int(str(error.value).split("hold ")[1].split()[0])
    return held_out_prompts(available, length, 0, tokenizer)


def test_a_decorated_function_starts_at_its_decorator() -> None:
    text = "import a\n\n@one\n@two\ndef f():\n    def inner(): pass\n\nasync def g(): pass\nclass C: pass\n"
    assert _starts(text) == [0, text.index("@one"), text.index("async"), text.index("class C")]
