"""Import each published layout and compare it with the forward written from the layout; plant faults.

The exit status is 1 if a layout differs, is refused without the sentence that was expected, or a planted
fault is not found.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from benchmarks.imports.collection import (
    LAYER,
    VOCAB,
    WIDTH,
    Layout,
    flat,
    layouts,
    reduced,
    tensors_of,
)
from benchmarks.imports.forward import IDS, Published, Said
from benchmarks.imports.modules import PUBLISHED, REFUSED, Module
from specdec.decoding.proposal import Proposer
from specdec.decoding.shapes import Chain
from specdec.drafter import Drafter
from specdec.export import import_drafter
from specdec.nn.view import View
from specdec.target import Target
from tests.mtp import made

ROWS, DEPTH = 24, 3  # of a text, and drafts of a chain
ALLOWED = 1e-5  # of the greatest logit: angles are made in single precision, all else in double
Files = tuple[dict[str, Any], dict[str, Tensor]]


class Result(NamedTuple):
    """What became of a layout."""

    verdict: str  # equal, refused, DIFFERS, REFUSED or NOT REFUSED
    apart: float  # the greatest difference of a logit, of the greatest logit
    drafts: int  # tokens of the chain that are the same
    said: str  # the refusal, or what was read


def target_of(layout: Layout, config: Mapping[str, Any]) -> Target:
    """A tiny random Llama with the target's number of layers, in float64; of it an import reads sizes and both ends."""
    keys = flat(dict(config))
    torch.manual_seed(1)
    wide = keys.get("target_hidden_size") or WIDTH
    positions = layout.target_positions or keys.get("max_position_embeddings") or 2048
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": wide,
        "intermediate_size": 8,
        "num_attention_heads": 1,
    }
    own = LlamaConfig(
        **sizes, num_hidden_layers=layout.target_layers, head_dim=8, num_key_value_heads=1,
        max_position_embeddings=positions, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(own).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.model.embed_tokens.weight.mul_(30)
    return Target(model)


def text_of(layout: Layout, config: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens after each row (T,), states at every boundary (L + 1, T, S) and the last one after its norm (T, S)."""
    wide = flat(dict(config)).get("target_hidden_size") or WIDTH
    draw = torch.Generator().manual_seed(7)
    states_LTH = torch.randn(
        layout.target_layers + 1, ROWS, wide, generator=draw, dtype=torch.float64
    )
    scale_L11 = torch.linspace(0.5, 2, layout.target_layers + 1, dtype=torch.float64)[:, None, None]
    tokens_T = torch.randint(0, VOCAB - 2, (ROWS,), generator=draw)
    return (
        tokens_T,
        states_LTH * scale_L11,
        torch.randn(ROWS, wide, generator=draw, dtype=torch.float64),
    )


def ours(drafter: Drafter, tokens_T: Tensor, states_LTH: Tensor, final_TH: Tensor) -> Said:
    """What the imported drafter says, by the parts that decoding is made of."""
    config = drafter.config
    last = config.fusion.final_norm
    aux_1TNH = torch.stack([final_TH if last else states_LTH[b] for b in config.aux_layers], 1)[
        None
    ]
    depth = config.drafting.fixed_drafts or DEPTH
    proposer = Proposer(drafter, Chain(depth), ROWS)
    length_1, count_1 = torch.zeros(1, dtype=torch.int64), torch.full((1,), ROWS)
    frontier = proposer.extend(length_1, tokens_T[None], aux_1TNH, count_1)
    chain = [*frontier.logits_BKD[0]]
    while len(chain) < depth:
        token_11 = drafter.vocab.to_target(chain[-1].argmax())[None, None]
        drafted = len(chain)
        seen_1Q = torch.ones(1, drafted, dtype=torch.bool)
        frontier = proposer.memory.append(
            count_1, token_11, frontier.h_BKH, seen_1Q, torch.arange(drafted)
        )
        chain += [*frontier.logits_BKD[0]]
    chain_KV = spread(drafter, torch.stack(chain))
    if config.drafting.fixed_drafts:
        return Said(chain_KV, chain_KV)
    view = View.packed(torch.zeros(1, ROWS, dtype=torch.int64))
    step = drafter.step(tokens_T[None], drafter.fuse(aux_1TNH), view)
    return Said(spread(drafter, drafter.logits(step.normed_BTH)[0]), chain_KV)


def spread(drafter: Drafter, logits_TD: Tensor) -> Tensor:
    """Over the target's vocabulary."""
    full_TV = torch.full(
        (len(logits_TD), drafter.config.vocab_size), -torch.inf, dtype=torch.float64
    )
    full_TV[:, drafter.vocab.target_ids_D] = logits_TD.double()
    return full_TV


def apart(ours_said: Said, meant: Said) -> float:
    """The greatest difference of two drafters' logits, in the greatest of them; infinite where a token is missing."""
    most = 0.0
    for a, b in zip(ours_said, meant, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        there = b.isfinite()
        most = max(most, float((a[there] - b[there]).abs().max() / b[there].abs().max()))
    return most


def compare(
    layout: Layout, fault: Callable[[Layout, Files], Files | None] | None = None
) -> Result | None:
    """Import a layout's reduced files, with a fault if one is given, and compare with what the unchanged files mean;
    None where the layout has no place for the fault."""
    config = reduced(layout.config)
    tensors = tensors_of(layout, config)
    target = target_of(layout, config)
    files = (config, tensors)
    if fault is not None:
        changed = fault(
            layout,
            (json.loads(json.dumps(config)), {name: x.clone() for name, x in tensors.items()}),
        )
        if changed is None:
            return None
        files = changed
    with tempfile.TemporaryDirectory(prefix="imports-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(files[0]))
        save_file(files[1], Path(folder) / "model.safetensors")
        try:
            drafter = import_drafter(folder, target, aux_layers=layout.aux_layers or None).double()
        except ValueError as error:
            said = str(error).replace(f"{folder}: ", "").replace(folder, "DIR")
            known = bool(layout.refused and re.search(layout.refused, said))
            return Result("refused" if known else "REFUSED", 0.0, 0, said)
    text = text_of(layout, config)
    meant = Published(
        layout, config, tensors, target.embedding_weight(), target.head_weight()
    ).said(*text, DEPTH)
    ours_said = ours(drafter, *text)
    same = int((ours_said.chain_KV.argmax(-1) == meant.chain_KV.argmax(-1)).sum())
    difference = apart(ours_said, meant)
    boundaries = ", ".join(map(str, drafter.config.aux_layers))
    if layout.refused:
        return Result("NOT REFUSED", difference, same, boundaries)
    return Result("equal" if difference <= ALLOWED else "DIFFERS", difference, same, boundaries)


# --- modules of multi-token prediction ----------------------------------------------------------------------------


def modules() -> Iterator[tuple[Layout, Result]]:
    """Those of every family that is read, out of tiny checkpoints made of transformers' parts; and the refusals."""
    names = (
        "reconstructed: the family's config in transformers, tensors as its checkpoints name them"
    )
    for kind, name in PUBLISHED.items():
        with tempfile.TemporaryDirectory(prefix="imports-") as folder:
            target, _ = made(kind, Path(folder))
            layout = Layout(
                f"MTP of {name}",
                names.removeprefix("reconstructed: "),
                False,
                target.num_layers,
                {},
            )
            drafter = import_drafter(folder, target).double()
            text = text_of(layout, {"target_hidden_size": target.hidden_size})
            tokens_T = text[0] % target.vocab_size
            module = Module(Path(folder), target.embedding_weight(), target.head_weight())
        ours_said, meant = ours(drafter, tokens_T, *text[1:]), module.said(tokens_T, text[2], DEPTH)
        same = int((ours_said.chain_KV.argmax(-1) == meant.chain_KV.argmax(-1)).sum())
        difference = apart(ours_said, meant)
        verdict = "equal" if difference <= ALLOWED else "DIFFERS"
        yield layout, Result(verdict, difference, same, str(*drafter.config.aux_layers))
    for kind, tensor in REFUSED.items():
        layout = Layout(
            f"MTP of a {kind}",
            "its class and a tensor's name as vLLM 0.32 reads them",
            False,
            2,
            {},
        )
        with tempfile.TemporaryDirectory(prefix="imports-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps({"architectures": [kind]}))
            save_file({tensor: torch.ones(2, 2)}, Path(folder) / "model.safetensors")
            try:
                import_drafter(folder, target_of(layout, {}))
                yield layout, Result("NOT REFUSED", 0.0, 0, "")
            except ValueError as error:
                said = str(error).replace(f"{folder}: ", "")
                yield layout, Result("refused" if kind in said else "REFUSED", 0.0, 0, said)


# --- planted faults -------------------------------------------------------------------------------------------------


def _matrices(files: Files, *names: str) -> list[str]:
    return [name for name in files[1] if name.endswith(tuple(f"{each}.weight" for each in names))]


def rope_style(layout: Layout, files: Files) -> Files | None:
    """Rows of queries and keys as for channels rotated in pairs of neighbours."""
    keys = flat(files[0])
    if keys.get("kv_lora_rank"):
        return None
    width = keys.get("head_dim") or WIDTH // keys["num_attention_heads"]
    for name in _matrices(files, "q_proj", "k_proj"):
        files[1][name] = (
            files[1][name]
            .unflatten(0, (-1, 2, width // 2))
            .transpose(1, 2)
            .flatten(0, 2)
            .contiguous()
        )
    return files


def rope_base(layout: Layout, files: Files) -> Files:
    """Another base."""
    for keys in (files[0], files[0].get(LAYER, {})):
        for block in (keys, keys.get("rope_parameters") or {}):
            if "rope_theta" in block or block is flat(files[0]):
                block["rope_theta"] *= 7
    if flat(files[0]).get("rope_theta") is None and not flat(files[0]).get("rope_parameters"):
        files[0]["rope_theta"] = 70000.0
    return files


def missing_norm(layout: Layout, files: Files) -> Files:
    """The norm after the attention at ones, as an engine leaves a norm that a file lacks."""
    name = next(name for name in files[1] if name.endswith("post_attention_layernorm.weight"))
    files[1][name] = torch.ones_like(files[1][name])
    return files


def norm_epsilon(layout: Layout, files: Files) -> Files:
    """A tenth in place of a millionth."""
    holder = files[0].get(LAYER, files[0])
    holder["rms_norm_eps"] = 0.1
    return files


def boundary_order(layout: Layout, files: Files) -> Files | None:
    """The first state's columns of ``fc`` and the last one's exchanged."""
    if {"narrow", "no_fc"} & set(layout.extra):
        return None
    wide = flat(files[0]).get("target_hidden_size") or WIDTH
    name = _matrices(files, "fc")[0]
    parts = [*files[1][name].split(wide, 1)]
    files[1][name] = torch.cat([parts[-1], *parts[1:-1], parts[0]], 1)
    return files


def boundary_off(layout: Layout, files: Files) -> Files | None:
    """The highest state is of one layer less."""
    keys = files[0]
    holders = [(keys.get("dflash_config"), "target_layer_ids"), (keys, "aux_hidden_state_layer_ids"), (keys, IDS),
               (keys.get("eagle_config"), IDS)]  # fmt: skip
    named = [(holder, key) for holder, key in holders if holder and holder.get(key)]
    if layout.aux_layers or not named or max(named[0][0][named[0][1]]) == layout.target_layers:
        return None
    for holder, key in named:
        holder[key] = [*holder[key][:-1], holder[key][-1] - 1]
    return files


def offsets_off(layout: Layout, files: Files) -> Files | None:
    """``d2t`` points one token too far."""
    if "d2t" not in files[1]:
        return None
    files[1]["d2t"] = files[1]["d2t"] + 1
    files[1].pop("t2d", None)
    return files


def feedback(layout: Layout, files: Files) -> Files | None:
    """The other state is fed back."""
    if {"narrow", "block", "mask_hidden"} & set(layout.extra):
        return None
    files[0]["norm_output"] = not files[0].get("norm_output", False)
    return files


def halves(layout: Layout, files: Files) -> Files | None:
    """The feature's half before the embedding's."""
    name = _matrices(files, "q_proj", "q_a_proj", "fc")
    name = [each for each in name if files[1][each].shape[1] == 2 * WIDTH]
    if not name or "block" in layout.extra:
        return None
    files[1][name[0]] = files[1][name[0]].roll(WIDTH, 1)
    return files


def residual(layout: Layout, files: Files) -> Files | None:
    """The residual path starts at the other of the feature and its norm."""
    if {"narrow", "block"} & set(layout.extra):
        return None
    files[0]["norm_before_residual"] = not files[0].get("norm_before_residual", False)
    return files


def window(layout: Layout, files: Files) -> Files | None:
    """A window where there is none, and none where there is one."""
    if {"narrow", "block"} & set(layout.extra):
        return None
    keys, layers = files[0].get(LAYER, files[0]), flat(files[0]).get("num_hidden_layers", 1)
    kind = (
        "full_attention"
        if "sliding_attention" in keys.get("layer_types", ())
        else "sliding_attention"
    )
    keys["layer_types"], keys["sliding_window"] = [kind] * layers, 16
    return files


def rounded(layout: Layout, files: Files) -> Files:
    """Weights in bfloat16."""
    return files[0], {
        name: x.bfloat16() if x.is_floating_point() else x for name, x in files[1].items()
    }


FAULTS: dict[str, Callable[[Layout, Files], Files | None]] = {
    "rope style": rope_style, "rope base": rope_base, "a norm left at ones": missing_norm,
    "a norm's epsilon": norm_epsilon, "boundary order": boundary_order, "a boundary off by one": boundary_off,
    "d2t off by one": offsets_off, "feedback": feedback, "embedding and feature exchanged": halves,
    "where the residual starts": residual, "window": window, "dtype": rounded,
}  # fmt: skip


def planted(chosen: list[Layout]) -> dict[str, Counter[str]]:
    """By fault, of how many layouts it was found, and where it was not."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
    for layout in chosen:
        if layout.refused:
            continue
        for name, fault in FAULTS.items():
            result = compare(layout, fault)
            if result is None:
                continue
            refused = result.verdict == "REFUSED"
            counts[name]["planted"] += 1
            counts[name]["refused"] += refused
            counts[name]["found"] += refused or result.verdict == "DIFFERS"
            if result.verdict == "equal":
                counts[name][f"not in {layout.name}"] += 1
    return counts


# --- the report -----------------------------------------------------------------------------------------------------


def report(
    results: list[tuple[Layout, Result]],
    faults: Mapping[str, Counter[str]],
    about: Mapping[str, Any],
) -> list[str]:
    """The page."""
    verdicts = Counter(result.verdict for _, result in results)
    equal = [
        (layout, result)
        for layout, result in results
        if result.verdict in ("equal", "DIFFERS", "NOT REFUSED")
    ]
    refusals = [
        (layout, result) for layout, result in results if "refused" in result.verdict.lower()
    ]
    public = sum(layout.public for layout, _ in results)
    lines = [
        "# Published layouts, imported", "",
        f"{len(results)} layouts: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}. The "
        f"keys of {public} come from a public file or a public quotation of one, those of {len(results) - public} are "
        "reconstructed from documentation, as the column says. Sizes are reduced (hidden size, heads in their ratio, "
        f"vocabulary, feed-forward), weights are random, and loud: {ROWS} rows and a chain of {DEPTH} (a block "
        "drafter's masks) through the parts that decoding is made of, beside a forward written from the layout in "
        f"plain torch. Equal: no logit is further apart than {ALLOWED:g} of the greatest.", "",
        *harness.conditions(about, {"torch": torch.__version__}), "",
        *harness.table(
            ("layout", "keys", "of a target of", "boundaries read", "greatest difference", "drafts equal", "verdict"),
            [(layout.name, f"{'file' if layout.public else 'reconstructed'}: {layout.source}",
              f"{layout.target_layers} layers", result.said, f"{result.apart:.1e}", str(result.drafts), result.verdict)
             for layout, result in equal], 4,
        ), "", "## Refused", "",
        *harness.table(
            ("layout", "keys", "sentence"),
            [(layout.name, f"{'file' if layout.public else 'reconstructed'}: {layout.source}",
              result.said.replace("|", r"\|")) for layout, result in refusals], 3,
        ),
    ]  # fmt: skip
    if faults:
        kinds = ("planted", "found", "refused")
        rows = [(name, *(str(counts[kind]) for kind in kinds)) for name, counts in faults.items()]
        what = "Each in every layout that has a place for it; found: logits differ, or the import refuses."
        columns = ("fault", "planted", "found", "of them by a refusal")
        lines += ["", "## Planted faults", "", what, "", *harness.table(columns, rows)]
        missed = [
            f"{name}: {where}"
            for name, counts in faults.items()
            for where in counts
            if where.startswith("not")
        ]
        lines += ["", *(f"- Missed: {each}" for each in missed)]
    return lines


def main(argv: list[str]) -> int:
    """Compare, print, and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("--only", help="layouts whose name has this in it")
    parser.add_argument("--plant", action="store_true", help="plant faults, too")
    parser.add_argument(
        "--out", type=Path, help="a report, .md; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="write over one that is there")
    options = parser.parse_args(argv)
    harness.check_out(options.out, options.force)
    torch.set_num_threads(1)
    about = harness.machine(1)
    chosen = [
        layout
        for layout in layouts()
        if not options.only or options.only.lower() in layout.name.lower()
    ]
    results: list[tuple[Layout, Result]] = []
    for layout in chosen:
        result = compare(layout)
        assert result is not None
        results.append((layout, result))
        harness.tell(f"{layout.name}: {result.verdict} {result.apart:.1e} {result.said}")
    if not options.only:
        results += modules()
    faults = planted(chosen) if options.plant else {}
    raw = {
        "layouts": [{"name": layout.name, **result._asdict()} for layout, result in results],
        "faults": {name: dict(counts) for name, counts in faults.items()}, "about": about,
    }  # fmt: skip
    harness.keep(options.out, report(results, faults, about), raw)
    wrong = any(result.verdict not in ("equal", "refused") for _, result in results)
    return int(wrong or any(counts["found"] < counts["planted"] for counts in faults.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
