import functools
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.embedded.corpus import corpus as read_corpus
from specdec.embedded.corpus import functions, held_out_prompts, train_tokenizer

corpus = functools.cache(read_corpus)  # of some hundred files


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.embedded.corpus.corpus", corpus)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([source.text for source in corpus(0).train[:60]], 1024, 2048)


def test_prompts_begin_held_out_functions(tokenizer: Any) -> None:
    prompts = held_out_prompts(60, 48, 0, tokenizer)
    texts = {source.path: dict(functions(source.text)) for source in corpus(0).held_out}
    assert len(prompts) == 60 == len({prompt["prompt_id"] for prompt in prompts})
    for prompt in prompts:
        path, line = prompt["prompt_id"].rsplit(":", 1)
        assert prompt["category"] == path
        whole = texts[path][int(line)]
        assert whole.startswith(prompt["prompt"]) and whole.startswith(("def ", "async def ", "@"))
        assert len(tokenizer.encode(prompt["prompt"])) == 48 <= len(tokenizer.encode(whole)) / 2
    assert prompts == held_out_prompts(60, 48, 0, tokenizer)
    assert prompts != held_out_prompts(60, 48, 1, tokenizer)


def test_prompts_are_spread_over_files(tokenizer: Any) -> None:
    files = [prompt["category"] for prompt in held_out_prompts(12, 32, 0, tokenizer)]
    assert len(set(files)) == 12


def test_too_few_prompts(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="ask for fewer or shorter ones"):
        held_out_prompts(10**6, 16, 0, tokenizer)


def test_functions_and_methods_but_no_inner_ones() -> None:
    text = (
        "import a\n\n@one\n@two\ndef f():\n    def inner(): pass\n\nclass C:\n    x = 1\n\n    @three\n"
        "    async def g(self):\n        return 1\n\n    class D:\n        def h(self): pass\n"
    )
    assert functions(text) == [
        (3, "@one\n@two\ndef f():\n    def inner(): pass\n"),
        (11, "@three\nasync def g(self):\n    return 1\n"),
        (16, "def h(self): pass\n"),
    ]
    assert functions("def broken(:\n") == []
