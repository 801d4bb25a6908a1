import dataclasses
import logging
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.embedded.corpus import corpus
from specdec.embedded.pretrain import PretrainModule, llama, pretrain
from specdec.embedded.rows import stream_rows
from specdec.embedded.tokenizer import train_tokenizer
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


def test_loss_is_that_of_the_next_token(material: Any) -> None:
    tokenizer, train_RT, _ = material
    module = PretrainModule(llama(TINY, tokenizer), TINY)
    rows_BT = train_RT[:2]
    with torch.no_grad():
        log_p_BTV = module.model(rows_BT).logits.log_softmax(-1)
        expected = -sum(log_p_BTV[b, t, rows_BT[b, t + 1]] for b in range(2) for t in range(TINY.seq_len)) / (
            2 * TINY.seq_len
        )
        torch.testing.assert_close(module.loss(rows_BT), torch.as_tensor(expected))


def test_rate_rises_then_falls_to_zero(material: Any) -> None:
    config = dataclasses.replace(TINY, tokens=10 * TINY.tokens_per_step, warmup=0.2)
    module = PretrainModule(llama(config, material[0]), config)
    rates = [module._rate(step) for step in range(11)]
    assert rates == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


def test_every_parameter_is_optimised_once(material: Any) -> None:
    module = PretrainModule(llama(TINY, material[0]), TINY)
    groups = module.configure_optimizers()["optimizer"].param_groups
    ours = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ours) == sorted(id(parameter) for parameter in module.model.parameters())
    assert len(groups[0]["params"]) == 7 * TINY.num_layers


def test_weights_depend_on_the_seed(material: Any) -> None:
    first, same, other = (llama(dataclasses.replace(TINY, seed=seed), material[0]).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_interrupt_stays_an_interrupt(material: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: PretrainModule, batch: Any) -> None:
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(PretrainModule, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain(TINY, *material)
    assert signal.getsignal(signal.SIGINT) is handler


def test_lightning_keeps_its_tips(material: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pretrain(TINY, *material)
    assert not [record for record in caplog.records if "GPU available" in record.getMessage()]
