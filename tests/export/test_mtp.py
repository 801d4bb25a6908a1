"""A target's module of multi-token prediction: read out of its checkpoint, fine-tuned, put back."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.cli import main
from specdec.data import Batch
from specdec.drafter import Drafter, DrafterSpec, PreNorm, load_drafter, save_drafter
from specdec.export import NotServable, export_drafter, import_drafter
from specdec.target import TargetSource
from specdec.training.building import FromDrafter, config_for
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.export.made import made_drafter, same_state
from tests.mtp import FAMILIES, made
from tests.short_run import short_run
from tests.tiny import VOCAB, mtp, tiny_target

CONF = Path(__file__).parents[2] / "conf"


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def changed(drafter: Drafter) -> Drafter:
    """With other numbers in all that is its own."""
    for name, value in drafter.state_dict().items():
        if name not in ("embed_tokens.weight", "lm_head.weight", "vocab.target_ids_D"):
            value.add_(torch.randn_like(value) / 16)
    return drafter


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_read_changed_and_put_back(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every number of the module, in its own dtype; of the target nothing changes, nor does it load otherwise."""
    source, out = tmp_path / "target", tmp_path / "stitched"
    target, module = made(family, source, dtype)
    (source / "tokenizer.model").write_bytes(b"as it is")
    before, names = all_tensors(source), dict(module.published(family, target.num_layers)).keys()
    drafter = import_drafter(source, target)
    assert torch.equal(
        drafter.embed_tokens.weight, target.embedding_weight().to(drafter.lm_head.weight.dtype)
    )

    same = export_drafter(drafter, target, tmp_path / "same", "mtp")
    assert all(
        torch.equal(value, before[name]) for name, value in all_tensors(same.directory).items()
    )

    made_of = export_drafter(changed(drafter), target, out, "mtp", draft_tokens=2)
    after = all_tensors(out)
    assert {name: value.dtype for name, value in after.items()} == {
        n: v.dtype for n, v in before.items()
    }
    assert {name for name, value in after.items() if not torch.equal(value, before[name])} == names
    again = import_drafter(out, target).state_dict()
    for name, value in drafter.state_dict().items():
        # rounded once, where it was wider
        assert torch.equal(again[name].to(dtype), value.to(dtype)), name
    assert {file.name for file in source.iterdir()} | {"SHA256SUMS"} == {
        file.name for file in out.iterdir()
    }
    for file in source.iterdir():
        assert file.suffix == ".safetensors" or file.read_bytes() == (out / file.name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).state_dict()
    assert all(
        torch.equal(loaded[name], value) for name, value in target.model.state_dict().items()
    )
    assert made_of.command == (
        f'vllm serve {out} --speculative-config \'{{"method": "mtp", "num_speculative_tokens": 2}}\''
    )


def test_a_module_in_fp8_is_read_and_not_written(tmp_path: Path) -> None:
    """Its attention, with the numbers that it stands for; scales are one for each row."""
    target, _ = made("deepseek_v3", tmp_path, torch.bfloat16)
    plain, own = (
        import_drafter(tmp_path, target).state_dict(),
        f"model.layers.{target.num_layers}.self_attn.",
    )
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, value in [*tensors.items()]:
            if name.startswith(own) and value.ndim == 2:
                scale = value.float().abs().amax(1, keepdim=True) / 448
                tensors |= {
                    name: (value.float() / scale).to(torch.float8_e4m3fn),
                    f"{name}_scale": scale,
                }
        save_file(tensors, file, metadata={"format": "pt"})
    drafter = import_drafter(tmp_path, target)
    floats = {
        name: value for name, value in drafter.state_dict().items() if value.is_floating_point()
    }
    gaps = {
        name: float((value - plain[name]).abs().max() / plain[name].abs().max())
        for name, value in floats.items()
    }
    assert {name for name, gap in gaps.items() if gap} == {
        n for n in gaps if "self_attn" in n and floats[n].ndim == 2
    }
    assert max(gaps.values()) < 2**-4  # e4m3 has three bits
    with pytest.raises(
        NotServable, match="has its module in FP8, and weights are not quantized here"
    ):
        export_drafter(drafter, target, tmp_path / "out", "mtp")


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuning_changes_the_drafter_alone(family: str, tmp_path: Path) -> None:
    """From the saved drafter, three steps unrolled; the target, its embedding and its head stay."""
    target, _ = made(family, tmp_path / "target")
    save_drafter(import_drafter(tmp_path / "target", target), tmp_path / "drafter")
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    batch, recipe = (
        Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids)),
        ObjectiveConfig(steps=3),
    )
    spec = (
        dataclasses.replace(mtp(), recurrence=PreNorm()) if family.startswith("glm4_moe") else mtp()
    )
    torch.set_default_dtype(torch.float64)
    try:
        config = config_for(spec, target)
        drafter = (
            FromDrafter(str(tmp_path / "drafter"))
            .drafter(config, target, torch.ones(VOCAB))
            .requires_grad_(True)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    theirs = {name: value.clone() for name, value in target.model.state_dict().items()}
    ours = {name: value.clone() for name, value in drafter.state_dict().items()}
    teacher = target_outputs(target, drafter, batch, recipe)
    optimizer, losses = (
        torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=0.01),
        [],
    )
    for _ in range(8):
        loss = TrainStep(drafter, recipe)(batch, teacher).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(
        torch.equal(value, theirs[name]) for name, value in target.model.state_dict().items()
    )
    still = {name for name, value in drafter.state_dict().items() if torch.equal(value, ours[name])}
    # which has no gradient
    assert {name for name in still if not name.endswith("e_score_correction_bias")} == {
        "embed_tokens.weight", "lm_head.weight", "vocab.target_ids_D",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        (
            "MiMoForCausalLM",
            "model.mtp_layers.0.input_proj.weight",
            r"it reads \[state; embedding\]",
        ),
        (
            "Qwen3_5MoeForConditionalGeneration",
            "mtp.fc.weight",
            "was not compared with transformers' own",
        ),
        ("Ernie4_5_MoeForCausalLM", "model.mtp_block.0.mlp.up_proj.weight", "was not compared"),
    ],
)
def test_a_module_of_another_family_is_named(
    kind: str, name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [kind], "num_nextn_predict_layers": 1})
    )
    save_file(
        {name: torch.ones(2, 4), "model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=f"of a target of class {kind}, which is not read: .*{why}"
    ):
        import_drafter(tmp_path, tiny_target())


def test_a_target_with_two_modules_is_refused(tmp_path: Path) -> None:
    target, _ = made("qwen3_5_text", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {"mtp_num_hidden_layers": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ValueError, match="mtp_num_hidden_layers is 2: a drafter is one such module"
    ):
        import_drafter(tmp_path, target)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_from_the_target_and_back_by_commands(
    family: str, tmp_path: Path, target_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported, measured, fine-tuned by the preset, measured again, put back: what comes out is what was trained."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(target_directory)
    made(family, tmp_path / "target", torch.float32, vocab_size=len(tokenizer))
    tokenizer.save_pretrained("target")
    Path("text.txt").write_text(
        "".join(f"def add_{n}(a, b):\n    return a + {n} * b\n\n\n" for n in range(60))
    )
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def add_{n}("}) + "\n" for n in range(2))
    )
    assert main(["import", "--checkpoint", "target", "--target", "target", "--out", "mine"]) == 0
    recurrence = ["--model.drafter.recurrence", "PreNorm"] if family == "glm4_moe" else []
    run = short_run(
        Path("target"), Path("text.txt"), trainer__max_steps=2, trainer__log_every_n_steps=1,
        model__drafter=CONF / "drafter" / "mtp.yaml",
        model__drafter__draft_vocab_size="all", model__start="FromDrafter", model__start__directory="mine",
        acceptance__max_new_tokens=8, acceptance__count=1,
    )  # fmt: skip
    at = run.index("--model.drafter")  # before what changes it
    run = [*run[at : at + 2], *run[:at], *run[at + 2 :], *recurrence]
    assert main(["doctor", *run]) == 0
    assert main(["fit", *run, "--out", "tuned"]) == 0
    of = ["--target", "target", "--prompts", "prompts.jsonl", "--max_new_tokens", "12"]
    for drafter, out in (("mine", "before"), ("tuned/drafter", "after")):
        given = [*of, "--drafter", drafter]
        assert (
            main(
                ["evaluate", *given, "--shape", "chain:depth=2", "--compile", "false", "--out", out]
            )
            == 0
        )
        assert (
            json.loads(Path(out, "metrics.json").read_text())["results"][0]["identical_outputs"]
            == 2
        )
    assert main(["drift", *given, "--depths", "3", "--out", "drift"]) == 0
    assert (
        main(
            [
                "export",
                "--format",
                "mtp",
                *of[:2],
                "--drafter",
                "tuned/drafter",
                "--out",
                "stitched",
            ]
        )
        == 0
    )
    again, tuned = (
        import_drafter("stitched", TargetSource("stitched")),
        load_drafter("tuned/drafter"),
    )
    assert same_state(again, tuned) and not same_state(again, load_drafter("mine"))


def test_another_design_is_not_started_from(tmp_path: Path) -> None:
    target, _ = made("glm4_moe", tmp_path / "target", torch.float32)
    save_drafter(import_drafter(tmp_path / "target", target), tmp_path / "drafter")
    # as the preset is, for the others
    with pytest.raises(ValueError, match="recurrence is PreNorm, not PostNorm"):
        FromDrafter(str(tmp_path / "drafter")).drafter(
            config_for(mtp(), target), target, torch.ones(VOCAB)
        )


def edit(directory: Path, **keys: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rewrite(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Put in, or with None leave out, tensors whose names end so."""
    file = directory / "model.safetensors"
    there = load_file(file)
    for end, value in tensors.items():
        known = [
            name
            for name in there
            if name.endswith(end.replace("_weight", ".weight")) and ".layers.2" in name
        ]
        name = known[0] if known else f"model.layers.2.{end}"
        if value is None:
            del there[name]
        else:
            there[name] = value
    save_file(there, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda d: edit(d, num_nextn_predict_layers=2),
            "num_nextn_predict_layers is 2: a drafter is one such module",
        ),
        (
            lambda d: rewrite(d, eh_proj_weight=None),
            "of a module of multi-token prediction it lacks .*eh_proj.weight",
        ),
        (
            lambda d: rewrite(d, more=torch.ones(5)),
            "it has weights without a place: model.layers.2.more",
        ),
        (
            lambda d: rewrite(d, enorm_weight=torch.ones(5)),
            r"enorm.weight is \[5\], the config says \[32\]",
        ),
        (
            lambda d: rewrite(d, hnorm_weight=torch.ones(32).to(torch.float8_e4m3fn)),
            "is float8_e4m3fn of shape",
        ),
        (
            lambda d: rewrite(d, enorm_weight=torch.full((32,), torch.nan)),
            "enorm.weight are not all finite",
        ),
    ],
    ids=["two", "missing", "more", "shape", "quantized", "nan"],
)
def test_what_cannot_be_read(break_it: Any, message: str, tmp_path: Path) -> None:
    target, _ = made("glm4_moe", tmp_path, torch.float32)
    break_it(tmp_path)
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path, target)


def test_what_cannot_be_put_back(tmp_path: Path) -> None:
    """Other designs, other heads, other targets, another format, a place that is taken."""
    source, out = tmp_path / "target", tmp_path / "out"
    target, _ = made("qwen3_next", source, torch.float32)
    drafter = import_drafter(source, target)
    with pytest.raises(NotServable, match=r"attention TargetLayer.*use --format mtp"):
        export_drafter(drafter, target, out)
    other = made_drafter(dataclasses.replace(mtp(), recurrence=PreNorm()), target)
    with pytest.raises(NotServable, match=r"the drafter differs in \['recurrence'\]"):
        export_drafter(other, target, out, "mtp")
    llama = tiny_target(dtype=torch.float32)
    llama.model.save_pretrained(tmp_path / "llama")
    llama.source = str(tmp_path / "llama")
    with pytest.raises(
        NotServable, match="--format mtp is for a target with a module: DeepseekV3ForCausalLM"
    ):
        export_drafter(made_drafter(DrafterSpec(draft_vocab_size=40), llama), llama, out, "mtp")
    out.mkdir()
    with pytest.raises(ValueError, match="exists already"):
        export_drafter(drafter, target, out, "mtp")
    out.rmdir()
    drafter.lm_head.weight[3] += 1
    with pytest.raises(
        NotServable, match="engines give the module the target's embedding and head"
    ):
        export_drafter(drafter, target, out, "mtp")
    assert not out.exists() and {file.name for file in tmp_path.iterdir()} == {"target", "llama"}


def test_a_shard_that_is_written_otherwise_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = made("glm4_moe", tmp_path / "target", torch.float32)
    drafter = changed(import_drafter(tmp_path / "target", target))

    def worse(tensors: dict[str, torch.Tensor], path: str, metadata: Any) -> None:
        save_file({name: value + 1 for name, value in tensors.items()}, path, metadata=metadata)

    monkeypatch.setattr("specdec.export.mtp.save_file", worse)
    with pytest.raises(ValueError, match="reads back otherwise than it was written"):
        export_drafter(drafter, target, tmp_path / "out", "mtp")
    assert not (tmp_path / "out").exists()
