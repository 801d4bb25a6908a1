"""Exported drafters in transformers' own speculative decoding, as the page of Python says."""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from specdec.decoding import DraftedGenerate
from specdec.drafter import Drafter
from specdec.export import export_drafter, import_drafter
from tests.mtp import made
from tests.perfect import markov_target
from tests.tiny import tiny_drafter, variants

pytestmark = pytest.mark.skipif(
    not hasattr(GenerationConfig(), "use_mtp"), reason="this transformers drafts with no module"
)
PAGE = Path(__file__).parents[2] / "docs/python.md"
# transformers finds a module by the number of layers that the published models have
LAYERS = {"deepseek_v3": 61, "glm4_moe": 46}
PROMPTS = [[3, 4, 6], list(range(6, 26))]


def almost_the_target(drafter: Drafter) -> Drafter:
    """Let a drafter say what its token's embedding alone makes the head say, but for noise.

    So does a target whose layers change little; of such a drafter some drafts are accepted and some are not.
    """
    generator = torch.Generator().manual_seed(0)
    for name, value in drafter.state_dict().items():
        if name == "entry.token_fc.weight":
            value.copy_(torch.eye(*value.shape))
        if name in ("embed_tokens.weight", "lm_head.weight", "vocab.target_ids_D"):
            continue
        if "norm" in name:
            value.fill_(1)
        elif name != "entry.token_fc.weight":
            value.mul_(0.02)
        value.add_(torch.randn(value.shape, generator=generator) / 64)
    return drafter


OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 40}


class Passes(BaseStreamer):
    """Hears the prompt, and then how many tokens each pass of the model gave."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None: ...


def drafts_as_ours(
    model: PreTrainedModel, drafter: Drafter, shape: str, prompts: list[list[int]], **theirs: Any
) -> bool:
    """Return whether transformers accepts in each pass what specdec accepts with the same drafter.

    All texts must be plain ``generate``'s, and of the drafts some accepted and some not.
    """
    drafted = DraftedGenerate(copy.deepcopy(model), drafter, shape)
    sizes = []
    is_same = True
    for prompt in prompts:
        ids = torch.tensor([prompt])
        heard = Passes()
        text = model.generate(ids, **OPTIONS, **theirs, streamer=heard)
        assert torch.equal(text, model.generate(ids, **OPTIONS))
        ours = drafted.target.model.generate(ids, **OPTIONS, custom_generate=drafted)
        assert torch.equal(text, ours)
        assert drafted.generation is not None
        # before them the prompt and its own pass; the last may give more tokens than are asked for
        own = [accepted + 1 for accepted in drafted.generation.accepted[:-1]]
        is_same &= heard.sizes[2:-1] == own
        sizes += own
    assert {1, 2} <= {*sizes}
    return is_same


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("is_exported", [True, False])
def test_mtp(is_exported: bool, family: str, tmp_path: Path) -> None:
    """With the module that the checkpoint came with, which the export replaced, passes are others."""
    source = tmp_path / "target"
    target, _ = made(family, source, torch.float32, 0.02, num_hidden_layers=LAYERS[family])
    drafter = almost_the_target(import_drafter(source, target))
    exported = export_drafter(drafter, target, tmp_path / "out", "mtp").directory
    place = exported if is_exported else source
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert drafts_as_ours(model, drafter, "chain:depth=1", PROMPTS, use_mtp=True) == is_exported


@pytest.mark.parametrize("is_exported", [True, False])
def test_dflash(is_exported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random drafter has now and then a draft accepted; another random one, at other places."""
    target = markov_target(context=0.4)
    drafters = []
    for seed in (0, 1):
        spec = dataclasses.replace(variants()["dflash"], draft_vocab_size="all")
        drafter = tiny_drafter(spec, seed)
        drafter.embed_tokens.weight.copy_(target.embedding_weight())
        drafter.lm_head.weight.copy_(target.head_weight())
        for name, value in drafter.named_parameters():  # else the mask's embedding says it all
            value.mul_(50 if "o_proj" in name or "down_proj" in name else 1)
        drafters.append(drafter)
    monkeypatch.chdir(tmp_path)
    export_drafter(drafters[0], target, tmp_path / "exported")
    (block,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    load = block[: block.index("output = ")]
    names = {"model": target.model}
    exec(compile(load, str(PAGE), "exec"), names)
    theirs = {"assistant_model": names["assistant"], "speculation_type": "dflash"}
    model = copy.deepcopy(target.model)
    model.set_attn_implementation("sdpa")
    drafter = drafters[0 if is_exported else 1]
    prompts = [[start, start + 1] for start in range(1, 55, 3)]
    assert drafts_as_ours(model, drafter, "chain:depth=7", prompts, **theirs) == is_exported
