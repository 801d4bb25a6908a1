"""Equal for equal targets, different for any other."""

import torch

from specdec.target.fingerprint import SAMPLES, fingerprint


def test_any_single_value_counts() -> None:
    weight = torch.randn(8, SAMPLES)
    first = fingerprint({}, {"w": weight})
    assert first == fingerprint({}, {"w": weight.clone()}) and len(first) == 64
    for place in (1, 777, weight.numel() - 2):
        other = weight.clone()
        other.view(-1)[place] += 0.5
        assert fingerprint({}, {"w": other}) != first


def test_order_names_and_shapes_count() -> None:
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    first = fingerprint({}, {"a": a, "b": b})
    assert first == fingerprint({}, {"b": b, "a": a})
    others = [
        {"a": b, "b": a},
        {"a": a, "c": b},
        {"a": a.view(4, 6), "b": b},
        {"a": a.flip(0), "b": b},
    ]
    assert len({fingerprint({}, other) for other in others} | {first}) == len(others) + 1


def test_a_model_in_another_precision_is_the_same_model() -> None:
    weight = torch.randn(6, 4)
    assert (
        len({fingerprint({}, {"w": weight.to(kind)}) for kind in (torch.float32, torch.float64, torch.bfloat16)}) == 1
    )


def test_paths_and_versions_do_not_count() -> None:
    config = {"hidden_size": 4, "text_config": {"rope_theta": 1.0}}
    stored = {**config, "_name_or_path": "x", "transformers_version": "9", "_attn_implementation": "sdpa", "dtype": "y"}
    assert fingerprint(config, {}) == fingerprint(stored, {})
    assert fingerprint(config, {}) != fingerprint({**config, "text_config": {"rope_theta": 2.0}}, {})


def test_every_kind_of_tensor() -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    tensors = {str(kind): torch.ones(3, 2, dtype=kind).T for kind in kinds} | {
        "empty": torch.empty(0),
        "0d": torch.tensor(1.0),
    }
    assert fingerprint({}, tensors) == fingerprint({}, {name: tensor.contiguous() for name, tensor in tensors.items()})
