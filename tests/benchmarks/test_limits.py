"""Shares of the machine's limits: what is counted, and where a step's time is booked."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from benchmarks import decode, limits
from benchmarks.training import pieces
from tests.tiny import llama_config


def test_limits_are_told_in_their_units() -> None:
    (line,) = limits.lines({"flops": {"float32": 157e9}, "read": {"64000000": 20.5e9}})
    assert "157 GFLOP/s in float32" in line
    assert "20.5 GB/s of 64 MB" in line


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_an_embedding_only_where_it_is_the_head(tied: bool) -> None:
    config = llama_config(tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    embedding = config.vocab_size * config.hidden_size * 4
    everything = sum(weight.nbytes for weight in model.parameters())
    assert decode.pass_bytes(model) == (everything if tied else everything - embedding)


def test_a_chain_reads_the_drafter_for_every_draft() -> None:
    made = {"pass_bytes": 1000, "draft_bytes": 100, "token_bytes": 2}
    answers = [{"passes": 3}, {"passes": 4}]
    plain = decode.Entry("plain", "specdec", "")
    chain = decode.Entry("chain", "specdec", "", shape="chain:depth=3")
    engine = decode.Entry("engine", "vllm", "", draft_tokens=3)
    assert decode.bytes_read(plain, answers, made, 50) == 7 * 1100
    assert decode.bytes_read(chain, answers, made, 50) == 7 * 1400
    assert decode.bytes_read(engine, answers, made, 50) == 7 * 1400


def test_products_are_counted_and_booked_where_they_are_called() -> None:
    layer = nn.Linear(24, 32, bias=False)
    optimizer = torch.optim.SGD(layer.parameters())
    rows = torch.randn(8, 24)

    def step() -> None:
        layer(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert pieces.flops(step) == 2 * (2 * 8 * 24 * 32)  # forward, and the weights' gradient
    of_step = pieces.pieces(step, torch.float32, steps=2)
    assert {pieces.LAYERS, pieces.PYTHON, "optimizer"} <= set(of_step)
    layers = of_step[pieces.LAYERS]
    assert 0 < layers.products <= layers.all
    assert layers.alone > 0
    assert all(of_step[name].products == 0 for name in of_step if name != pieces.LAYERS)
