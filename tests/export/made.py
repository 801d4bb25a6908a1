"""Drafters and checkpoints that these tests share."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Narrow
from specdec.target import Target


def made_drafter(
    spec: DrafterSpec,
    target: Target,
    *,
    seed: int = 0,
    own_embedding: bool = False,
    bias: bool = False,
) -> Drafter:
    """A random drafter of a target; what it has of the target's is the target's.

    Args:
        bias: give a narrow entry a bias that is not zero.
    """
    torch.manual_seed(seed)
    config = DrafterConfig.for_target(
        spec,
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        identity=target.identity,
    )
    ids_D = torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, ids_D).to(target.dtype).requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        if name == "entry.feature_fc.bias" and not bias:
            parameter.zero_()
    if config.head == "target":
        drafter.lm_head.weight.copy_(target.head_weight())
    if not own_embedding and config.hidden_size == target.hidden_size:
        drafter.embed_tokens.weight.copy_(target.embedding_weight())
    return drafter


def unbiased(spec: DrafterSpec) -> bool:
    """Whether nothing of the design is lost where fc.bias is."""
    return not isinstance(spec.entry, Narrow) or not spec.entry.bias


def same_state(one: Drafter, two: Drafter) -> bool:
    """Whether two drafters have the same weights to the last bit, in the same dtypes."""
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and _bits(a[n], b[n]) for n in a)


def _bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(
        a.contiguous().view(torch.uint8).eq(b.contiguous().view(torch.uint8)).all()
    )


def names(directory: Path) -> list[str]:
    """What lies in a directory."""
    return sorted(path.name for path in directory.iterdir())


def evaluation(
    directory: Path, drafter: dict[str, Any], fingerprint: object, **settings: object
) -> Path:
    """A directory with what ``specdec evaluate`` writes of a drafter's config and the hash of its weights."""
    result = {
        "shape": "chain of 5", "shape_config": {"class": "Chain", "depth": 5}, "prompts": 80, "passes": 1234,
        "acceptance_length": {"mean": 2.34561, "low": 2.1, "high": 2.6},
        "speedup": 1.72, "speedup_interval": {"low": 1.5, "high": 1.9}, "identical_outputs": 79, "compared_outputs": 80,
        "looping_answers": 8, "looping_share": 0.1, "acceptance_length_looping": {"mean": 5.1, "low": 4.0, "high": 6.0},
        "acceptance_length_without_looping": {"mean": 2.1, "low": 2.0, "high": 2.2},
    }  # fmt: skip
    bare = {"speedup": None, "speedup_interval": None, "compared_outputs": 0}
    one_prompt = {"mean": 3.0, "low": None, "high": None}
    given = {
        "prompts": ["/data/mt_bench.jsonl"], "max_new_tokens": 128, "sampling": {"temperature": 0.0},
        "batch_size": 1, "dtype": "float32", "prompts_sha256": "0" * 64, "intervals": "95 % Student's t", **settings,
    }  # fmt: skip
    metrics = {
        "results": [result, {**result, **bare, "shape": "tree", "acceptance_length": one_prompt, "prompts": 1}],
        "target": {"fingerprint": fingerprint},
        "drafter": {"directory": "runs/a", "label": "a", "made_for_this_target": True, **drafter},
        "settings": given,
        "provenance": {"date": "2026-01-02T03:04:05+00:00", "gpus": None, "cpu": "Xeon", "cores": 2,
                       "versions": {"torch": "2.13.0"}},
    }  # fmt: skip
    directory.mkdir()
    (directory / "metrics.json").write_text(json.dumps(metrics))
    return directory
