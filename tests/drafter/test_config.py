"""The description of a drafter: what is legal, what is refused and why, and that nothing is lost on the way to JSON."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config

from specdec.drafter import (
    Concat,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    LastLayer,
    Narrow,
    Norms,
    PostNorm,
    PreNorm,
    ScalarMix,
    Wide,
)
from specdec.nn.view import View
from tests.tiny import HIDDEN, LAYERS, VOCAB, llama_config, presets, variants

target_config = cache(llama_config)


def build(
    spec: DrafterSpec, hf_config: Any = None, vocab_size: int = VOCAB, layers: int = LAYERS
) -> DrafterConfig:
    return DrafterConfig.for_target(
        spec,
        target_config() if hf_config is None else hf_config,
        vocab_size=vocab_size,
        num_target_layers=layers,
        identity={"source": "tiny", "revision": None, "hidden_size": HIDDEN},
    )


def grid() -> Iterator[dict[str, Any]]:
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
        head,
        vocab,
        width,
    ) in itertools.product(
        (LastLayer(), Concat(), ScalarMix()),
        (Narrow(), Narrow(bias=False), Wide()),
        ("none", "each", "concat"),
        (False, True),
        (False, True),
        (False, True),
        ("raw", "normed"),
        (False, True),
        (PreNorm(), PostNorm()),
        ("own", "target"),
        (40, "all"),
        (24, "target"),
    ):
        yield {
            "fusion": fusion,
            "entry": entry,
            "norms": Norms(aux, embed, hidden, inputs, residual, output),
            "recurrence": recurrence,
            "head": head,
            "draft_vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": 16,
        }


def objections(design: dict[str, Any]) -> set[str]:
    """Why a design is illegal, from the rules and not from the code."""
    spec = SimpleNamespace(**design)
    norms, narrow = spec.norms, isinstance(spec.entry, Narrow)
    rules = {
        r"norms\.aux=\w+ normalizes states before they are mixed": (
            norms.aux != "none" and isinstance(spec.fusion, LastLayer)
        ),
        r"norms\.residual=normed needs norms\.hidden=true": norms.residual == "normed"
        and not norms.hidden,
        r"norms\.residual=normed belongs to entry Wide": norms.residual == "normed" and narrow,
        r"norms\.input belongs to entry Narrow": norms.input and not narrow,
        r"recurrence PostNorm needs norms\.output=true": isinstance(spec.recurrence, PostNorm)
        and not norms.output,
        r"head=target covers the whole vocabulary": spec.head == "target"
        and spec.draft_vocab_size != "all",
        r"head=target reads states of width 32, the drafter has 24": spec.head == "target"
        and spec.hidden_size == 24,
        r"fusion LastLayer keeps the target's width 32": isinstance(spec.fusion, LastLayer)
        and spec.hidden_size == 24,
    }
    return {reason for reason, holds in rules.items() if holds}


def test_every_combination_is_refused_for_its_reason_or_legal() -> None:
    legal, heard = 0, set()
    for design in grid():
        reasons = objections(design)
        if not reasons:
            build(DrafterSpec(**design))
            legal += 1
            continue
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the reasons are checked below
            build(DrafterSpec(**design))
        message = str(caught.value)
        named = {reason for reason in reasons if re.match(reason, message)}
        assert len(named) == 1, f"{message!r} is not among {reasons}"
        assert "\n" not in message
        heard |= named
    # with and without bias; embed, hidden and input; output and feedback
    narrow, wide = 2 * (2 * 2 * 2) * 3, 2 * 3 * 3
    # fusions that mix by norms.aux, or LastLayer; by head, vocabulary and width
    mixing, last = 2 * 3 * 5, 1 * 3
    assert legal == (narrow + wide) * (mixing + last)
    assert len(heard) == 8


@pytest.mark.slow
def test_every_legal_combination_builds_and_runs() -> None:
    ids, view = torch.tensor([[1, 2, 3]]), View.packed(torch.zeros(1, 3, dtype=torch.int64))
    for design in grid():
        if objections(design):
            continue
        config = build(DrafterSpec(**design))
        drafter = Drafter(config, torch.arange(config.draft_vocab_size)).requires_grad_(False)
        aux = torch.randn(1, 3, len(config.aux_layers), HIDDEN)
        step = drafter.step(ids, drafter.fuse(aux), view)
        assert step.h_BTH.shape == step.normed_BTH.shape == (1, 3, config.hidden_size)
        assert drafter.logits(step.normed_BTH).shape == (1, 3, config.draft_vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"hidden_size": -1}, "hidden_size must be at least 1, not -1"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        (
            {"aux_layers": ()},
            r"^aux_layers \[\] taps nothing: name at least one boundary of the target, or set def",
        ),
        (
            {"aux_layers": (4, 2)},
            r"^aux_layers \[4, 2\] must be strictly increasing, .*: set \[2, 4\]$",
        ),
        (
            {"aux_layers": (2, 2, 3)},
            r"^aux_layers \[2, 2, 3\] must be strictly increasing, .*: set \[2, 3\]$",
        ),
        (
            {"aux_layers": (-1, 2)},
            r"^aux_layers \[-1, 2\]: the target has boundaries 0 to 7; leave out what lies",
        ),
        (
            {"aux_layers": (2, 8)},
            r"^aux_layers \[2, 8\]: the target has boundaries 0 to 7; leave out what lies",
        ),
        (
            {"attention_window": 15},
            "^attention_window must be full or at least 16, not 15: a node always sees its own",
        ),
        ({"attention_window": 0}, "must be full or at least 16, not 0"),
        ({"attention_window": True}, "must be full or at least 16, not True"),
        ({"attention_window": "all"}, "must be full or at least 16, not all"),
        ({"attention_window": 32.5}, r"must be full or at least 16, not 32\.5"),
        (
            {"attention_sinks": 1},
            "^attention_sinks 1 keep tokens beyond a window, and attention_window is full",
        ),
        (
            {"attention_window": 16, "attention_sinks": True},
            "attention_sinks must be a whole number, not True",
        ),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be at least 1, not 0"),
        ({"draft_vocab_size": 62}, r"draft_vocab_size 62 must lie in 1\.\.61"),
        ({"rope": {"rope_type": "spiral", "rope_theta": 1e4}}, "unknown rope_type 'spiral'"),
        ({"num_layers": True}, "num_layers must be a whole number, not True"),
        ({"hidden_size": 32.0}, r"hidden_size must be a whole number, not 32\.0"),
        ({"num_layers": 1025}, "num_layers must be at most 1,024"),
        ({"vocab_size": 10**9}, "vocab_size must be at most 4,194,304"),
        ({"aux_layers": (2, 3.0)}, r"aux_layers must be whole numbers, not 3\.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be at least 0, not nan"),
        (
            {"rope": {"rope_type": "linear", "rope_theta": 1e4}},
            "not complete for rope_type 'linear'",
        ),
        (
            {"fusion": LastLayer(), "norms": Norms()},
            r"fusion LastLayer taps boundary 7 alone, not \[2, 3, 4\]",
        ),
        (
            {"fusion": LastLayer(), "norms": Norms(), "aux_layers": (6,)},
            r"taps boundary 7 alone, not \[6\]",
        ),
    ],
    ids=str,
)
def test_dimensions_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(build(DrafterSpec()), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "^num_layers must be at least 1, not 0$"),
        ({"hidden_size": 0}, "^hidden_size must be target or at least 1, not 0$"),
        ({"intermediate_size": -4}, "^intermediate_size must be target or at least 1, not -4$"),
        ({"draft_vocab_size": 0}, "^draft_vocab_size must be all or at least 1, not 0$"),
        ({"aux_layers": []}, r"^aux_layers \[\] taps nothing"),
        ({"aux_layers": [3, 3]}, r"^aux_layers \[3, 3\] must be strictly increasing"),
        (
            {"aux_layers": [-1]},
            r"^aux_layers \[-1\]: the target has boundaries 0 upwards; leave out",
        ),
        ({"attention_window": 8}, "^attention_window must be full or at least 16, not 8"),
        (
            {"attention_window": 16, "attention_sinks": -1},
            "^attention_sinks must be at least 0, not -1",
        ),
        (
            {"attention_sinks": 4},
            "^attention_sinks 4 keep tokens beyond a window, and attention_window is full",
        ),
    ],
    ids=str,
)
def test_what_no_target_makes_legal_is_refused_before_one_is_loaded(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterSpec(**changes)


def bare(**sites: Any) -> Norms:
    return Norms(**{"embed": False, "hidden": False, "output": False, **sites})


@pytest.mark.parametrize(
    ("design", "message"),
    [
        (
            lambda: DrafterSpec(norms=Norms(aux="both")),
            "norms.aux must be none, each, concat or a Norm, not 'both'",
        ),  # type: ignore[arg-type]
        (
            lambda: DrafterSpec(LastLayer(), norms=Norms(aux="each")),
            "use fusion Concat or ScalarMix, or norms.aux=",
        ),
        (
            lambda: DrafterSpec(LastLayer(), norms=Norms(aux="concat")),
            "norms.aux=concat normalizes states before they",
        ),
        (
            lambda: DrafterSpec(norms=bare(), recurrence=PostNorm()),
            "recurrence PostNorm needs norms.output=true",
        ),
        (
            lambda: DrafterSpec(head="target", draft_vocab_size=40),
            "head=target covers the whole vocabulary: set --model.drafter.draft",
        ),
        (
            lambda: DrafterSpec(head="target", draft_vocab_size="all", hidden_size=24),
            "head=target reads states of width 32, the drafter has 24",
        ),
        (
            lambda: DrafterSpec(LastLayer(), norms=Norms(), hidden_size=24),
            "fusion LastLayer keeps the target's width 32; hidden_size 24 needs a projection: use fusion Concat",
        ),
        (
            lambda: DrafterSpec(entry=Wide(), norms=Norms(input=True)),
            "norms.input belongs to entry Narrow",
        ),
        (
            lambda: DrafterSpec(norms=Norms(hidden=False, residual="normed")),
            "residual=normed needs norms.hidden=true",
        ),
        (
            lambda: DrafterSpec(entry=Narrow(), norms=Norms(residual="normed")),
            "residual=normed belongs to entry Wide",
        ),
    ],
    ids=[
        "1",
        "2each",
        "2concat",
        "4",
        "6vocabulary",
        "6width",
        "7",
        "8",
        "residual",
        "residual narrow",
    ],
)
def test_each_rule_has_one_clear_error(design: Callable[[], DrafterSpec], message: str) -> None:
    """Numbered as the validity rules are; 3, 5 and 9 are training's, 10 is the exporters'.

    Both aux norms at once (1), and both entries at once (8), cannot even be written: each axis is one choice.
    """
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build(design())
    assert "\n" not in str(caught.value)


def test_the_defaults_are_eagle_3_1() -> None:
    config = build(DrafterSpec())
    assert config.fusion == Concat() and config.entry == Wide() and config.recurrence == PostNorm()
    assert config.norms == Norms(
        aux="each", embed=True, hidden=True, input=False, residual="raw", output=True
    )
    assert config.aux_layers == (2, 3, 4) and config.head == "own" and not config.fusion.final_norm
    assert config.attention_window == "full" and not config.norms.query_key
    assert build(presets()["eagle1"]).fusion.final_norm


HF: dict[str, tuple[Any, dict[str, Any]]] = {
    "head_dim": (
        Qwen3Config(
            hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128
        ),
        {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"head_dim": 128, "target_hidden_size": 2560, "rms_norm_eps": 1e-6},
    ),
    "no head_dim": (
        Phi3Config(hidden_size=96, num_attention_heads=4, rms_norm_eps=1e-5),
        {"head_dim": 24, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    "nested rope": (
        Gemma3TextConfig(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=32, num_hidden_layers=7
        ),
        {"head_dim": 32, "num_key_value_heads": 1, "rope": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "older": (
        SimpleNamespace(
            hidden_size=64, intermediate_size=128, num_attention_heads=8, max_position_embeddings=256,
            rope_theta=10000, rope_scaling=None,
        ),
        {"head_dim": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 256},
    ),
    "none": (
        SimpleNamespace(
            hidden_size=64, intermediate_size=128, num_attention_heads=8, max_position_embeddings=256, rope_theta=10000,
            num_key_value_heads=None, head_dim=None,
        ),
        {"head_dim": 8, "num_key_value_heads": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_dimensions_come_from_the_target(name: str) -> None:
    hf_config, expected = HF[name]
    config = build(DrafterSpec(), hf_config, vocab_size=1000, layers=20)
    assert {key: getattr(config, key) for key in expected} == expected
    assert (config.vocab_size, config.draft_vocab_size, config.num_target_layers) == (
        1000,
        1000,
        20,
    )
    assert config.aux_layers == (2, 10, 17)
    own = build(
        DrafterSpec(hidden_size=48, intermediate_size=56, num_layers=2), hf_config, 1000, 20
    )
    assert (own.hidden_size, own.intermediate_size, own.num_layers) == (48, 56, 2)
    assert (own.head_dim, own.target_hidden_size) == (config.head_dim, hf_config.hidden_size)


@pytest.mark.parametrize("layers", [1, 4, 5])
def test_a_shallow_target_asks_for_boundaries(layers: int) -> None:
    with pytest.raises(
        ValueError, match=f"a target of {layers} layers? is too shallow.*set aux_layers"
    ):
        build(DrafterSpec(), layers=layers)
    assert build(DrafterSpec(aux_layers=[layers]), layers=layers).aux_layers == (layers,)
    assert build(presets()["eagle1"], layers=layers).aux_layers == (layers,)


def round_trip(config: DrafterConfig) -> DrafterConfig:
    return DrafterConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False)))


def test_json_loses_nothing() -> None:
    for design in grid():
        if not objections(design):
            config = build(DrafterSpec(**design))
            assert round_trip(config) == config
    for spec in variants().values():
        assert round_trip(build(spec)) == build(spec)
    for hf_config, _ in HF.values():
        config = build(DrafterSpec(), hf_config, layers=20)
        assert round_trip(config) == config
    long = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=128,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3]}
        | {"long_factor": [1.0, 2.0, 3.0, 1 / 3], "original_max_position_embeddings": 64, "factor": 2.0},
    )  # fmt: skip
    assert round_trip(build(DrafterSpec(), long)) == build(DrafterSpec(), long)


def test_an_unknown_key_is_refused() -> None:
    data = build(DrafterSpec()).to_json() | {"norm_output": True, "fc_norm": True}
    with pytest.raises(ValueError, match=r"^here: .*unknown keys: fc_norm, norm_output$"):
        DrafterConfig.from_json(data, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "^here: "),
        ({"aux_layers": None}, "^here: "),
        ({"norms": None}, "^here: "),
        ({"norms": {"aux": "none", "fc": True}}, "^here: .*fc"),
        ({"rope": None}, "^here: "),
        ({"aux_layers": [3, 2]}, "strictly increasing"),
        ({"entry": 3}, "^here: entry: expected a part's name, or class_path and init_args"),
        ({"recurrence": "Wide"}, "^here: recurrence: .*Recurr"),
        ({"recurrence": {"class_path": "PostNorm", "init_args": {"x": 1}}}, "takes"),
    ],
    ids=str,
)
def test_illegal_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json(build(DrafterSpec()).to_json() | changes, "here")


def test_a_target_without_rotary_positions_wants_a_base_for_the_drafters() -> None:
    """Nemotron-H has none; a number replaces those of any target."""
    none = llama_config()
    none.rope_parameters = None
    with pytest.raises(
        ValueError, match=r"no rope_theta.*give --model\.drafter\.rope_theta 10000, or another"
    ):
        build(DrafterSpec(), none)
    for config in (none, llama_config()):
        built = build(DrafterSpec(rope_theta=5e4), config)
        assert built.rope == {"rope_type": "default", "rope_theta": 5e4}
        assert DrafterConfig.from_json(built.to_json()) == built
    with pytest.raises(ValueError, match="rope_theta must be a number above 0"):
        build(DrafterSpec(rope_theta=-1.0), none)
