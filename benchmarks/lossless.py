"""Speculative decoding beside the target alone: greedy tokens in float32, and draws against the exact distribution.

Greedily, every text must be the one that ``generate`` of an untouched transformers model says, of five families, in
chains and trees, in batches of texts of all lengths, eager and compiled, and of four hybrids with recurrent layers, in
chains one by one. A token that differs is a near-tie if the two tokens' logits are at most ``TOLERANCE`` units in
float32's last place apart, or in a hybrid at most twice what its own logits move by from a text as a whole to token by
token, since a recurrent layer sums the two otherwise. Sampled texts of a small vocabulary are counted against the
probabilities of all of them, enumerated with transformers' own logits warpers. Rules of acceptance with a planted fault
must be found out by the same checks.

``python benchmarks/lossless.py --out benchmarks/results/lossless_<hardware>_<yyyymm>.md``
"""

import argparse
import copy
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from scipy.stats import chi2
from torch import Tensor

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from specdec.decoding import (
    Chain,
    DraftShape,
    DynamicTree,
    Request,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
    accept,
)
from specdec.decoding.accept import Accepted, DraftTree, Greedy, Rule
from specdec.decoding.round import SpeculativeRound
from specdec.decoding.sampling import AcceptanceNoise
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.rounding import moved_logits
from tests import perfect
from tests.decoding.test_accept_wrong import (
    NoResidual,
    OneHotDrawsAgain,
    ResidualNotNormalised,
    WithoutTheDrafter,
)
from tests.target import hybrids
from tests.tiny import VOCAB

TOLERANCE = 64.0  # units in the last place of the greatest logit's float32
LENGTHS = (1, 2, 5, 9, 14, 30)  # of the prompts
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}
# a model, how far its context leads it astray, its drafter's design, and what of it is compiled: shape and batch
FAMILIES: dict[str, tuple[Callable[[], hf.PreTrainedModel], float, str, tuple[str, int] | None]] = {
    "Llama": (lambda: perfect.FAMILIES["llama"](12), 0.75, "eagle3_1", ("chain", 4)),
    "Qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=12)), 0.8, "eagle3", ("static tree", 8)),
    "Gemma 2": (lambda: perfect.FAMILIES["gemma2"](12), 2.1, "eagle3_1", ("dynamic tree", 1)),
    "Mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, head_dim=12, **EXPERTS)), 0.4, "eagle3", None),
    "Phi": (lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES)), 0.6, "eagle3_1", None),
}  # fmt: skip
# with recurrent layers, of which chains alone are decoded; their four layers are kept
HYBRIDS = {
    "Qwen3.5": ("qwen3_5", 0.8), "Falcon-H1": ("falcon_h1", 0.6), "Nemotron-H": ("nemotron_h", 0.6),
    "LFM2": ("lfm2", 0.3),
}  # fmt: skip
SHAPES: dict[str, DraftShape] = {
    "chain": Chain(4), "static tree": StaticTree(), "dynamic tree": DynamicTree(depth=4, top_k=3, nodes=12),
}  # fmt: skip
BATCHES = (1, 4, 8)
HYBRID_BATCHES = (1, 4)

SMALL, LENGTH = 5, 4  # vocabulary and tokens of the sampled texts
PROMPTS = ([3, 1], [0, 4, 4, 2, 1, 0, 3])  # which they follow in turn,
RUN = 500  # texts each time
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1)))
DRAWN = "without_replacement"
SETTINGS: tuple[tuple[DraftShape, int, Sampling], ...] = (
    (Chain(2), 32, Sampling(1.0, rule="one_hot")),
    (Chain(3), 1, Sampling(1.3, top_p=0.85, rule="one_hot")),
    (TREE, 64, Sampling(0.8, top_k=4, rule="one_hot")),
    (DynamicTree(depth=3, top_k=2, nodes=6), 64, Sampling(1.0, rule="one_hot")),
    (Chain(2), 64, Sampling(1.0, rule=DRAWN)),
    (Chain(3), 32, Sampling(0.7, top_k=3, rule=DRAWN, draft_temperature=1.5)),
    (TREE, 8, Sampling(1.0, rule=DRAWN)),
    (TREE, 64, Sampling(0.9, top_p=0.9, top_k=4, rule=DRAWN, draft_temperature=0.6)),
)
LEAST = 5.0  # draws expected in a cell of the chi-square; rarer texts are counted together
ALPHA, MORE = 0.01, 4  # of all sampled settings together (Bonferroni)
FOUND = 1e-6  # the p-value that finds a planted fault


class NodeBefore(Greedy):
    def accept(self, tree: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(tree, p_BNV.roll(1, 1), noise)


# the rule that is replaced, by what, and the sampled setting in which it must be found; None for a greedy one
FAULTS: dict[str, tuple[str, Rule, int | None]] = {
    "greedy: a draft judged after the node before its parent": ("greedy", NodeBefore(), None),
    "a draft accepted with r, not r / q": (DRAWN, WithoutTheDrafter(), 4),
    "the residual is the target's distribution": (DRAWN, NoResidual(), 4),
    "the residual is not renormalized": (DRAWN, ResidualNotNormalised(), 6),
    "the token after refused drafts is drawn anew": ("one_hot", OneHotDrawsAgain(), 0),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Inside, decoders that are made have a fault."""
    name, rule, _ = FAULTS[fault]
    right = accept.RULES[name]
    accept.RULES[name] = rule
    try:
        yield
    finally:
        accept.RULES[name] = right


@torch.inference_mode()
def greedy(
    family: str, shape: str, batch: int, compiled: bool, texts: int, new: int, seed: int
) -> dict[str, Any]:
    """Texts of one family by one decoder beside ``generate``: tokens, what was accepted, ``gaps`` of those that differ.

    A gap is in units in the last place, infinite for a token that is missing.
    """
    if family in HYBRIDS:
        (name, context), layers, preset = HYBRIDS[family], 4, "eagle3_1"
        build = hybrids.FAMILIES[name]
    else:
        (build, context, preset, _), layers = FAMILIES[family], 3
    torch.manual_seed(0)
    model = perfect.make_markov(build(), context, layers=layers).float()
    alone = copy.deepcopy(model)  # a Target gives its model another attention
    target = Target(model)
    spec = replace(DrafterSpec.preset(preset), draft_vocab_size="all", aux_layers=[1, 2, 3])
    drafter = perfect.disturb(perfect.perfect_drafter(target, spec), 0.3).float()
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(VOCAB, (LENGTHS[n % len(LENGTHS)],), generator=generator).tolist()
        for n in range(texts)
    ]
    decoder = SpeculativeDecoder(target, drafter, SHAPES[shape], batch=batch, compiled=compiled)
    made = dict(decoder.generate_all([Request(prompt, new) for prompt in prompts], ()))
    wanted = _generate(alone, prompts, new)
    apart = {n: differences(alone, prompts[n], made[n].ids, wanted[n]) for n in range(texts)}
    gaps = [gap for found in apart.values() for gap in found]
    # a recurrent layer sums a whole text otherwise than one token after another: what the model itself is off by counts
    own = [
        2 * moved(alone, [*prompts[n], *wanted[n]])
        for n, found in apart.items()
        if found and family in HYBRIDS
    ]
    passes = [n for one in made.values() for n in one.accepted]
    grams = [
        len(set(zip(*(text[k:] for k in range(4)), strict=False))) / (new - 3) for text in wanted
    ]
    following = sum(perfect.astray(text) for text in wanted) / (texts * (new - 1))
    return {
        "family": family, "drafter": preset, "shape": shape, "batch": batch, "compiled": compiled, "texts": texts,
        "tokens": texts * new, "passes": len(passes), "accepted": sum(passes),
        "refusing": sum(n < SHAPES[shape].depth for n in passes), "gaps": gaps, "astray": following,
        "tolerance": max([TOLERANCE, *own]),
        "different_tokens": len({token for text in wanted for token in text}), "different_4_grams": sum(grams) / texts,
    }  # fmt: skip


def _generate(model: hf.PreTrainedModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    """transformers' own greedy texts; prompts of one length side by side, so that nothing is padded."""
    found: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        rows = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[n] for n in rows])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
        )
        found |= zip(rows, out[:, length:].tolist(), strict=True)
    return [found[n] for n in range(len(prompts))]


@torch.inference_mode()
def differences(
    model: hf.PreTrainedModel, prompt: list[int], ids: list[int], wanted: list[int]
) -> list[float]:
    """Gaps of the logits where a text is not the wanted one: of both tokens where they part, and from there on of each
    token that is not the likeliest after the text's own beginning."""
    if ids == wanted:
        return []
    lacking = [float("inf")] * (len(wanted) - len(ids))
    logits_TV = model(torch.tensor([[*prompt, *ids[:-1]]]), use_cache=False).logits[
        0, len(prompt) - 1 :
    ]
    ulp_T = np.spacing(logits_TV.abs().amax(-1).numpy()).astype(float)
    logits = logits_TV.double().numpy()
    gaps = (logits.max(-1) - logits[np.arange(len(ids)), ids]) / ulp_T
    parting = next((n for n, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), None)
    if parting is None:
        return lacking
    apart = float(
        abs(logits[parting, ids[parting]] - logits[parting, wanted[parting]]) / ulp_T[parting]
    )
    return [
        max(apart, float(gaps[parting])),
        *(float(gap) for gap in gaps[parting + 1 :] if gap > 0),
        *lacking,
    ]


@torch.inference_mode()
def moved(model: hf.PreTrainedModel, ids: list[int]) -> float:
    """By how many units in the last place a model moves its logits from a whole text to token by token, at most."""
    target = Target(copy.deepcopy(model))
    ids_1T = torch.tensor([ids])
    ulp = np.spacing(model(ids_1T, use_cache=False).logits.abs().max().numpy())
    return float(moved_logits(target, ids_1T).max()) / float(ulp)


def small_pair(seed: int = 0) -> tuple[hf.PreTrainedModel, Target, Drafter]:
    """A model whose next token hangs on all before it, the same as a target, and a random drafter with four tokens."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": SMALL,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, **sizes, "head_dim": 8})).eval()
    spec = replace(DrafterSpec.preset("eagle3_1"), draft_vocab_size=SMALL - 1, aux_layers=[0, 1, 2])
    identity: dict[str, str | int | None] = {"source": "small"}
    config = DrafterConfig.for_target(
        spec, model.config, vocab_size=SMALL, num_target_layers=2, identity=identity
    )
    drafter = Drafter(config, torch.tensor([0, 1, 3, 4])).requires_grad_(False)
    for module in (model, drafter):
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                weight.data.normal_(
                    std=0.25 if "embed_tokens" in name or "lm_head" in name else 0.7
                )
    return copy.deepcopy(model), Target(model), drafter


@torch.inference_mode()
def exact(model: hf.PreTrainedModel, sampling: Sampling, prompt: list[int]) -> tuple[Tensor, float]:
    """Probabilities of all texts in the order of their digits, (V^L,) float64; and how much the last token hangs on
    more than the one before it: the mean total variation distance from the mean over what stands before that."""
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(sampling.temperature)])
    warpers += [hf.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [hf.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    ids_PT, joint_P, memory = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64), 0.0
    for _ in range(LENGTH):
        p_PV = warpers(ids_PT, model(ids_PT, use_cache=False).logits[:, -1]).double().softmax(-1)
        if len(joint_P) > SMALL:
            weight = joint_P.view(-1, SMALL, 1)
            mean = (weight * p_PV.view(-1, SMALL, SMALL)).sum(0) / weight.sum(0).clamp_min(1e-300)
            memory = float((weight * (p_PV.view(-1, SMALL, SMALL) - mean).abs()).sum() / 2)
        joint_P = (joint_P[:, None] * p_PV).flatten()
        ids_PT = torch.cat(
            [ids_PT.repeat_interleave(SMALL, 0), torch.arange(SMALL).repeat(len(ids_PT))[:, None]],
            1,
        )
    return joint_P, memory


class AgainRound(SpeculativeRound):
    """A row that begins its last prompt again skips the prompt's pass: its keys are in the caches still."""

    def prefill(self, b: int, prompt: list[int], seed: int) -> Tensor:
        known = self.__dict__.setdefault("known", {})
        if known.get(b, ([],))[0] != prompt:
            super().prefill(b, prompt, seed)
            ids_1T = torch.tensor([prompt])
            final_1TH = self.target.forward(
                ids_1T, View.packed(torch.zeros_like(ids_1T)), ()
            ).final_BTH
            known[b] = (
                prompt,
                self.target.logits(final_1TH[:, -1:])[:, 0],
                self.aux_BPLH[b, :1].clone(),
            )
        _, logits_1V, self.aux_BPLH[b, :1] = known[b]
        self.live_B[b], self.length_B[b], self.count_B[b], self.seed_B[b] = (
            True,
            len(prompt),
            1,
            seed,
        )
        root_1 = self.sampling.draw(logits_1V, self.seed_B[b : b + 1], self.length_B[b : b + 1])
        self.root_B[b : b + 1] = self.fresh_BP[b, :1] = root_1
        return root_1


class AgainDecoder(SpeculativeDecoder):
    """One that draws many texts after each prompt."""

    def _new_round(self, longest: int) -> SpeculativeRound:
        return AgainRound(self.target, self.drafter, self.shape, self.sampling, longest, self.batch)


def sampled(setting: int, draws: int, seed: int) -> dict[str, Any]:
    """Draws of one setting, each from a seed of its own, by Pearson's chi-square."""
    shape, batch, sampling = SETTINGS[setting]
    model, target, drafter = small_pair()
    requests = [Request(PROMPTS[n // RUN % 2], LENGTH, seed + n) for n in range(draws)]
    counts, passes = np.zeros((2, SMALL**LENGTH)), list[int]()
    for n, made in AgainDecoder(target, drafter, shape, sampling, batch=batch).generate_all(
        requests, ()
    ):
        counts[n // RUN % 2, int("".join(map(str, made.ids)), SMALL)] += 1
        passes += made.accepted
    statistic, df, impossible, memory = 0.0, 0, 0, []
    for seen, prompt in zip(counts, PROMPTS, strict=True):
        joint, more = exact(model, sampling, prompt)
        expected = joint.numpy() * seen.sum()
        common = expected >= LEAST
        rest = ~common & (expected > 0)
        cells = [
            *zip(seen[common], expected[common], strict=True),
            (seen[rest].sum(), expected[rest].sum()),
        ]
        cells = [cell for cell in cells if cell[1] > 0]
        statistic += sum((o - e) ** 2 / e for o, e in cells)
        df, impossible, memory = (
            df + len(cells) - 1,
            impossible + int(seen[expected == 0].sum()),
            [*memory, more],
        )
    return {
        "shape": shape.name, "batch": batch, "rule": sampling.rule, "sampling": vars(sampling), "draws": draws,
        "chi_square": float(statistic), "df": df, "p_value": 0.0 if impossible else float(chi2.sf(statistic, df)),
        "impossible": impossible, "passes": len(passes), "accepted": sum(passes), "memory": min(memory),
    }  # fmt: skip


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One check, in a process with one thread; with a ``fault`` that is planted, if the job names one."""
    torch.set_num_threads(1)
    with planted(job["fault"]) if job["fault"] else nullcontext():
        found = greedy(**job["greedy"]) if "greedy" in job else sampled(**job["sampled"])
    return {**found, "fault": job["fault"]}


def plan(texts: int, new: int, draws: int, fault_draws: int) -> list[dict[str, Any]]:
    """All checks, the long ones first; every one has prompts or seeds of its own."""

    def greedily(
        family: str, shape: str, batch: int, graph: bool, seed: int, texts: int = texts
    ) -> dict[str, Any]:
        return {"family": family, "shape": shape, "batch": batch, "compiled": graph, "texts": texts, "new": new,
                "seed": seed}  # fmt: skip

    graphs = [(family, *one[-1], True) for family, one in FAMILIES.items() if one[-1]]
    eager = [(*one, False) for one in itertools.product(FAMILIES, SHAPES, BATCHES)]
    tokens = [
        {"fault": None, "greedy": greedily(*one, seed=n)} for n, one in enumerate([*graphs, *eager])
    ]
    sizes = [draws if batch > 1 else draws // 10 for _, batch, _ in SETTINGS]
    drawn = [
        {"fault": None, "sampled": {"setting": n, "draws": m, "seed": 10**6 * n}}
        for n, m in enumerate(sizes)
    ]
    faults: list[dict[str, Any]] = []
    for n, (fault, (_, _, setting)) in enumerate(FAULTS.items(), start=len(SETTINGS)):
        one = {"sampled": {"setting": setting, "draws": fault_draws, "seed": 10**6 * n}}
        if setting is None:
            one = {"greedy": greedily("Llama", "chain", 4, False, 0, min(texts, 8))}
        faults.append({"fault": fault, **one})
    of_hybrids = [
        {
            "fault": None,
            "greedy": greedily(family, "chain", batch, False, 10**4 + n, texts * 5 // 4),
        }
        for n, (family, batch) in enumerate(itertools.product(HYBRIDS, HYBRID_BATCHES))
    ]
    return [*tokens[: len(graphs)], *drawn, *tokens[len(graphs) :], *faults, *of_hybrids]


def split(found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The gaps of a greedy check: near-ties, and wrong tokens."""
    allowed = tolerance(found)
    return [gap for gap in found["gaps"] if gap <= allowed], [
        gap for gap in found["gaps"] if gap > allowed
    ]


def tolerance(found: dict[str, Any]) -> float:
    """Units in the last place that a greedy check allows."""
    return float(found.get("tolerance", TOLERANCE))


def wrong(found: dict[str, Any]) -> bool:
    """Whether a check says that the texts are not the target's; beside a planted fault it must."""
    if "gaps" in found:
        return bool(split(found)[1])
    if found["fault"]:
        return bool(found["p_value"] < FOUND)
    return max(found["p_value"], found.get("again", {"p_value": 0.0})["p_value"]) < ALPHA / len(
        SETTINGS
    )


def report(found: list[dict[str, Any]]) -> list[str]:
    """Tables of Markdown, the greedy families first."""
    plain = [one for one in found if not one["fault"]]
    tokens, drawn = (
        [one for one in plain if "gaps" in one],
        [one for one in plain if "gaps" not in one],
    )

    def length(one: dict[str, Any]) -> str:
        return f"{1 + one['accepted'] / one['passes']:.2f}"

    rows = [
        [one["family"], one["drafter"], one["shape"], "compiled" if one["compiled"] else "eager", str(one["batch"]),
         f"{one['tokens']:,}", length(one), f"{one['refusing'] / one['passes']:.0%}", f"{one['astray']:.0%}",
         f"{one['different_tokens']} of {VOCAB}", f"{one['different_4_grams']:.0%}",
         *(str(len(part)) for part in split(one))]
        for one in tokens
    ]  # fmt: skip
    gaps = [gap for one in tokens for gap in one["gaps"]]
    near = sum(len(split(one)[0]) for one in tokens)
    lines = [
        f"**Greedy, float32: {sum(one['tokens'] for one in tokens):,} tokens, {len(gaps) - near} wrong, "
        f"{near} near-ties** (tokens other than the target's with logits at most {TOLERANCE:.0f} units in float32's "
        "last place apart, or of a hybrid twice as many as its own logits move from a text as a whole to token by token"
        + (f"; the widest {max(gaps):.1f}, of {max(map(tolerance, tokens)):,.0f} allowed" if gaps else "") + ").", "",
        f"Texts beside transformers' `generate`, prompts of {LENGTHS} tokens in turn. Refusing: passes that refused a "
        "draft; off the cycle: tokens that are not the usual successor of the one before, so hang on more; 4-grams: "
        "how many of a text's are different, which is little where it loops.", "",
        *harness.table(["family", "drafter", "shape", "run", "batch", "tokens", "acceptance length", "refusing",
                        "off the cycle", "tokens used", "different 4-grams", "near-ties", "wrong"], rows, 4), "",
        f"**Sampled: {sum(one['draws'] for one in drawn):,} draws of {LENGTH} tokens of a vocabulary of {SMALL}, "
        f"{sum(wrong(one) for one in drawn)} of {len(drawn)} settings off** (chi-square against all {SMALL**LENGTH} "
        f"texts after each of two prompts; p below {ALPHA / len(SETTINGS):.5f}, which is {ALPHA} for all, and "
        f"again in {MORE} times as many fresh draws).", "",
        "Memory: the mean total variation distance of the last token's probabilities from their mean over all texts "
        "with the same token before it, the prompt with the lesser; 0 where only that token mattered.", "",
    ]  # fmt: skip
    columns = [
        "batch",
        "temperature, top-k, top-p",
        "draws",
        "acceptance length",
        "memory",
        "chi-square",
        "df",
        "p",
        "p again",
    ]

    def figures(one: dict[str, Any]) -> list[str]:
        how, again = one["sampling"], one.get("again")
        return [str(one["batch"]), f"{how['temperature']}, {how['top_k']}, {how['top_p']}", f"{one['draws']:,}",
                length(one), f"{one['memory']:.3f}", f"{one['chi_square']:.1f}", str(one["df"]),
                f"{one['p_value']:.2g}", f"{again['p_value']:.2g} of {again['draws']:,}" if again else "-"]  # fmt: skip

    lines += harness.table(
        ["shape", "rule", *columns],
        [[one["shape"], one["rule"], *figures(one)] for one in drawn],
        2,
    )
    faults = [
        [one["fault"], f"{len(split(one)[1])} of {one['tokens']:,} tokens wrong"
         if "gaps" in one else f"p {one['p_value']:.2g} of {one['draws']:,} draws", "yes" if wrong(one) else "NO"]
        for one in found if one["fault"]
    ]  # fmt: skip
    return [*lines, "", *harness.table(["planted fault", "what is seen", "found"], faults, 3)]


def main() -> int:
    """All checks in two processes; the exit status is 1 if a text is not the target's, or a planted fault not found."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--texts", type=int, default=24, help="of each greedy setting")
    p.add_argument("--new", type=int, default=96, help="tokens of each of them")
    p.add_argument(
        "--draws", type=int, default=14500, help="of each sampled setting; a tenth one by one"
    )
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    p.add_argument(
        "--resume",
        type=Path,
        help="a .json of an earlier run of the same checks, which are not made again",
    )
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    about, jobs = harness.machine(1), plan(a.texts, a.new, a.draws, 3000)
    found: dict[int, dict[str, Any]] = {}
    if a.resume:
        earlier = json.loads(a.resume.read_text())
        found, about["begun"] = (
            dict(enumerate(earlier["checks"])),
            earlier["run"].get("begun", earlier["run"]),
        )
        if [one["fault"] for one in found.values()] != [job["fault"] for job in jobs][: len(found)]:
            raise ValueError(f"{a.resume}: of other checks")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(work, job): n for n, job in enumerate(jobs) if n not in found}
        for one in as_completed(waiting):
            found[waiting[one]] = one.result()
            harness.tell(f"{len(found)} of {len(jobs)} checks: {jobs[waiting[one]]}")
        off = [
            n
            for n, job in enumerate(jobs)
            if "sampled" in job and not job["fault"] and wrong(found[n])
        ]
        fresh = [
            {
                "draws": MORE * jobs[n]["sampled"]["draws"],
                "seed": 10**9 + jobs[n]["sampled"]["seed"],
            }
            for n in off
        ]
        asked = [
            {"fault": None, "sampled": jobs[n]["sampled"] | more}
            for n, more in zip(off, fresh, strict=True)
        ]
        for n, one in zip(off, pool.map(work, asked), strict=True):
            found[n]["again"] = one
    every = [found[n] for n in range(len(jobs))]
    head = [
        f"# Losslessness, {about['date'][:10]}\n",
        *harness.conditions(about, about["versions"]),
        "",
    ]
    harness.keep(
        a.out, [*head, *report(every)], {"run": about, "tolerance": TOLERANCE, "checks": every}
    )
    return int(any(wrong(one) != bool(one["fault"]) for one in every))


if __name__ == "__main__":
    sys.exit(main())
