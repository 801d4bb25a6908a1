"""A GGUF file as a target: as transformers dequantizes it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from packaging.version import Version
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.drafter import load_drafter
from specdec.export import NotServable, export_drafter
from specdec.target import Target, TargetSource
from tests.conftest import TEXT
from tests.tiny import llama_config

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

WIDTH, LAYERS, HEADS, GROUPS = 64, 4, 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
QUANTIZED = gguf.GGMLQuantizationType.Q8_0


def interleaved(weight: NDArray, heads: int) -> NDArray:
    """Rotary halves as llama.cpp wants them."""
    return (
        weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    )


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, target_directory: Path
) -> tuple[LlamaForCausalLM, Path]:
    """A random Llama whose matrices are what their 8 bits say, and its file, with the tiny tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(target_directory)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "head_dim": WIDTH // HEADS,
    }
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    model = LlamaForCausalLM(llama_config(vocab_size=len(tokenizer), **sizes, **heads)).eval()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(model.config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(len(tokenizer))
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__))
    writer.add_token_types([3 if n < 2 else 1 for n in range(len(tokenizer))])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, parameter in model.named_parameters():
        inner = name.removesuffix(".weight")
        if inner in OUTER:
            theirs = OUTER[inner]
        else:
            _, _, layer, part = inner.split(".", 3)
            theirs = f"blk.{layer}.{NAMES[part]}"
        value = parameter.detach().numpy()
        if value.ndim == 1:
            writer.add_tensor(f"{theirs}.weight", value)
            continue
        quantized = gguf.quants.quantize(value, QUANTIZED)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(quantized, QUANTIZED)))
        if theirs.endswith(("attn_q", "attn_k")):
            rotated = interleaved(
                parameter.detach().numpy(), HEADS if theirs.endswith("q") else GROUPS
            )
            quantized = gguf.quants.quantize(np.ascontiguousarray(rotated), QUANTIZED)
        writer.add_tensor(f"{theirs}.weight", quantized, raw_dtype=QUANTIZED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def test_it_is_the_model_that_was_quantized(
    made: tuple[LlamaForCausalLM, Path], target_directory: Path
) -> None:
    """By the file or by its directory, in each dtype; it proves itself, and the tokenizer is the file's."""
    model, path = made
    target = Target.load(path)
    target.prove()
    text = TEXT[:80]
    ids = target.tokenizer(text, add_special_tokens=False).input_ids
    assert (
        ids
        == AutoTokenizer.from_pretrained(target_directory)(text, add_special_tokens=False).input_ids
    )
    ids_1T = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(
            target.model(ids_1T).logits, model(ids_1T).logits, rtol=1e-4, atol=1e-5
        )
    halved = Target.load(path.parent, dtype="bfloat16")
    assert halved.dtype == torch.bfloat16
    assert halved.identity["fingerprint"] == target.identity["fingerprint"]
    # transformers before 5.19 reads the token that begins a text as one that ends it
    wrong = {0} if Version(transformers.__version__) < Version("5.19") else set[int]()
    assert target.eos_token_ids == {1} | wrong


def test_saved_as_a_directory_it_is_the_same_target(
    made: tuple[LlamaForCausalLM, Path], tmp_path: Path
) -> None:
    target = Target.load(made[1])
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    assert Target.load(tmp_path).identity["fingerprint"] == target.identity["fingerprint"]


def test_no_engine_serves_it(
    made: tuple[LlamaForCausalLM, Path],
    target_directory: Path,
    drafter_directory: Path,
    tmp_path: Path,
) -> None:
    drafter, target = load_drafter(drafter_directory), Target.load(target_directory)
    with pytest.raises(
        NotServable, match=r"tiny\.gguf: engines run a GGUF file's quantized weights"
    ):
        export_drafter(drafter, target, tmp_path / "out", served=TargetSource(str(made[1])))


def test_what_is_wrong_is_one_line(
    made: tuple[LlamaForCausalLM, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path) -> str:
        with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
            Target.load(source)
        return str(error.value)

    whole = made[1].read_bytes()
    assert "no such file" in refused(tmp_path / "none.gguf")
    for size in (0, 30, len(whole) // 2, len(whole) - 64):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut.gguf" in refused(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(whole)
    assert "has 2 GGUF files: give one of them, cut.gguf for example" in refused(tmp_path)
    layers = b"llama.block_count\x04\x00\x00\x00"
    assert whole.count(layers) == 1
    (tmp_path / "deep.gguf").write_bytes(whole.replace(layers + b"\x04", layers + b"\xf0"))
    assert "config.json says 240 layers, the files hold 39 tensors" in refused(
        tmp_path / "deep.gguf"
    )
    monkeypatch.setattr("specdec.target.files.is_gguf_available", lambda: False)
    assert refused(made[1]).endswith(
        "a GGUF file is read by two more packages: pip install gguf accelerate"
    )
