"""Tiny drafters and targets that the tests share."""

import contextlib
import dataclasses
import functools
import itertools
import resource
from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.drafter import (
    MLA,
    Concat,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    KVInjection,
    LastLayer,
    MarkovBlock,
    MaskBlock,
    MaskConstant,
    Narrow,
    Norms,
    PostNorm,
    PreNorm,
    ScalarMix,
    TargetLayer,
    TargetNorm,
    Wide,
)
from specdec.target import Target

LAYERS, HIDDEN, VOCAB = 7, 32, 61


def llama_config(**overrides: object) -> LlamaConfig:
    """A seven-layer Llama, deep enough for EAGLE-3's default boundaries; head width differs from hidden / heads."""
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**values, **overrides})


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: object) -> Target:
    """A random Llama whose logits are spread out, so that greedy choices are no ties."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(**overrides)).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return Target(model)


@functools.cache
def plain_llama_config() -> LlamaConfig:
    """The config without overrides, only to be read: hundreds of drafters' configs are made of it."""
    return llama_config()


def tiny_config(spec: DrafterSpec, **overrides: object) -> DrafterConfig:
    """A drafter's config for the tiny Llama."""
    return DrafterConfig.for_target(
        spec,
        llama_config(**overrides) if overrides else plain_llama_config(),
        vocab_size=VOCAB,
        num_target_layers=LAYERS,
        identity={"source": "tiny"},
    )


def vocabulary(size: int) -> DrafterConfig:
    """A design that knows so many tokens."""
    return tiny_config(DrafterSpec(draft_vocab_size=size))


def tiny_drafter(spec: DrafterSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> Drafter:
    """A random drafter, every norm's weight away from one so that a forgotten norm shows."""
    torch.manual_seed(seed)
    config = tiny_config(spec)
    ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, ids).to(dtype)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4 if "lm_head" not in name else 20)
    return drafter.requires_grad_(False)


def presets() -> dict[str, DrafterSpec]:
    """The published generations."""
    eagle1 = DrafterSpec(
        LastLayer(),
        Narrow(bias=False),
        Norms(embed=False, hidden=False, output=False),
        PreNorm(),
        "target",
        "all",
    )
    return {
        "eagle1": eagle1,
        "eagle3": DrafterSpec(norms=Norms(), recurrence=PreNorm(), draft_vocab_size=40),
        "eagle3_1": DrafterSpec(draft_vocab_size=40),
    }


def biased() -> DrafterSpec:
    """EAGLE-1 with the bias that its authors' drafters of LLaMA 2 have."""
    return dataclasses.replace(presets()["eagle1"], entry=Narrow(bias=True))


def mtp() -> DrafterSpec:
    """The module of multi-token prediction of whatever target it is for."""
    norms = Norms(embed=TargetNorm(), hidden=TargetNorm(), output=TargetNorm())
    return DrafterSpec(
        LastLayer(),
        Narrow(bias=False),
        norms,
        head="target",
        draft_vocab_size="all",
        attention=TargetLayer(),
    )


def variants() -> dict[str, DrafterSpec]:
    """The other shipped designs, each EAGLE-3 or 3.1 but for a word; sizes cut down."""
    each, concat = Norms(aux="each"), Norms(aux="concat")
    small = {"draft_vocab_size": 40}
    return {
        "nvidia": DrafterSpec(norms=concat, recurrence=PreNorm(), **small),
        "speculators": DrafterSpec(norms=dataclasses.replace(concat, residual="normed"), **small),
        "qwen3": DrafterSpec(norms=dataclasses.replace(each, query_key=True), **small),
        "weighted_sum": DrafterSpec(ScalarMix(), **small),
        "two_layer": DrafterSpec(num_layers=2, **small),
        "sliding_window": DrafterSpec(attention_window=16, **small),
        "peagle": DrafterSpec(norms=Norms(), recurrence=MaskConstant(), **small),
        "peagle_3_1": DrafterSpec(norms=each, recurrence=MaskConstant(), **small),
        "dflash": DrafterSpec(
            Concat(),
            KVInjection(),
            Norms(embed=False, query_key=True),
            MaskBlock(),
            "target",
            "all",
            num_layers=2,
        ),
        "dspark": DrafterSpec(
            Concat(),
            KVInjection(),
            Norms(embed=False, query_key=True),
            MarkovBlock(rank=6),
            "target",
            "all",
            num_layers=2,
        ),
        "mla": DrafterSpec(attention=MLA(10, 256, 6, 64, 5), **small),
        "mtp": mtp(),
        "narrow_fusion": DrafterSpec(
            Concat(), Narrow(bias=False), Norms(input=True), PreNorm(), **small
        ),
    }


BLOCKS = ("dflash", "dspark")
"""Of the variants, those that draft a block of masks in one call, whose steps are nodes of that call."""


def deeper() -> dict[str, DrafterSpec]:
    """Shipped designs that differ from ``two_layer`` in its number alone, which fewer tests go through."""
    return {
        f"{name}_layer": DrafterSpec(num_layers=layers, draft_vocab_size=40)
        for layers, name in enumerate(("three", "four", "five"), start=3)
    }


def all_specs() -> Iterator[DrafterSpec]:
    """Every legal combination of fusion, entry, norms, recurrence and one or two layers, then the further variants."""
    yield from _product()
    yield from _further()


def _product() -> Iterator[DrafterSpec]:
    for (
        fusion,
        entry,
        aux,
        embed,
        hidden,
        inputs,
        residual,
        output,
        recurrence,
        layers,
    ) in itertools.product(
        (LastLayer(), Concat()),
        (Narrow(), Wide()),
        ("none", "each", "concat"),
        (False, True),
        (False, True),
        (False, True),
        ("raw", "normed"),
        (False, True),
        (PreNorm(), PostNorm()),
        (1, 2),
    ):
        norms = Norms(aux, embed, hidden, inputs, residual, output)  # type: ignore[arg-type]
        try:
            spec = DrafterSpec(
                fusion, entry, norms, recurrence, draft_vocab_size=40, num_layers=layers
            )
            tiny_config(spec)
        except ValueError:
            continue
        yield spec


def _further() -> Iterator[DrafterSpec]:
    """Fusion by weights, norms on queries and keys, and windows, each crossed with the axes that it meets."""
    for fusion, entry, aux, query_key, window, recurrence, layers in itertools.product(
        (LastLayer(), Concat(), ScalarMix()),
        (Narrow(), Wide()),
        ("none", "each", "concat"),
        (False, True),
        ("full", 16),
        (PreNorm(), PostNorm()),
        (1, 2),
    ):
        if isinstance(fusion, LastLayer | Concat) and not query_key and window == "full":
            continue  # in the product
        if window != "full" and aux != ("none" if isinstance(fusion, LastLayer) else "each"):
            continue  # a window does not touch the fusion
        norms = Norms(aux, query_key=query_key)  # type: ignore[arg-type]
        try:
            spec = DrafterSpec(
                fusion,
                entry,
                norms,
                recurrence,
                draft_vocab_size=40,
                num_layers=layers,
                attention_window=window,
            )
            tiny_config(spec)
        except ValueError:
            continue
        yield spec


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, the system refuses to let any file grow beyond ``size`` bytes: a disk that fills up half-way."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextlib.contextmanager
def little_memory(more: int = 2**29) -> Iterator[None]:
    """Inside, the system refuses ``more`` bytes beyond what the process has: what is not justified fails at once."""
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + more, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
