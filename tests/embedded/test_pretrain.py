import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.embedded.build import llama, pretrain
from specdec.embedded.corpus import corpus, stream_rows, train_tokenizer
from tests.embedded.conftest import TINY


@pytest.fixture
def material(library: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    texts, held_out = ([source.text for source in part] for part in corpus(TINY.seed))
    tokenizer = train_tokenizer(texts, TINY.vocab_size, TINY.max_position_embeddings)
    return tokenizer, stream_rows(tokenizer, texts, TINY.seq_len), stream_rows(tokenizer, held_out, TINY.seq_len)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_learns(material: Any, precision: str) -> None:
    tokenizer, train_RT, held_out_RT = material
    config = dataclasses.replace(TINY, tokens=8_000, precision=precision)
    random_state = torch.get_rng_state()
    model, held_out_loss, seconds = pretrain(config, tokenizer, train_RT, held_out_RT)
    assert held_out_loss < math.log(TINY.vocab_size) - 1
    assert seconds > 0
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(torch.get_rng_state(), random_state)


def test_weights_depend_on_the_seed(material: Any) -> None:
    first, same, other = (llama(dataclasses.replace(TINY, seed=seed), material[0]).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
