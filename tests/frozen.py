"""What a redesign must leave alone: losses, weights, exports, measured acceptance, resumed weights.

``python -m tests.frozen OUT.json`` trains every shipped drafter design for three steps on a tiny target, exports it in
every format that takes it, evaluates one eagerly, and kills and resumes another; the hashes and figures go to
OUT.json. ``python -m tests.frozen --check FROZEN.json`` compares with an earlier file and names what differs.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.cli import main

REPOSITORY = Path(__file__).parents[1]
TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n}\n\n\n" for n in range(60))
TIMED = ("second", "speed", "rate_of_time", "overhead", "per_s", "memory", "time")


UNTOLD = ("accepted_drafts", "by_context")  # figures of an evaluation that older commits gave


def target(path: Path) -> Path:
    """A random twelve-layer Llama of width 32, deep enough for vLLM's aux layers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(path)
    return path


def run(*args: str) -> None:
    """A command of specdec, in this process; its output is shown if it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(args))
    if status:
        sys.stderr.write(f"specdec {' '.join(args)}: {status}\n{out.getvalue()[-2000:]}\n")
        raise SystemExit(1)


def sha(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def weights(path: Path) -> str:
    """Of a safetensors file's tensors, names included, whatever its header says besides."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def figures(value: Any) -> Any:
    """Results without what a clock decided or is told no more, and with the present name of a draft shape."""
    if isinstance(value, dict):
        kept = {k: figures(v) for k, v in value.items() if not any(word in k for word in TIMED) and k not in UNTOLD}
        return {k.replace("growth", "shape"): v for k, v in kept.items()}
    if isinstance(value, list):
        return [figures(one) for one in value]
    return round(value, 9) if isinstance(value, float) else value


def fit(source: Path, text: Path, out: Path, *more: str) -> None:
    """Three steps of a design."""
    run(
        "fit", "--model.target.source", str(source), "--data", "TextData", "--data.train", str(text),
        "--data.seq_len", "64", "--data.batch_size", "2", "--trainer.accelerator", "cpu",
        "--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.num_sanity_val_steps", "0",
        "--seed_everything", "1", "--out", str(out), *more,
    )  # fmt: skip


def freeze(folder: Path) -> dict[str, Any]:
    """Everything, in a scratch folder."""
    os.chdir(REPOSITORY)
    source, text = target(folder / "target"), folder / "text" / "*.txt"
    text.parent.mkdir()
    for number in range(12):
        (text.parent / f"{number}.txt").write_text(TEXT[number * 150 : number * 150 + 1200])
    found: dict[str, Any] = {}
    for preset in sorted((REPOSITORY / "conf" / "drafter").glob("*.yaml")):
        name, out = preset.stem, folder / preset.stem
        steps = "1" if name in ("eagle1", "eagle2") else "3"
        fit(source, text, out, "--model.drafter", str(preset), "--trainer.max_steps", "3", "--model.ttt_steps", steps)
        found[f"{name}: losses"] = sha(out / "losses.txt")
        found[f"{name}: weights"] = weights(next((out / "drafter").glob("*.safetensors")))
        for kind in ("vllm", "sglang", "speculators"):
            place = folder / f"{name}-{kind}"
            args = ["--drafter", str(out / "drafter"), "--target", str(source), "--out", str(place), "--format", kind]
            try:
                run("export", *args)
            except SystemExit:
                found[f"{name}: {kind}"] = "refused"
                continue
            found[f"{name}: {kind}: weights"] = weights(next(place.glob("*.safetensors")))
            found[f"{name}: {kind}: config"] = (place / "config.json").read_text().replace(str(folder), "")
        sys.stderr.write(f"{name}: done\n")
    prompts = folder / "prompts.txt"
    prompts.write_text("def add_1(a, b):\ndef add_22(a,\n    return a +\n")
    fit(source, text, folder / "long", "--trainer.max_steps", "150", "--model.ttt_steps", "4",
        "--checkpoint.every_n_train_steps", "50")  # fmt: skip
    found["long: losses"] = sha(folder / "long" / "losses.txt")
    kept = folder / "long" / "drafter"
    for temperature in ("0", "1"):
        out = folder / f"evaluated-{temperature}"
        shapes = ["chain:depth=3", "tree:depth=4,top_k=3,nodes=12"]
        run("evaluate", "--target", str(source), "--drafter", str(kept), "--prompts", str(prompts), "--compile", "off",
            "--max_new_tokens", "40", shape_option(), *shapes, "--sampling.temperature", temperature,
            "--out", str(out))  # fmt: skip
        found[f"evaluate at {temperature}"] = figures(json.loads((out / "metrics.json").read_text())["results"])
    checkpoints = folder / "long" / "checkpoints"
    first = sorted(checkpoints.rglob("*step=50*")) or sorted(checkpoints.rglob("*50*"))
    resumed = folder / "resumed"
    more = ("--trainer.max_steps", "150", "--model.ttt_steps", "4", "--checkpoint.every_n_train_steps", "50")
    shutil.copytree(folder / "long", resumed)
    for file in resumed.glob("DONE*"):
        file.unlink()
    shutil.rmtree(resumed / "drafter")
    begin = resumed / first[0].relative_to(folder / "long") if first else None
    fit(source, text, resumed, *more, "--ckpt_path", str(begin) if begin else "auto")
    found["resumed weights"] = weights(next((resumed / "drafter").glob("*.safetensors")))
    found["uninterrupted weights"] = weights(next((folder / "long" / "drafter").glob("*.safetensors")))
    return found


def shape_option() -> str:
    """What ``specdec evaluate`` calls its draft shapes, in this commit."""
    text = "".join(path.read_text() for path in (REPOSITORY / "specdec" / "evaluation").glob("*.py"))
    return "--growth" if "--growth" in text else "--shape"


def known(old: dict[str, Any]) -> dict[str, Any]:
    """Earlier findings without what is told no more."""
    return {key: figures(value) if key.startswith("evaluate at") else value for key, value in old.items()}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What is not as it was."""
    return [
        f"{key}:\n  {old.get(key)}\n  {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        now = freeze(Path(scratch))
    if sys.argv[1] == "--check":
        odd = differences(known(json.loads(Path(sys.argv[2]).read_text())), now)
        sys.stderr.write("\n".join(odd) + f"\n{len(odd)} of {len(now)} differ\n")
        raise SystemExit(bool(odd))
    Path(sys.argv[1]).write_text(json.dumps(now, indent=1, sort_keys=True))
