"""Training killed with SIGKILL at random moments and resumed, beside the run that nothing disturbs.

Every kind of run (one process, accumulation, cached features, two processes of DDP and of FSDP2) is
trained once undisturbed, then again under kills: the whole process group at a random step or within a checkpoint's
write, then ``specdec fit --ckpt_path auto``. Every loss and the final weights must be equal to the bit.

``python benchmarks/faults.py --kills 12 --out benchmarks/results/faults_<hardware>_<yyyymm>.md``
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks import harness
from specdec.utils.files import sha256

STEPS, EVERY = 24, 4  # of a run; steps between checkpoints
WEIGHTS, LOSSES = Path("drafter") / "model.safetensors", "losses.txt"
PATIENCE = 300.0  # seconds for the next loss
TEXTS = harness.ROOT / "specdec" / "nn" / "[a-z]*.py"  # what is learnt
TWO = ("--trainer.devices", "2", "--trainer.strategy")
KINDS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "accumulation": ("--trainer.accumulate_grad_batches", "2"),
    "cached features": (),
    "DDP, two processes": (*TWO, "ddp"),
    "FSDP2, two processes": (*TWO, "fsdp2"),
}


def make_target(folder: Path) -> None:
    """A random seven-layer Llama of width 32 whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def model_and_data(folder: Path) -> list[str]:
    """The options of ``specdec fit`` and ``specdec cache`` for a tiny drafter of the target."""
    return [
        "--model.target.source", str(folder / "target"), "--model.ttt_steps", "3", "--data", "TextData",
        "--data.train", str(TEXTS), "--data.seq_len", "64", "--data.batch_size", "2",
    ]  # fmt: skip


def arguments(folder: Path, kind: str, out: Path) -> list[str]:
    """Those of ``specdec fit`` for a kind of run, every loss written at its step."""
    more = KINDS[kind]
    if kind == "cached features":
        more = ("--model.features", "Cached", "--model.features.directory", str(folder / "features"))
    return [
        *model_and_data(folder), "--trainer.accelerator", "cpu", "--trainer.logger", "false",
        "--trainer.enable_progress_bar", "false", "--trainer.num_sanity_val_steps", "0",
        "--trainer.log_every_n_steps", "1", "--trainer.max_steps", str(STEPS),
        "--checkpoint.every_n_train_steps", str(EVERY), *more, "--out", str(out),
    ]  # fmt: skip


def specdec(*args: str, log: Path) -> subprocess.Popen[bytes]:
    """A command in a process group of its own."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "specdec", *args], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            process_group=0, env=os.environ | {"PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end of a command that must succeed."""
    if status := process.wait():
        raise ValueError(f"status {status}: {log.read_text(errors='replace')[-2000:]}")


def lines(out: Path) -> list[str]:
    """The whole lines of a run's losses, none yet where there is no file."""
    path = out / LOSSES
    return path.read_text().split("\n")[:-1] if path.exists() else []


def strike(folder: Path, kind: str, out: Path, log: Path, draw: random.Random) -> bool:
    """Go on with a run, and kill it some steps later; false if it ended before."""
    goal = len(lines(out)) + draw.randint(1, 2 * EVERY)
    process = specdec("fit", *arguments(folder, kind, out), "--ckpt_path", "auto", log=log)
    end = time.monotonic() + PATIENCE
    while len(lines(out)) < goal:
        if process.poll() is not None:
            finish(process, log)
            return False
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
            raise ValueError(f"{kind}: no {goal} losses within {PATIENCE:.0f} s; see {log}")
        time.sleep(0.002)
    time.sleep(draw.random() * 0.1)  # within a step, or within a save
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def campaign(folder: Path, kind: str, kills: int, seed: int) -> dict[str, Any]:
    """Kills over runs of one kind, until there were so many; what became of them."""
    draw, done, runs, differing, compared, equal = random.Random(seed), 0, 0, 0, 0, True
    place = folder / kind.replace(" ", "-").replace(",", "")
    place.mkdir()
    log = place / "log"
    finish(specdec("fit", *arguments(folder, kind, place / "whole"), log=log), log)
    whole, weights = lines(place / "whole"), sha256(place / "whole" / WEIGHTS)
    while done < kills:
        out, runs = place / f"killed-{runs}", runs + 1
        while done < kills and strike(folder, kind, out, log, draw):
            done += 1
            harness.tell(f"{kind}: {done} of {kills} kills")
        if not (out / "DONE.json").exists():
            finish(specdec("fit", *arguments(folder, kind, out), "--ckpt_path", "auto", log=log), log)
        found = lines(out)
        compared += len(found)
        differing += sum(a != b for a, b in zip(whole, found, strict=False)) + abs(len(whole) - len(found))
        equal = equal and sha256(out / WEIGHTS) == weights
    return {"kind": kind, "kills": done, "runs": runs, "losses": compared, "differing": differing, "weights": equal}


def main() -> int:
    """Every kind; the exit status is 1 if anything differed."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    p.add_argument("--kills", type=int, default=12, help="of each kind")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    about, found = harness.machine(1), []
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        folder = Path(scratch)
        make_target(folder / "target")
        if "cached features" in a.kinds:
            log = folder / "log"
            finish(specdec("cache", *model_and_data(folder), "--out", str(folder / "features"), log=log), log)
        for kind in a.kinds:
            found.append(campaign(folder, kind, a.kills, a.seed))
    rows = [
        [one["kind"], str(one["kills"]), str(one["runs"]), f"{one['differing']} of {one['losses']}",
         "equal" if one["weights"] else "DIFFERENT"] for one in found
    ]  # fmt: skip
    columns = ["kind of run", "SIGKILLs", "runs", "step losses different", "final weights"]
    head = [f"# Training under SIGKILL, {about['date'][:10]}\n", *harness.conditions(about, about["versions"]), ""]
    harness.keep(a.out, [*head, *harness.table(columns, rows)], {"run": about, "kinds": found})
    return int(any(one["differing"] or not one["weights"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
