"""The GGUF file of an EAGLE-3 drafter: what is in it, and that llama.cpp's own converter writes the same."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity_gguf import halves_apart
from specdec.drafter import Drafter, Norms
from specdec.export import FORMATS, NotServable, export_drafter
from specdec.export.gguf import (
    CONTROL,
    FILE,
    NORMAL,
    UNUSED,
    gguf_fields,
    neighbors_together,
    read_gguf,
    token_fields,
    write_gguf,
)
from specdec.export.known_formats import FORMATS as KNOWN
from specdec.export.subject import Subject
from specdec.target import Target, TargetSource
from tests.export.made import made_drafter
from tests.tiny import BLOCKS, tiny_target, variants

SOURCE = "SPECDEC_LLAMA_CPP"


def eagle3(target: Target, **changes: object) -> Drafter:
    return loud_drafter(target, replace(loud_spec(target, "eagle3"), **changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def test_queries_and_keys_are_reordered_and_back() -> None:
    weight = torch.arange(3 * 12 * 5.0).reshape(36, 5)
    together = neighbors_together(weight, heads=3, rotated=8)
    # channel 1 of a head is what was half a rotated width away, channel 9 is not rotated
    assert together[1].equal(weight[4]) and together[9].equal(weight[9])
    assert halves_apart(together, head_dim=12, rotated=8).equal(weight)


def test_the_file_holds_the_drafter_to_the_last_bit(target: Target, tmp_path: Path) -> None:
    drafter = eagle3(target).to(torch.bfloat16)
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    fields, tensors = read_gguf(tmp_path / "served" / FILE)
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == list(drafter.config.aux_layers)
    assert tensors["fc.weight"].equal(drafter.state_dict()["fusion.fc.weight"])
    assert tensors["output_norm.weight"].dtype == torch.float32
    assert tensors["d2t"].equal(drafter.vocab.target_ids_D)
    assert "token_embd.weight" not in tensors
    assert (
        f"--spec-draft-model {tmp_path / 'served' / FILE} --spec-type draft-eagle3"
        in exported.command
    )


@pytest.mark.parametrize("name", ["fc.weight", "blk.0.attn_q.weight", "d2t", "output_norm.weight"])
def test_a_flipped_bit_is_found_when_the_file_is_read_back(
    target: Target, name: str, tmp_path: Path
) -> None:
    drafter = eagle3(target)
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    path = exported.directory / FILE
    fields, tensors = read_gguf(path)
    changed = tensors[name].flatten()
    changed.view(torch.uint8)[0] ^= 1
    path.unlink()
    ours = {
        key: value for key, value in fields.items() if key.startswith(("eagle3.", "tokenizer."))
    }
    write_gguf(path, "eagle3", ours, tensors)
    layout = FORMATS["gguf"]
    subject = Subject(drafter.config)
    with pytest.raises(ValueError, match=f"{name} read back otherwise than written"):
        layout.verify(exported.directory, layout.tensors(drafter, subject), subject)


def test_a_changed_field_is_found_when_the_file_is_read_back(
    target: Target, tmp_path: Path
) -> None:
    drafter = eagle3(target)
    subject = Subject(replace(drafter.config, rms_norm_eps=drafter.config.rms_norm_eps * 2))
    exported = export_drafter(drafter, target, tmp_path / "served", "gguf")
    layout = FORMATS["gguf"]
    with pytest.raises(ValueError, match=r"layer_norm_rms_epsilon read back otherwise"):
        layout.verify(exported.directory, layout.tensors(drafter, subject), subject)


def test_weights_in_float64_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(
        NotServable, match="cannot multiply float64 weights: save the drafter in float32"
    ):
        export_drafter(eagle3(target), target, tmp_path / "served", "gguf")
    assert not (tmp_path / "served").exists()


def test_a_scaled_rope_is_written_as_factors(target: Target) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    config = replace(eagle3(target).config, rope=rope)
    fields = gguf_fields(config)
    assert (
        fields["eagle3.rope.freq_base"] == 10000.0
        and "eagle3.rope.scaling.attn_factor" not in fields
    )
    yarn = {
        **rope,
        "rope_type": "yarn",
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    }
    assert gguf_fields(replace(config, rope=yarn))["eagle3.rope.scaling.attn_factor"] == 1.5


def test_every_format_is_known_by_its_name() -> None:
    assert [*KNOWN] == ["vllm", "speculators", "sglang", "gguf"]


def save_tokenizer(folder: Path, size: int) -> None:
    """A byte-pair tokenizer with bytes to fall back on, which llama.cpp's converter knows by its kind."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    vocabulary = {token: number for number, token in enumerate(tokens[:size])}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)


def test_the_file_names_the_targets_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 262)
    target = tiny_target(dtype=torch.float32, vocab_size=264)
    target.model.save_pretrained(tmp_path)
    fields = token_fields(TargetSource(str(tmp_path)), 264)
    assert fields["tokenizer.ggml.tokens"][258:] == [
        "<0xFF>",
        "a",
        "b",
        "ab",
        "[PAD262]",
        "[PAD263]",
    ]
    assert fields["tokenizer.ggml.token_type"][1:3] == [CONTROL, CONTROL]
    assert fields["tokenizer.ggml.token_type"][-3:] == [NORMAL, UNUSED, UNUSED]
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["tokenizer.ggml.eos_token_id"] == 2


DESIGNS: dict[str, dict[str, object]] = {
    "both switches": {"norms": Norms(aux="concat", residual="normed")},
    "every token, half as wide": {"draft_vocab_size": "all", "hidden_size": 16},
    "dflash": {},
    "dspark": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_llama_cpps_own_converter_writes_the_same(design: str, tmp_path: Path) -> None:
    """The converter reads the export for vLLM; it writes more about the file, and names its own vocabulary."""
    source = os.environ.get(SOURCE)
    if not source:
        pytest.skip(f"{SOURCE} names no source of llama.cpp: .ci/llama-source makes one")
    folder = tmp_path / "target"
    target = tiny_target(dtype=torch.float32, vocab_size=264)
    target.model.save_pretrained(folder)
    save_tokenizer(folder, 262)
    if design in BLOCKS:
        drafter = made_drafter(variants()[design], target)
    else:
        drafter = eagle3(target, **DESIGNS[design])
    published = export_drafter(drafter, target, tmp_path / "vllm", served=TargetSource(str(folder)))
    config_file = published.directory / "config.json"
    config = json.loads(config_file.read_text())
    theirs = tmp_path / "theirs.gguf"
    converter = str(Path(source) / "convert_hf_to_gguf.py")
    files = [str(published.directory), "--outfile", str(theirs), "--target-model-dir", str(folder)]
    converted = subprocess.run(
        [sys.executable, converter, *files, "--outtype", "f32"],
        # the script imports what lies in its folder, which a user's PYTHONSAFEPATH forbids
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert converted.returncode == 0, converted.stderr[-3000:]
    exported = export_drafter(drafter, target, tmp_path / "gguf", "gguf")
    fields, tensors = read_gguf(exported.directory / FILE)
    their_fields, their_tensors = read_gguf(theirs)
    assert config["num_hidden_layers"] == drafter.config.num_layers
    assert {**tensors}.keys() == {**their_tensors}.keys()
    for name, value in tensors.items():
        assert value.equal(their_tensors[name]), name
    kind = "dflash." if design in BLOCKS else "eagle3."
    read = (kind, "tokenizer.ggml.mask")
    ours = {name: value for name, value in fields.items() if name.startswith(read)}
    missing = {name for name in their_fields if name.startswith(read)} - set(ours)
    assert not missing
    # of block drafters the converter leaves these at llama.cpp's defaults
    default = ("vocab_size", "rope.dimension_count")
    ours = {
        name: value
        for name, value in ours.items()
        if name in their_fields or name.removeprefix(kind) not in default or kind == "eagle3."
    }
    assert {name: value for name, value in ours.items() if their_fields.get(name) != value} == {}
