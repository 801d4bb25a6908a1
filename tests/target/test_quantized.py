"""A body quantized by compressed-tensors as a target: the model that its packed weights stand for."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.target import Target

pytest.importorskip("compressed_tensors")
quantization = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")

IDS_1T = torch.arange(40)[None] % 251
LARGEST = {8: 127, 4: 7}


def quantize(model: PreTrainedModel, bits: int, out: Path) -> None:
    """Round every matrix of the layers to whole numbers of so many bits a row, in place, and save them packed."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    scheme = quantization.QuantizationConfig(
        config_groups={"all": {"weights": weights, "targets": ["Linear"]}},
        ignore=["lm_head"],
        format="pack-quantized",
    )
    quantization.apply_quantization_config(model, scheme)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            with torch.no_grad():
                module.weight_scale.copy_(module.weight.abs().amax(1, keepdim=True) / LARGEST[bits])
                whole = (module.weight / module.weight_scale).round()
                module.weight.copy_(
                    whole.clamp(-LARGEST[bits] - 1, LARGEST[bits]) * module.weight_scale
                )
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


def rounded(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The same by plain tensors."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            scale = parameter.abs().amax(1, keepdim=True) / LARGEST[bits]
            with torch.no_grad():
                parameter.copy_((parameter / scale).round() * scale)
    return model.eval()


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_the_model_that_its_weights_stand_for(
    target_directory: Path, tmp_path: Path, bits: int
) -> None:
    """It proves itself, is one target however often it has run, and another than the one it was made of."""
    out = Path(shutil.copytree(target_directory, tmp_path / "quantized"))
    (out / "model.safetensors").unlink()
    quantize(AutoModelForCausalLM.from_pretrained(target_directory), bits, out)
    target, plain = Target.load(out), Target.load(target_directory)
    first = target.identity["fingerprint"]
    own = rounded(plain.model, bits)(IDS_1T).logits
    torch.testing.assert_close(target.model(IDS_1T).logits, own, rtol=1e-4, atol=1e-5)
    target.prove()
    again = Target.load(out)
    again.model(IDS_1T)
    assert (
        again.identity["fingerprint"]
        == first
        != Target.load(target_directory).identity["fingerprint"]
    )
