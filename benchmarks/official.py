"""Exports in the EAGLE authors' own code, beside the drafters that they were made of: chains, and EAGLE-3's trees.

Drafters with random weights are exported for targets of several kinds. The authors' ``Model`` gets the directory, the
target's directory (where it finds the embedding) and the target's states, and drafts: a chain by ``forward``, its own
likeliest token each time, and with EAGLE-3 a tree by ``topK_genrate``. Tokens, who sees whom in the tree, and log-probs
are compared with those of specdec's decoding.

``python benchmarks/official.py --eagle1 DIR --eagle3 DIR --out benchmarks/results/official_<hardware>_<yyyymm>.md``
where DIR holds the authors' package ``eagle``: a checkout of https://github.com/SafeAILab/EAGLE has both generations,
the source of ``eagle-llm`` 1.2.1 on PyPI EAGLE-1. Their code wants a transformers of before 5: see ``--peers``.
"""

import argparse
import contextlib
import importlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import harness

# tokens of the text; drafts of a chain and levels of the tree; of the tree
LENGTH, DEPTH, TOP, NODES = 40, 6, 4, 20
TOLERANCE = 1e-4  # of log-probs in float32, as a share of their range
DESIGNS = ("eagle1", "eagle3", "eagle3, whole vocabulary", "eagle3, own embedding")
TARGETS = ("Llama", "Llama, tied", "Qwen3")


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]:
    """In a process of its own, since both generations have one name: what drafts and keeps it in a file."""
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(job["threads"])
    sys.path.insert(0, job["folder"])
    wide, cnets = job["generation"] == 3, "eagle.model.cnets"
    if not wide:  # a checkout calls EAGLE-1's file cnets1
        with contextlib.suppress(ImportError):
            importlib.import_module(cnets := "eagle.model.cnets1")
    theirs = importlib.import_module(cnets if cnets in sys.modules else "eagle.model.cnets")

    @torch.no_grad()
    def draft(folder: str) -> dict[str, Any]:
        config = theirs.EConfig.from_pretrained(folder + "/served/config.json")
        weights = load_file(folder + "/served/model.safetensors")
        more = (
            {"total_tokens": NODES + 1, "depth": DEPTH - 1, "top_k": TOP}
            if wide
            else {"bias": "fc.bias" in weights}
        )
        model = theirs.Model(config, load_emb=True, path=folder + "/target", **more).eval()
        odd = model.load_state_dict(weights, strict=False)
        left = {"embed_tokens.weight"} | (
            {"d2t", "t2d"} if wide else set()
        )  # the target's; a whole vocabulary has none
        if faults := [*odd.unexpected_keys, *(set(odd.missing_keys) - left)]:
            return {"error": f"tensors that it does not know, or lacks: {', '.join(faults)}"}
        text, found = load_file(folder + "/text.safetensors"), dict[str, Tensor]()
        head = (lambda h: model.lm_head(model.norm(h))) if wide else lambda h: h @ text["head"].T
        ids, model.tree_mask = text["ids"], None
        states, past = model(text["states"], ids[:, 1:], use_cache=True)
        log_probs, tokens = [], []
        for k in range(DEPTH):
            log_probs.append(head(states[:, -1]).log_softmax(-1))
            token = log_probs[-1].argmax(-1)
            tokens.append(
                token + model.d2t[token] if wide and len(model.d2t) < model.vocab_size else token
            )
            if k + 1 < DEPTH:
                states, past = model(
                    states[:, -1:], tokens[-1][None], past_key_values=past, use_cache=True
                )
        found |= {"log_probs": torch.cat(log_probs), "tokens": torch.cat(tokens)}
        if wide:
            model.init_tree()
            drafts, _, mask, _ = model.topK_genrate(text["states"], ids, None, None)
            found |= {"tree": drafts[0].contiguous(), "sees": mask[0, 0].bool()}
        save_file(found, folder + "/theirs.safetensors")
        return {}

    return {"versions": {name: version(name) for name in ("torch", "transformers")}}, draft


@torch.no_grad()
def compared(
    design: str, kind: str, folder: Path, ask: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """One design for one target: how far apart log-probs are at each draft, and whether tokens and tree are equal."""
    import transformers as hf
    from safetensors.torch import load_file, save_file

    from specdec.decoding import DynamicTree
    from specdec.decoding.accept import ancestors
    from specdec.diagnostics.anchors import AnchoredText
    from specdec.export import export_drafter
    from specdec.target import Target
    from tests.decoding.drafting import Drafting
    from tests.export.made import made_drafter
    from tests.tiny import llama_config, presets

    torch.manual_seed(0)
    # of a head, which the authors' EAGLE-1 takes for hidden size / heads
    width = 8 if design == "eagle1" else 12
    sizes = llama_config(head_dim=width, tie_word_embeddings=kind.endswith("tied")).to_dict()
    config = (
        hf.Qwen3Config(**{**sizes, "model_type": "qwen3"})
        if kind == "Qwen3"
        else hf.LlamaConfig(**sizes)
    )
    model = hf.AutoModelForCausalLM.from_config(config).float()
    # they look for the index of several files
    model.save_pretrained(folder / "target", max_shard_size="50KB")
    target = Target.load(folder / "target")
    spec = presets()[design.partition(",")[0]]
    if design.endswith("vocabulary"):
        spec.__dict__["draft_vocab_size"] = "all"
    drafter = made_drafter(spec, target, own_embedding=design.endswith("embedding")).eval()
    for name, parameter in drafter.named_parameters():
        if parameter.ndim > 1 and not name.startswith(("embed_tokens", "lm_head")):
            parameter.mul_(10)  # so that all of it shows in what is said
    export_drafter(drafter, target, folder / "served", draft_tokens=DEPTH)
    ids_1T = torch.randint(target.vocab_size, (1, LENGTH))
    read = AnchoredText(target, drafter, ids_1T[0].tolist(), DEPTH)
    aux_1TNH = read.out.aux_BTNH[:, :-1]
    text = {
        "states": aux_1TNH.flatten(2).contiguous(),
        "ids": ids_1T,
        "head": target.head_weight().clone(),
    }
    save_file(text, folder / "text.safetensors")
    if error := ask(str(folder)).get("error"):
        return {"design": design, "target": kind, "error": error}
    theirs = load_file(folder / "theirs.safetensors")
    chain = read.draft([LENGTH - 1])
    apart = [
        float((one - two).abs().max() / (one.max() - one.min()))
        for one, two in zip(chain.log_probs_AKD[0], theirs["log_probs"], strict=True)
    ]
    same = torch.equal(chain.tokens_AK[0], theirs["tokens"])
    if "tree" in theirs:
        proposer = Drafting(drafter, DynamicTree(DEPTH, top_k=TOP, nodes=NODES), LENGTH)
        tree = proposer.draft(ids_1T[:, -1], proposer.commit(ids_1T[:, 1:], aux_1TNH))
        same &= torch.equal(tree.tokens_BN[0], theirs["tree"])
        same &= torch.equal(ancestors(tree.parents_BN)[0], theirs["sees"])
    return {"design": design, "target": kind, "apart": apart, "same": same}


def report(
    about: dict[str, Any], versions: dict[str, str], cells: Sequence[dict[str, Any]]
) -> list[str]:
    """A table of designs by targets in Markdown."""
    equal = sum("apart" in one and one["same"] and max(one["apart"]) <= TOLERANCE for one in cells)
    rows = []
    for design in dict.fromkeys(one["design"] for one in cells):
        own = [one for one in cells if one["design"] == design]
        rows.append([design, *(one.get("error") or f"{max(one['apart']):.1e}" for one in own)])
    return [
        f"# Exports in the EAGLE authors' code, {about['date'][:10]}", "",
        *harness.conditions(about, about["versions"] | {f"theirs: {k}": v for k, v in versions.items()}), "",
        f"{len(cells)} exports, {equal} drafted for as by specdec: a chain of {DEPTH} drafts behind {LENGTH} tokens, "
        f"token by token, and with EAGLE-3 a tree of {NODES} (depth {DEPTH}, top {TOP}), token by token and node by "
        "node. A figure is the greatest difference of two log-probs in the chain, as a share of their range.", "",
        *harness.table(["design", *TARGETS], rows),
    ]  # fmt: skip


def main() -> int:
    """All of it; the exit status is 1 if an export is not drafted with as here."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--eagle1", required=True, metavar="DIR", help="where the authors' package of EAGLE-1 is"
    )
    p.add_argument(
        "--eagle3", required=True, metavar="DIR", help="where the authors' package of EAGLE-3 is"
    )
    p.add_argument(
        "--peers", default=sys.executable, metavar="PYTHON", help="the Python that runs them"
    )
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    about, cells, versions = harness.machine(1), list[dict[str, Any]](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="official-") as name, contextlib.ExitStack() as workers:
        ask = {}
        for generation, folder in (("eagle1", a.eagle1), ("eagle3", a.eagle3)):
            job = {
                "threads": 1,
                "folder": str(Path(folder).resolve()),
                "generation": int(generation[-1]),
            }
            log = Path(name) / f"{generation}.log"
            worker = harness.Worker(a.peers, generation, Path(__file__).resolve(), job, log)
            ask[generation] = workers.enter_context(worker).ask
            versions = worker.about["versions"]
        for design, kind in itertools.product(DESIGNS, TARGETS):
            folder = Path(name) / f"{design}-{kind}".replace(", ", "-").replace(" ", "-")
            cells.append(compared(design, kind, folder, ask[design[:6]]))
            harness.tell(" ".join(f"{key}: {value}" for key, value in cells[-1].items()))
        harness.keep(a.out, report(about, versions, cells), cells)
    return int(
        any("error" in one or not one["same"] or max(one["apart"]) > TOLERANCE for one in cells)
    )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
