"""A real llama.cpp serves exports: what it proposes is what the drafter says, or the export is refused."""

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdec.decoding import AdaptiveChain, SpeculativeDecoder
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity_files import Files, read_files
from specdec.diagnostics.parity_proposals import ProposalComparison, compare_proposals
from specdec.diagnostics.parity_settings import Misread, read_settings
from specdec.drafter import Drafter, MarkovBlock, MaskBlock, Norms, PostNorm
from specdec.drafting.mode import Frontier
from specdec.engines.client import Endpoint
from specdec.engines.llama import INSIDE, KEY, LlamaLaunch, complete, find_llama_server
from specdec.engines.llama_proposals import ask_llama_cpp
from specdec.export import NotServable, export_drafter
from specdec.export.formats import DrafterCheckpoint
from specdec.export.gguf import FILE, neighbors_together, read_gguf, write_gguf
from specdec.export.tensors import Weights
from specdec.target import Target, TargetSource
from tests.engines.gguf_target import write_target_gguf

pytest.importorskip("xllamacpp")

SHARE = 1e-4  # of a distribution's range, that rounding may make of one log-probability in float32
TOKENS = 32
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def llama(**overrides: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **overrides}))


def qwen3(**overrides: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "tie_word_embeddings": False, **overrides}))


TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama with a tied head": lambda: llama(tie_word_embeddings=True),
    "qwen3": qwen3,
}


@pytest.fixture(scope="module", params=TARGETS)
def served_target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Target, Path]:
    return made_target(TARGETS[request.param](), tmp_path_factory.mktemp("target"))


def made_target(model: PreTrainedModel, folder: Path) -> tuple[Target, Path]:
    """A target whose greedy choices are no ties, and its file."""
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    path = folder / "target.gguf"
    return Target(model), write_target_gguf(model.float(), path)


def proposals(
    target: Target,
    file: Path,
    drafter: Drafter,
    checkpoint: DrafterCheckpoint,
    files: Files | None = None,
) -> ProposalComparison:
    """What the engine proposes with an export, beside what a drafter says; ``files`` to try faults on it."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(5, 300, (3, 12), generator=generator).tolist()
    launch = LlamaLaunch(find_llama_server(), TargetSource(), file, extra=("--threads", "1"))
    _, answers = ask_llama_cpp(launch, checkpoint, prompts, TOKENS, exact=True)
    return compare_proposals(target, drafter, answers, SHARE, files, checkpoint.method)


def made_drafter(target: Target, changes: dict[str, Any]) -> Drafter:
    """A drafter whose proposals depend on everything; a rope of its own may be among the changes."""
    changes = dict(changes)
    rope = changes.pop("rope", None)
    trained_embedding = changes.pop("trained_embedding", False)
    drafter = loud_drafter(target, replace(loud_spec(target, "eagle3"), **changes))
    if rope is not None:
        state = drafter.state_dict()
        drafter = Drafter(replace(drafter.config, rope=rope), drafter.vocab.target_ids_D)
        drafter.load_state_dict(state)
    if trained_embedding:
        with torch.no_grad():
            drafter.embed_tokens.weight.mul_(1 + torch.rand(300, 1))
    return drafter


THETA = 10000.0
SERVED: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "norm_before_fc": {"norms": Norms(aux="concat")},
    "norm_before_residual": {"norms": Norms(residual="normed")},
    "every token": {"draft_vocab_size": "all"},
    "boundaries 0, 3, 6": {"aux_layers": [0, 3, 6]},
    "half as wide": {"hidden_size": 32},
    "other heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48},
    "a trained embedding": {"trained_embedding": True},
    "linear": {"rope": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}},
    "llama3": {
        "rope": {
            "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope": {
            "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "yarn with an attention factor": {
        "rope": {
            "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64,
            "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0,
        }
    },
    "half of each head rotated": {
        "rope": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("design", SERVED)
def test_llama_cpp_proposes_what_the_drafter_says(
    served_target: tuple[Target, Path], design: str, tmp_path: Path
) -> None:
    target, file = served_target
    drafter = made_drafter(target, SERVED[design])
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    files = read_files(exported.directory) if design == "eagle3" else None
    comparison = proposals(target, file, drafter, exported.checkpoint, files)
    assert comparison.fault is None, comparison
    assert comparison.proposals > 200 and comparison.near_ties == 0
    if files is not None:
        assert comparison.too_weak is None and not comparison.unseen, comparison


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eagle3_1": ({"norms": Norms(aux="each"), "recurrence": PostNorm()}, "no norm on each state.*norm_output"),
    "norm_output": ({"recurrence": PostNorm()}, "it never reads it, and feeds the raw state back"),
    "fc_norm": ({"norms": Norms(aux="each")}, "no norm on each state"),
    "two layers": ({"num_layers": 2}, "it has one"),
    "two boundaries": ({"aux_layers": [2, 5]}, "it has three"),
    "the last boundary": ({"aux_layers": [1, 3, 7]}, "hands out nothing after the last layer"),
    "a window": ({"attention_window": 64}, "its drafters see the whole text"),
    "norms on queries and keys": ({"norms": Norms(query_key=True)}, "no norms on queries and keys"),
    "biases": ({"attention_bias": True}, "its layers have no biases"),
    "dynamic": (
        {"rope": {"rope_type": "dynamic", "rope_theta": THETA, "factor": 2.0}},
        "its frequencies are not known to be ours",
    ),
}  # fmt: skip


@pytest.mark.parametrize("design", REFUSED)
def test_what_llama_cpp_ignores_or_lacks_is_refused(design: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[design]
    target = Target(llama().float())
    with pytest.raises(
        NotServable, match=rf"(?s)llama\.cpp.* cannot serve this drafter: .*{reason}"
    ):
        export_drafter(made_drafter(target, changes), target, tmp_path / "served", "gguf")
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("preset", ["eagle1", "peagle"])
def test_other_ways_of_drafting_are_refused(preset: str, tmp_path: Path) -> None:
    target = Target(llama().float())
    drafter = loud_drafter(target, loud_spec(target, preset))
    with pytest.raises(NotServable, match=r"llama\.cpp.* cannot serve this drafter"):
        export_drafter(drafter, target, tmp_path / "served", "gguf")


@pytest.mark.parametrize(
    "model", [Qwen2ForCausalLM(Qwen2Config(**SIZES)), Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))]
)
def test_a_target_whose_states_llama_cpp_does_not_hand_out_is_refused(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    target = Target(model.float())
    reason = f"does not hand out the layers' inputs of {type(model).__name__}"
    with pytest.raises(NotServable, match=reason):
        export_drafter(made_drafter(target, {}), target, tmp_path / "served", "gguf")


Fields = dict[str, Any]
Fault = Callable[[Fields, Weights], object]


def _one_layer_earlier(fields: Fields, tensors: Weights) -> None:
    first, *others = fields["eagle3.target_layers"]
    fields["eagle3.target_layers"] = [first - 1, *others]


def _changed(name: str, change: Callable[[Any], Any]) -> Fault:
    return lambda fields, tensors: fields.update({name: change(fields[name])})


def _turned(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda fields, tensors: tensors.update({name: change(tensors[name]).contiguous()})


FAULTS: dict[str, Fault] = {
    "the rope's base": _changed("eagle3.rope.freq_base", lambda base: 10 * base),
    "a boundary": _one_layer_earlier,
    "the residual path": _changed("eagle3.norm_before_residual", lambda on: not on),
    "the norms' epsilon": _changed(
        "eagle3.attention.layer_norm_rms_epsilon", lambda eps: 1000 * eps
    ),
    "the order of queries": _turned("blk.0.attn_q.weight", lambda w: neighbors_together(w, 4, 32)),
    "the boundaries' order": _turned("fc.weight", lambda w: w.roll(64, 1)),
    "the draft vocabulary": _turned("d2t", lambda ids: (ids + 1) % 300),
    "a norm": _turned("blk.0.attn_norm_2.weight", torch.ones_like),
}


def plant(fault: Fault, path: Path, architecture: str) -> None:
    """Write a drafter's file again with a fault."""
    fields, tensors = read_gguf(path)
    prefixes = (f"{architecture}.", "tokenizer.")
    kept = {name: value for name, value in fields.items() if name.startswith(prefixes)}
    fault(kept, tensors)
    path.unlink()
    write_gguf(path, architecture, kept, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_file_is_found(fault: str, tmp_path: Path) -> None:
    target, file = made_target(llama(), tmp_path)
    drafter = made_drafter(target, {})
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    plant(FAULTS[fault], exported.directory / FILE, "eagle3")
    comparison = proposals(target, file, drafter, exported.checkpoint)
    assert comparison.fault is not None, comparison


BLOCK = {"num_layers": 2, "aux_layers": [1, 3, 5]}
REDUCED = {"head": "own", "draft_vocab_size": 200}
SERVED_BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {"recurrence": MaskBlock(masks=4)}),
    "dflash, 200 tokens": ("dflash", {"recurrence": MaskBlock(masks=4), **REDUCED}),
    "dspark": ("dspark", {"recurrence": MarkovBlock(masks=4, rank=16)}),
    "dspark, 200 tokens": ("dspark", {"recurrence": MarkovBlock(masks=4, rank=16), **REDUCED}),
    "dspark, no confidence": ("dspark", {"recurrence": MarkovBlock(-1, 4, 16, False)}),
}


def block_drafter(target: Target, name: str) -> Drafter:
    preset, changes = SERVED_BLOCKS[name]
    return loud_drafter(target, replace(loud_spec(target, preset), **BLOCK | changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED_BLOCKS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_llama_cpp_drafts_the_block_that_the_drafter_says(
    family: str, name: str, tmp_path: Path
) -> None:
    target, file = made_target(TARGETS[family](), tmp_path)
    drafter = block_drafter(target, name)
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    files = read_files(exported.directory) if family == "llama" else None
    comparison = proposals(target, file, drafter, exported.checkpoint, files)
    assert comparison.fault is None and comparison.near_ties == 0, comparison
    assert comparison.proposals > 300
    if files is not None:
        assert comparison.too_weak is None and not comparison.unseen, comparison


BLOCK_FAULTS: dict[str, Fault] = {
    "the token before a draft": _turned("markov_w1.weight", lambda w: w.roll(1, 0)),
    "the Markov head": _turned("markov_w2.weight", torch.zeros_like),
    "a boundary": lambda fields, tensors: fields.update({"dflash.target_layers": [1, 3, 6]}),
    "masks that see less": _changed("dflash.attention.causal", lambda on: not on),
    "the mask": _changed("tokenizer.ggml.mask_token_id", lambda token: token - 1),
    "the rope's base": _changed("dflash.rope.freq_base", lambda base: 10 * base),
    "a norm of keys": _turned("blk.1.attn_k_norm.weight", torch.ones_like),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_a_fault_planted_in_a_blocks_file_is_found(fault: str, tmp_path: Path) -> None:
    target, file = made_target(llama(), tmp_path)
    drafter = block_drafter(target, "dspark")
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    plant(BLOCK_FAULTS[fault], exported.directory / FILE, "dflash")
    if fault == "masks that see less":  # specdec's own reader refuses it
        with pytest.raises(Misread, match="see no later ones"):
            read_settings(read_files(exported.directory)[0], "dspark")
    comparison = proposals(target, file, drafter, exported.checkpoint)
    assert comparison.fault is not None, comparison


@pytest.mark.slow
def test_a_switch_that_llama_cpp_ignores_is_found(tmp_path: Path) -> None:
    """The reason for the refusal: with norm_output, the same weights would propose other tokens."""
    target, file = made_target(llama(), tmp_path)
    drafter = made_drafter(target, {})
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    trained = Drafter(replace(drafter.config, recurrence=PostNorm()), drafter.vocab.target_ids_D)
    trained.load_state_dict(drafter.state_dict())
    comparison = proposals(target, file, trained, exported.checkpoint)
    assert comparison.positions[0].different == 0
    assert comparison.different > 0


class AmongTen(AdaptiveChain):
    """Confidences are probabilities among the ten likeliest tokens, which is what llama.cpp draws from."""

    def grow(self, root_B, start, expand, vocab, children):  # type: ignore[no-untyped-def]
        def among_ten(frontier: Frontier) -> Frontier:
            logits_BKD = frontier.logits_BKD
            least_BK1 = logits_BKD.topk(10).values[..., -1:]
            outside_BKD = logits_BKD < least_BK1
            return frontier._replace(logits_BKD=logits_BKD.masked_fill(outside_BKD, -torch.inf))

        def level(*nodes: torch.Tensor) -> Frontier:
            return among_ten(expand(*nodes))

        return super().grow(root_B, among_ten(start), level, vocab, children)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_chains_end_below_the_probability_that_llama_cpp_is_given(
    kind: str, tmp_path: Path
) -> None:
    """It drafts as many tokens as our chains do, the last draft of each left out; no draft of these is accepted.

    DSpark's confidence is its head's, of EAGLE-3 the draft's probability among ten.
    """
    target, file = made_target(llama(), tmp_path)
    drafter = made_drafter(target, {}) if kind == "eagle3" else block_drafter(target, "dspark")
    checkpoint = export_drafter(drafter, target, tmp_path / "served", "gguf").checkpoint
    drafter = drafter.to(target.dtype)
    tokens = 24
    depth = checkpoint.drafts(None) if kind == "dspark" else 4
    counts = []
    for least in (0.0, 0.2, 0.6) if kind == "eagle3" else (0.0, 0.5, 0.7):
        launch = LlamaLaunch(
            find_llama_server(), TargetSource(), file, port=0, draft_tokens=depth,
            extra=("--threads", "1"), min_probability=least,
        )  # fmt: skip
        with launch.server(checkpoint, tmp_path / f"{least}.log", caching=False) as server:
            answer = complete(Endpoint(server.url), [5, 9, 17], tokens)
        shape = (AmongTen if kind == "eagle3" else AdaptiveChain)(depth, 0.0, least)
        made = SpeculativeDecoder(target, drafter, shape).generate([5, 9, 17], tokens, ())
        assert made.ids == answer["tokens"] and not any(made.accepted)
        # llama.cpp drafts no more than may still be said
        left = range(tokens - 2, -1, -1)
        counts.append(sum(min(pair) for pair in zip(made.drafted, left, strict=True)))
        assert answer["timings"].get("draft_n", 0) == counts[-1]
    assert counts[0] > counts[1] > counts[2] > 0


@pytest.mark.parametrize("keys", ["", "one", "one,two"])
def test_the_prebuilt_server_asks_for_the_keys_of_the_environment(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama-server does: without them anybody who reaches the port is answered."""
    monkeypatch.setenv(KEY, keys)
    spec = importlib.util.spec_from_file_location("inside_llama_server", INSIDE)
    assert spec is not None and spec.loader is not None
    inside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(inside)
    monkeypatch.setattr("sys.argv", ["server", "--model", "a.gguf"])
    options: Namespace = inside.parse_command_line()
    assert inside.parameters(options).api_keys == [key for key in keys.split(",") if key]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_misread(share: float, tmp_path: Path) -> None:
    target = Target(llama().float())
    exported = export_drafter(made_drafter(target, {}), target, tmp_path / "served", "gguf")
    path = exported.directory / FILE
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(Misread, match=r"not a GGUF file as llama\.cpp reads it"):
        read_files(exported.directory)
