from typing import Any

import pytest
import torch

from specdec.embedded.build import EmbeddedConfig, native_precision


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 100}, "vocab_size is 100: .* 258"),
        ({"hidden_size": 0}, "hidden_size is 0: it must be at least 1"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"heads": 3}, "heads is 3: it must be a multiple of kv_heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"seq_len": 4096}, "seq_len is 4096: it must be at most max_position"),
        ({"tokens": 2047}, "tokens is 2047: it must be at least one step's, 2048"),
        ({"warmup": 1.0}, "warmup is 1.0"),
    ],
)
def test_wrong_numbers(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        EmbeddedConfig(**{"batch_size": 8, "seq_len": 256} | wrong)
    assert "\n" not in str(error.value)


def test_steps_round_down() -> None:
    config = EmbeddedConfig(batch_size=3, seq_len=10, tokens=119)
    assert (config.tokens_per_step, config.steps) == (30, 3)


@pytest.mark.parametrize(
    ("able", "precision"),
    [({"avx512_bf16": True}, "bf16-mixed"), ({"amx_bf16": True}, "bf16-mixed"), ({"avx2": True}, "32-true")],
)
def test_precision_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, able: dict[str, bool], precision: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert native_precision() == precision
    assert EmbeddedConfig().precision == precision
