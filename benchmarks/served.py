"""What a real vLLM makes of every export: targets of many families, presets and formats, draft position by position.

Every cell exports a drafter, runs the very line that the export prints, and compares what that server accepts in each
pass with ours (``specdec parity``). A cell is *equal*, or *refused* by the export with its reason; all else is a
finding. Targets are tiny ones that mostly look at the last token, and drafters know it, so that drafts are accepted.
What is finished is kept beside ``--out`` until all is, so that the same command goes on.

``SPECDEC_VLLM_PYTHON=... python -m benchmarks.served --out benchmarks/results/served_<hardware>_<yyyymm>.md``
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks import harness
from specdec.diagnostics.parity import parity
from specdec.drafter import Drafter, DrafterSpec, save_drafter
from specdec.engines.server import free_port, running
from specdec.export import FORMATS, NotServable, export_drafter, subject_of
from specdec.target import Target, TargetSource
from specdec.utils.files import write_json
from specdec.utils.vllm import find_vllm
from tests import perfect
from tests.tiny import HIDDEN, VOCAB

TOKENS, DRAFTS, DRAFT_VOCAB, NOISE = 60, 3, 50, 0.3
PROMPTS = ("t5 t6 t7", "t9 t1 t30 t31 t2", "t44")
FLAGS = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--enforce-eager"]
COLUMNS = [
    ("eagle1", "vllm"), ("eagle1", "sglang"),
    *((preset, format) for preset in ("eagle3", "eagle3_1") for format in ("vllm", "speculators", "sglang")),
]  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
ONE: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}  # where a head is as wide as the model
SLIDING: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CAPPED: dict[str, Any] = {"query_pre_attn_scalar": 32, "final_logit_softcapping": 30.0, "attn_implementation": "eager"}
ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"], "mamba_num_heads": 4,
    "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1, "chunk_size": 8,
}  # fmt: skip
# the model's class, its layers, how far its context leads it astray, and what else its config says
TARGETS: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "Llama": ("Llama", 7, 0.75, {}),
    "Llama, 4 layers": ("Llama", 4, 0.75, {}),
    "Llama, tied, 30 layers": ("Llama", 30, 0.3, {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2", 7, 0.75, ONE),
    "Qwen3, 6 layers": ("Qwen3", 6, 0.75, {}),
    "Qwen3-MoE": ("Qwen3Moe", 7, 0.4, SPARSE),
    "Mixtral": ("Mixtral", 7, 0.4, EXPERTS),
    "Mistral": ("Mistral", 7, 0.75, {"sliding_window": 16}),
    "Gemma": ("Gemma", 7, 0.75, {}),
    "Gemma-2": ("Gemma2", 7, 1.2, SLIDING | CAPPED),
    "Gemma-3": ("Gemma3", 7, 0.75, SLIDING | {"query_pre_attn_scalar": 32}),
    "Phi-3": ("Phi3", 7, 0.75, ONE),
    "Granite": ("Granite", 7, 0.75, ONE | {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "Cohere": ("Cohere", 7, 0.75, ONE | {"logit_scale": 0.3}),
    "OLMo-2": ("Olmo2", 7, 0.75, ONE),
    # text that does not hang on the recurrent state: where drafts are refused, vLLM's CPU build does not put it back
    "Nemotron-H, last token alone": ("NemotronH", 4, 0.0, MAMBA),
    "GPT-OSS": ("GptOss", 7, 0.4, EXPERTS | ROPE | {"sliding_window": 16}),
}


def make(family: str, preset: str, folder: Path) -> tuple[Target, Drafter]:
    """A target, saved in ``folder``, and a drafter of it."""
    name, layers, context, more = TARGETS[family]
    model = getattr(hf, f"{name}ForCausalLM")
    torch.manual_seed(0)
    config = model.config_class(**SIZES | more, num_hidden_layers=layers)
    perfect.make_markov(model(config), context, layers=layers).float().save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(f"t{n}", normalized=False) for n in range(VOCAB)])  # all that Qwen2's class keeps
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    target = Target.load(folder)
    spec = DrafterSpec.preset(preset)
    own = spec.head == "own"
    boundaries: Any = [1, layers // 2, layers - 1] if own and layers < 7 else "default"
    spec = replace(spec, draft_vocab_size=DRAFT_VOCAB if own else "all", aux_layers=boundaries)
    if name == "NemotronH":  # it has no positions that a drafter could take over
        spec = replace(spec, rope_theta=10000.0)
    return target, perfect.disturb(perfect.perfect_drafter(target, spec), NOISE if own and context else 0.0).float()


def cell(family: str, preset: str, format: str) -> dict[str, Any]:
    """Export, serve by the line that the export prints, and compare."""
    torch.set_num_threads(1)
    begin, found = time.monotonic(), {"family": family, "preset": preset, "format": format}
    with tempfile.TemporaryDirectory(prefix="served-") as name, contextlib.redirect_stdout(io.StringIO()) as said:
        scratch = Path(name)
        try:
            target, drafter = make(family, preset, scratch / "target")
            save_drafter(drafter, scratch / "drafter")
            made = export_drafter(drafter, target, scratch / "served", format, draft_tokens=DRAFTS)
        except NotServable as error:
            return found | {"verdict": "refused", "reason": str(error)}
        except ValueError as error:
            return found | {"verdict": "NO TARGET", "reason": str(error)}
        line = made.command
        if format == "sglang":  # vLLM reads this format too, by the line that it has for its own
            source = TargetSource(target.source)
            line = FORMATS["vllm"].command(str(made.directory), subject_of(drafter, target), source, DRAFTS)
        found["line"] = line.replace(name, "")
        (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
        port = free_port()
        command = [
            *find_vllm(),
            *shlex.split(line)[1:],
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *FLAGS,
            "--no-enable-prefix-caching",
        ]
        try:
            with running(command, "127.0.0.1", port, scratch / "log", 300) as server:
                status = parity(
                    drafter=str(scratch / "drafter"), target=TargetSource(target.source), exported=made.directory,
                    prompts=[str(scratch / "prompts.jsonl")], max_new_tokens=TOKENS, engine="vllm", url=server.url,
                    out=scratch / "parity",
                )  # fmt: skip
        except ValueError as error:
            return found | {"verdict": "FAILED", "reason": str(error)}
        engine = json.loads((scratch / "parity" / "parity.json").read_text())["engine"]
        words = said.getvalue().splitlines()
    return found | {
        "verdict": "DIFFERENT" if status else "equal", "reason": words[-1] if status else "",
        "passes": engine["positions"][0]["passes"], "accepted": [one["accepted"] for one in engine["positions"]],
        "rounding": sum(one["rounding"] for one in engine["positions"]), "seconds": time.monotonic() - begin,
    }  # fmt: skip


def report(about: dict[str, Any], cells: Sequence[dict[str, Any]], minutes: float) -> list[str]:
    """Markdown."""
    verdicts = Counter(one["verdict"] for one in cells)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    passes = sum(one.get("passes", 0) for one in cells)
    lines = [f"# Exports in vLLM, {about['date'][:10]}", "", *harness.conditions(about, about["versions"])]
    lines += [
        f"- vLLM: {about['vllm']}, float32, chains of {DRAFTS}; {minutes:.0f} minutes", "",
        f"{len(cells)} exports: {counts}; {passes:,} passes of {DRAFTS} drafts. A figure says *equal*, vLLM accepts "
        "at every position of every pass what the drafter says there, and is the tokens a pass. Others have the "
        "number of their reason below. *t*: by vLLM's Transformers backend, which the printed line asks for.", "",
    ]  # fmt: skip
    reasons: list[str] = []
    rows = []
    for family in dict.fromkeys(one["family"] for one in cells):
        row = [family]
        for preset, format in COLUMNS:
            (one,) = [x for x in cells if (x["family"], x["preset"], x["format"]) == (family, preset, format)] or [None]
            if one is None:
                row.append("")
            elif one["verdict"] == "equal":
                length = 1 + sum(one["accepted"]) / one["passes"]
                row.append(f"{length:.2f}" + " *t*" * ("--model-impl" in one["line"]))
            else:
                text = f"{one['verdict']}: {one['reason']}"
                reasons += [] if text in reasons else [text]
                row.append(f"{one['verdict']} ({reasons.index(text) + 1})")
        rows.append(row)
    lines += harness.table(["target", *(f"{preset}, {format}" for preset, format in COLUMNS)], rows)
    return [*lines, "", *(f"{n}. {' '.join(text.split())}" for n, text in enumerate(reasons, 1))]


def main() -> int:
    """All of it; the exit status is 1 if there is a cell that is neither equal nor refused."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    p.add_argument("--columns", nargs="+", metavar="PRESET,FORMAT", default=[",".join(one) for one in COLUMNS])
    p.add_argument("--workers", type=int, default=2, help="cells at a time")
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    begin, about = time.monotonic(), harness.machine(1)
    partial = a.out and a.out.with_suffix(".partial.json")
    cells = json.loads(partial.read_text()) if partial and partial.exists() else []
    known = {(one["family"], one["preset"], one["format"]) for one in cells}
    wanted = [(family, *one.split(",")) for family in a.targets for one in a.columns]
    with ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(cell, *one) for one in wanted if one not in known]
        for done in as_completed(futures):
            cells.append(one := done.result())
            harness.tell(f"{one['family']}, {one['preset']}, {one['format']}: {one['verdict']} {one.get('reason', '')}")
            if partial:
                write_json(partial, cells)
    cells.sort(key=lambda one: wanted.index((one["family"], one["preset"], one["format"])))
    harness.keep(a.out, report(about | {"vllm": vllm_version()}, cells, (time.monotonic() - begin) / 60), cells)
    if partial:
        partial.unlink()
    return int(any(one["verdict"] not in ("equal", "refused") for one in cells))


def vllm_version() -> str:
    """Of the vLLM that is asked."""
    code = "from importlib.metadata import distributions as d; print({x.version for x in d() if 'vllm' in x.name})"
    return subprocess.run([find_vllm()[0], "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
