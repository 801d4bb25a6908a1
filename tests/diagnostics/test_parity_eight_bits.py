"""``specdec parity`` of quantized exports: a sound one holds, and what is planted in one is found."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor

from specdec.cli import main
from specdec.diagnostics.parity_compare import compare_drafting
from specdec.diagnostics.parity_eight_bits import (
    ServedText,
    moved_by_last_bits,
    plain_files,
    rounded_drafter,
)
from specdec.diagnostics.parity_files import ServedDrafter, interpret, read_files
from specdec.diagnostics.parity_proposals import Rounding, compare_proposals
from specdec.diagnostics.parity_quantized import read_quantized, round_tokens
from specdec.diagnostics.parity_settings import Misread
from specdec.drafter import load_drafter
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.export import export_drafter, subject_of
from specdec.target import Target
from tests.diagnostics.parity_made import DEPTH, drafter, edit, holds, target, texts

F32 = torch.float32
NAMES = ("int8", "fp8")
PRESETS = {"int8": "INT8", "fp8": "FP8_DYNAMIC"}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DESIGNS = ("eagle1", "eagle3", "eagle3_1", "dflash")
Q = "midlayer.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Made once; a test that changes one copies it."""
    root = tmp_path_factory.mktemp("exports")
    made = {}
    for design in DESIGNS:
        for name in NAMES:
            made[design, name] = root / f"{design}-{name}"
            export_drafter(drafter(design, F32), target(F32), made[design, name], quantize=name)
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("design", DESIGNS)
def test_a_sound_export_holds(design: str, name: str, exports: dict[tuple[str, str], Path]) -> None:
    """Training, decoding and reference run on the file's numbers, which are not the saved drafter's."""
    directory, saved = exports[design, name], drafter(design, F32)
    subject = subject_of(saved, target(F32))
    found = rounded_drafter(directory, saved, target(F32), subject)
    assert found is not None and found.faults == []
    compared = compare_drafting(
        target(F32), found.drafter, texts(F32), DEPTH, directory, subject.method
    )
    assert holds(compared)
    assert not holds(
        compare_drafting(target(F32), saved, texts(F32), DEPTH, directory, subject.method)
    )


def test_an_export_without_quantization_is_left_alone(tmp_path: Path) -> None:
    saved = drafter("eagle3", F32)
    export_drafter(saved, target(F32), tmp_path / "plain")
    subject = subject_of(saved, target(F32))
    assert rounded_drafter(tmp_path / "plain", saved, target(F32), subject) is None
    raw, tensors = read_files(tmp_path / "plain")
    read, rounded = read_quantized(raw, tensors, 7)
    assert read == tensors and rounded == {}


def config(**changes: Any) -> Any:
    return lambda raw: raw["quantization_config"].update(changes)


def activations(raw: dict[str, Any]) -> None:
    raw["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] = False


def plain_fc(w: dict[str, Tensor]) -> None:
    w["fc.weight"] = w["fc.weight"].float() * w.pop("fc.weight_scale")


MISREAD = {
    "ignore names a quantized layer": (
        config(ignore=["lm_head", "re:.*o_proj$"]), None,
        "o_proj.weight is torch.int8, and by config.json the engine reads plain weights there",
    ),
    "ignore names the layer as the target numbers it": (
        config(ignore=["model.layers.7.mlp.gate_up_proj"]), None, "the engine reads plain weights there",
    ),
    "ignore lacks a plain layer": (
        None, plain_fc, "fc.weight is torch.float32: by config.json the engine reads torch.int8 there: name its layer",
    ),
    "ignore names the matrices and not the engine's layer": (
        config(ignore=[r"re:.*\.(q|k|v)_proj$"]),
        lambda w: [w.update({n: w[n].float() * w.pop(f"{n}_scale")})
                   for n in [n for n in w if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]],
        "by config.json the engine reads torch.int8 there",
    ),
    "no quantization_config": (
        lambda raw: raw.pop("quantization_config"), None, "the engine reads plain weights there",
    ),
    "another scheme of activations": (activations, None, "input_activations.dynamic is False, compared was True only"),
    "another format": (config(format="pack-quantized"), None, "format 'pack-quantized' does not go with"),
    "another method": (config(quant_method="gptq"), None, "only compressed-tensors' config_groups"),
    "a matrix's scale is missing": (None, lambda w: w.pop(f"{Q}_scale"), "q_proj.weight_scale, which the engine"),
    "scales in a row": (
        None, lambda w: w.update({f"{Q}_scale": w[f"{Q}_scale"].T}), r"_scale is \[1, 48\], the engine's is \[48, 1\]",
    ),
    "the head quantized too": (
        None, lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.int8)}),
        "lm_head.weight is torch.int8, and by config.json the engine reads plain",
    ),
    "a scale of a norm": (
        None, lambda w: w.update({"norm.weight_scale": torch.ones(1, 1)}), "the engine has no scale there and fails",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*MISREAD])
def test_what_the_engine_would_misread_is_told(
    fault: str, exports: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Its config and its matrices contradict each other, and each is what the drafter is rounded to."""
    of_config, of_tensors, message = MISREAD[fault]
    directory = Path(shutil.copytree(exports["eagle3", "int8"], tmp_path / "faulty"))
    edit(directory, of_config, of_tensors)
    raw, tensors = read_files(directory)
    with pytest.raises(Misread, match=message):
        read_quantized(raw, tensors, target(F32).num_layers)
    saved = drafter("eagle3", F32)
    found = rounded_drafter(directory, saved, target(F32), subject_of(saved, target(F32)))
    if found is not None:
        assert found.faults and found.drafter is saved


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_rounded_as_the_library_does(name: str) -> None:
    """The library's fake quantization, token by token, with vLLM's scale of int8: over 127, not half the range."""
    args: QuantizationArgs = preset_name_to_scheme(PRESETS[name], ["Linear"]).input_activations
    x = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0)) * 3
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1))
    ours = round_tokens(x, DTYPES[name])
    if name == "int8":
        assert torch.allclose(scale * 127.5, x.abs().amax(-1, keepdim=True))
        scale = scale * 127.5 / 127
    theirs = fake_quantize(x, scale, zero, args)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, x, atol=1e-2)
    assert round_tokens(torch.zeros(2, 4), DTYPES[name]).eq(0).all()


def answers_of(served: ServedDrafter, passes: int = 3) -> list[RecordedAnswer]:
    """An engine's, if it were this reference."""
    answers = []
    for text in texts(F32):
        places = list(range(text.prompt, text.prompt + passes))
        reader = ServedText(target(F32), served, text.ids, DEPTH)
        ids_T = torch.tensor(text.ids)
        given_AK = ids_T[torch.tensor(places)[:, None] + torch.arange(1, DEPTH + 1)]
        for k in range(DEPTH):  # each step reads the drafts before it
            given_AK[:, k] = reader.draft(places, given_AK).tokens_AK[:, k]
        recorded = [
            RecordedPass(place, text.ids[place], drafts)
            for place, drafts in zip(places, given_AK.tolist(), strict=True)
        ]
        answers.append(RecordedAnswer(text.ids[: text.prompt], text.ids[text.prompt :], recorded))
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_proposals_are_compared_with_rounded_activations(
    name: str, exports: dict[tuple[str, str], Path]
) -> None:
    of = target(F32)
    files = read_files(exports["eagle3_1", name])
    served = interpret(files, "eagle3", of.embedding_weight(), of.head_weight(), of.num_layers)
    assert set(served.rounded.values()) == {DTYPES[name]} and len(served.rounded) == 8
    saved = drafter("eagle3_1", F32)
    found = compare_proposals(of, saved, answers_of(served), 1e-4, files)
    assert found.near_ties == found.different == found.apart == 0
    assert found.allowed >= 2e-4 and found.probes and found.rounding is not None
    texts_of = [
        (torch.tensor(text.ids), torch.tensor([text.prompt]), torch.tensor([text.ids[-DEPTH:]]))
        for text in texts(F32)
    ]
    assert 0 < moved_by_last_bits(of, served, texts_of).share < 0.5
    sound = Rounding(engine=0, reference=found.rounding.reference)
    assert sound == found.rounding
    # an engine that exchanges two tokens for ever is none of this drafter
    other = served._replace(target_ids_D=served.target_ids_D.roll(1))
    exchanged = compare_proposals(of, saved, answers_of(other), 1e-4, files)
    assert exchanged.different > 0 and "VNNI" not in str(exchanged.fault)
    # where the engine's own products are wrong, the report says that too
    overflowing = replace(exchanged, int8_error=0.1)
    assert "wrong by up to 10%" in str(overflowing.fault) and "VNNI" in str(overflowing.fault)
    assert replace(found, int8_error=0.1).fault is None


def test_files_without_quantization_are_the_same_numbers(
    exports: dict[tuple[str, str], Path],
) -> None:
    raw, plain = plain_files(read_files(exports["eagle3", "int8"]), 7)
    _, stored = read_files(exports["eagle3", "int8"])
    assert "quantization_config" not in raw and f"{Q}_scale" not in plain
    assert torch.equal(plain[Q], stored[Q].float() * stored[f"{Q}_scale"])


def scale_of_the_neighbor(w: dict[str, Tensor]) -> None:
    w[f"{Q}_scale"][3] = w[f"{Q}_scale"][4]


PLANTED = {
    "the neighbor's scale": (None, scale_of_the_neighbor, "not within half a step"),
    "a sign": (None, lambda w: w[Q][3].neg_(), "not within half a step"),
    "a scale of zero": (None, lambda w: w[f"{Q}_scale"][3].zero_(), "the scale of row 3 is 0"),
    "scales in a row": (None, lambda w: w.update({f"{Q}_scale": w[f"{Q}_scale"].T}), "wanted"),
    "ignore": (config(ignore=["re:.*fc$"]), None, "the engine reads plain weights there"),
}


def test_the_command_finds_what_is_planted(
    line: list[str], target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = tmp_path / "sound"
    export_drafter(
        load_drafter(tmp_path / "drafter"), Target.load(target_directory), sound, quantize="int8"
    )
    assert main([*line, "--exported", str(sound), "--out", str(tmp_path / "sound-report")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the export is quantized" in told and "PASS" in told
    report = json.loads((tmp_path / "sound-report" / "parity.json").read_text())
    assert report["holds"] and report["export_rounding_faults"] == []
    for number, (of_config, of_tensors, message) in enumerate(PLANTED.values()):
        faulty = Path(shutil.copytree(sound, tmp_path / f"faulty-{number}"))
        edit(faulty, of_config, of_tensors)
        assert main([*line, "--exported", str(faulty)]) == 1
        told = " ".join(capsys.readouterr().out.split())
        assert "the export is not this drafter's rounding" in told and message in told
        assert "NOT THE SAME" in told
