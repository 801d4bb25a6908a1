"""Exported drafters in transformers' own speculative decoding, as the page of Python says."""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

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


OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20}


class Passes(BaseStreamer):
    """Hears the prompt, and then how many tokens each pass of the model gave."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None: ...


class Generated(NamedTuple):
    """Texts of some prompts, and the tokens of each pass but the last, which may give more than are asked for."""

    texts: list[list[int]]
    passes: list[list[int]]


def with_specdec(
    model: PreTrainedModel, drafter: Drafter, shape: str, prompts: list[list[int]]
) -> Generated:
    """Generate with a drafter of ours.

    All texts must be plain ``generate``'s, and of the drafts some accepted and some not.
    """
    drafted = DraftedGenerate(copy.deepcopy(model), drafter, shape)
    texts = []
    passes = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = drafted.target.model.generate(ids, **OPTIONS, custom_generate=drafted)
        assert torch.equal(text, model.generate(ids, **OPTIONS))
        assert drafted.generation is not None
        texts.append(text.tolist())
        passes.append([accepted + 1 for accepted in drafted.generation.accepted[:-1]])
    assert {1, 2} <= {size for sizes in passes for size in sizes}
    return Generated(texts, passes)


def with_transformers(
    model: PreTrainedModel, prompts: list[list[int]], **drafting: Any
) -> Generated:
    """Generate with transformers' own drafting, which hands out the prompt and its own pass first."""
    texts = []
    passes = []
    for prompt in prompts:
        streamer = Passes()
        ids = torch.tensor([prompt])
        texts.append(model.generate(ids, **OPTIONS, **drafting, streamer=streamer).tolist())
        passes.append(streamer.sizes[2:-1])
    return Generated(texts, passes)


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_mtp(family: str, tmp_path: Path) -> None:
    """With the module that the checkpoint came with, which the export replaced, passes are others."""
    source = tmp_path / "target"
    target, _ = made(family, source, torch.float32, 0.02, num_hidden_layers=LAYERS[family])
    drafter = almost_the_target(import_drafter(source, target))
    exported = export_drafter(drafter, target, tmp_path / "out", "mtp").directory
    theirs = {}
    for place in (source, exported):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        theirs[place] = with_transformers(model, PROMPTS, use_mtp=True)
    ours = with_specdec(model, drafter, "chain:depth=1", PROMPTS)
    assert theirs[exported] == ours
    assert theirs[source].texts == ours.texts
    assert theirs[source].passes != ours.passes


@pytest.mark.slow
def test_dflash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "assistant" in block)
    load = block[: block.index("output = ")]
    names = {"model": target.model}
    exec(compile(load, str(PAGE), "exec"), names)
    model = copy.deepcopy(target.model)
    model.set_attn_implementation("sdpa")
    prompts = [[start, start + 1] for start in range(1, 55, 6)]
    drafting = {"assistant_model": names["assistant"], "speculation_type": "dflash"}
    theirs = with_transformers(model, prompts, **drafting)
    exported, other = (
        with_specdec(model, drafter, "chain:depth=7", prompts) for drafter in drafters
    )
    assert theirs == exported
    assert other.texts == exported.texts
    assert other.passes != exported.passes
