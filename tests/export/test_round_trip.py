"""Out and in again: the weights to the last bit, the config equal, or a refusal with its reason."""

import dataclasses
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from transformers import LlamaForCausalLM

from specdec.drafter import Concat, Drafter, DrafterSpec, LastLayer, Narrow, Norms, PreNorm, Wide
from specdec.export import (
    FORMATS,
    NotServable,
    export_drafter,
    import_checkpoint,
    read_checkpoint,
    subject_of,
)
from specdec.export.read import contradictions
from specdec.export.switches import lint
from specdec.target import Target
from specdec.utils.reading import SUMS
from tests.export.made import made_drafter, same_state, unbiased
from tests.tiny import BLOCKS, LAYERS, all_specs, llama_config, tiny_target

PRESETS = sorted((Path(__file__).parents[2] / "conf" / "drafter").glob("*.yaml"))
REFUSED = {  # of the presets, by format
    "vllm": {"narrow_fusion", "weighted_sum", "mtp"},
    "speculators": {"narrow_fusion", "weighted_sum", "eagle1", "eagle2", "hass", "mla", "mtp"},
    "sglang": {
        "narrow_fusion",
        "weighted_sum",
        "qwen3",
        "speculators",
        "peagle",
        "peagle_3_1",
        *BLOCKS,
        "mtp",
    },
}
ROPES = (
    None,
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


@cache
def target(rope: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    """The tiny Llama with one of the ropes."""
    if not rope:
        return tiny_target(dtype=dtype)
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(llama_config(rope_parameters=ROPES[rope])).to(dtype))


def preset(path: Path) -> DrafterSpec:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--drafter", type=DrafterSpec)
    return parser.instantiate(
        parser.parse_args(["--drafter", str(path), "--drafter.draft_vocab_size", "40"])
    ).drafter


def comes_back(drafter: Drafter, of: Target, directory: Path, format: str) -> None:
    export_drafter(drafter, of, directory, format)
    back = import_checkpoint(read_checkpoint(directory), of)
    assert same_state(back, drafter)
    assert back.config == drafter.config
    for ours in ("specdec.json", SUMS):  # by config.json alone, as if somebody else had written it
        (directory / ours).unlink()
    bare = import_checkpoint(read_checkpoint(directory), of)
    assert contradictions(drafter.config, bare.config) == []
    assert same_state(bare, drafter) or not unbiased(drafter.config) or format == "sglang"


@pytest.mark.parametrize("format", REFUSED)
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset(path: Path, format: str, tmp_path: Path) -> None:
    spec = preset(path)
    if spec.head == "target":
        spec = dataclasses.replace(spec, draft_vocab_size="all")
    drafter = made_drafter(spec, target())
    if path.stem in REFUSED[format]:
        with pytest.raises(NotServable, match=r"cannot serve this drafter"):
            export_drafter(drafter, target(), tmp_path / "out", format)
        assert not (tmp_path / "out").exists()
    else:
        comes_back(drafter, target(), tmp_path / "out", format)


@pytest.mark.parametrize("format", REFUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype, format: str, tmp_path: Path) -> None:
    of = target(dtype=dtype)
    comes_back(made_drafter(DrafterSpec(draft_vocab_size=40), of), of, tmp_path / "out", format)


def random_cases(count: int) -> list[tuple[int, DrafterSpec]]:
    """Legal combinations, each with sizes and boundaries of its own."""
    chance = random.Random(7)
    specs = list(all_specs())
    bare = Norms(embed=False, hidden=False, output=False)
    eagle1 = DrafterSpec(LastLayer(), Narrow(), bare, PreNorm(), "target", "all")
    cases: list[tuple[int, DrafterSpec]] = []
    while len(cases) < count:
        spec = chance.choice(specs)
        if chance.random() < 0.3:  # most of the product is served nowhere
            norms = dataclasses.replace(
                spec.norms, embed=True, hidden=True, input=False, output=True
            )
            spec = dataclasses.replace(spec, fusion=Concat(), entry=Wide(), norms=norms)
        elif chance.random() < 0.2:
            spec = dataclasses.replace(eagle1, num_layers=spec.num_layers)
        changes: dict[str, object] = {"draft_vocab_size": chance.choice([1, 40, 61, "all"])}
        if isinstance(spec.entry, Narrow):
            changes["entry"] = Narrow(bias=chance.random() < 0.5)
        if isinstance(spec.fusion, LastLayer):
            own = chance.random() < 0.3
            changes |= {"head": "own" if own else "target"} | (
                {} if own else {"draft_vocab_size": "all"}
            )
        else:
            layers = chance.sample(range(LAYERS + 1), chance.randint(1, 5))
            changes |= {"aux_layers": sorted(layers), "hidden_size": chance.choice(["target", 24])}
        changes["intermediate_size"] = chance.choice(["target", 20])
        case = chance.randrange(len(ROPES)), dataclasses.replace(spec, **changes)
        if case not in cases:
            cases.append(case)
    return cases


CASES = random_cases(40)


def served(spec: DrafterSpec, format: str, *, biased: bool, embedding: bool) -> bool:
    """What engines can express, said once more in other words than the exporter's."""
    norms = spec.norms
    if isinstance(spec.fusion, LastLayer) and isinstance(spec.entry, Wide):
        return format == "vllm" and bool(norms.embed and norms.hidden and norms.output)
    if isinstance(spec.fusion, LastLayer):
        plain = not (norms.embed or norms.hidden or norms.input or norms.output or norms.query_key)
        if not plain or spec.head != "target" or not isinstance(spec.entry, Narrow):
            return False
        if spec.attention_window != "full" or format == "speculators":
            return False
        return not embedding if format == "sglang" else not biased
    if not isinstance(spec.fusion, Concat) or not isinstance(spec.entry, Wide):
        return False
    if not (norms.embed and norms.hidden and norms.output):
        return False
    if format != "sglang":
        return True
    layers = spec.aux_layers
    assert isinstance(layers, list)
    narrower = spec.hidden_size == 24
    if norms.residual == "normed" or norms.query_key:
        return False
    if layers[0] == 0 or layers[-1] == LAYERS or (len(layers) == 1 and not narrower):
        return False
    return narrower or not embedding


@pytest.mark.slow
@pytest.mark.parametrize("format", REFUSED)
def test_random_legal_combinations(format: str, tmp_path: Path) -> None:
    counts = {True: 0, False: 0}
    for index, (rope, spec) in enumerate(CASES):
        biased, embedding = index % 3 == 0 and not unbiased(spec), index % 4 == 0
        of = target(rope)
        drafter = made_drafter(spec, of, seed=index, own_embedding=embedding, bias=biased)
        wanted = served(spec, format, biased=biased, embedding=embedding)
        counts[wanted] += 1
        if wanted:
            comes_back(drafter, of, tmp_path / str(index), format)
            continue
        with pytest.raises(NotServable) as refused:
            export_drafter(drafter, of, tmp_path / str(index), format)
        reasons = list(lint(subject_of(drafter, of), FORMATS[format].engine))
        assert reasons or format == "speculators", spec
        assert all(f"{switch.name}: {reason}" in str(refused.value) for switch, reason in reasons)
        assert len(str(refused.value).splitlines()) == 1
    assert min(counts.values()) > 5  # the cases are no use if they are all of a kind
