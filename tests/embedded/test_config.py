import pytest
import torch

from specdec.embedded.build import EmbeddedConfig, native_precision


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
