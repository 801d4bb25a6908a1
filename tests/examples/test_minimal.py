"""``examples/minimal.py`` stands alone, and is an oracle: specdec's losses, gradients, drafts and texts are its own.

Weights go from the one to the other by a table of names; nothing else is shared but the target.
"""

import ast
import dataclasses
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from specdec.data import Batch
from specdec.decoding import Chain, DraftTree, PlainDecoder, SpeculativeDecoder
from specdec.decoding.round import SpeculativeRound
from specdec.drafter import Drafter
from specdec.export import tensors
from specdec.target import Target
from specdec.training.building import FromTarget
from specdec.training.step import ObjectiveConfig, StepOutput, TrainStep, target_outputs
from specdec.training.step_weights import Decay
from tests.examples import load_example
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.published import published
from tests.tiny import VOCAB, presets, tiny_config, tiny_drafter, tiny_target

FILE = Path(__file__).parents[2] / "examples" / "minimal.py"
K, T, DECAY = 4, 14, 0.8
LAYER = "layers.layers.0"
NAMES = {
    "embed_tokens": "embed_tokens",
    **{f"fc_norm.{n}": f"norms.aux.{n}" for n in range(3)},
    "fc": "fusion.fc",
    "input_layernorm": "norms.embed",
    "hidden_norm": "norms.hidden",
    **{f"{x}_proj": f"{LAYER}.attention.{x}_proj" for x in "qkvo"},
    "post_attention_layernorm": f"{LAYER}.post_attention_norm",
    **{f"{x}_proj": f"{LAYER}.mlp.{x}_proj" for x in ("gate", "up", "down")},
    "norm": "norms.output",
    "lm_head": "lm_head",
}
"""minimal's parameters, and specdec's under the names of one matrix a projection."""


minimal: Any = load_example(FILE)


def specdec_name(name: str) -> str:
    return f"{NAMES[name.removesuffix('.weight')]}.weight"


def twin(drafter: Drafter, target: Target) -> Any:
    """minimal's drafter with the weights of specdec's."""
    other = minimal.Drafter(target.config, drafter.vocab.target_ids_D).to(
        drafter.lm_head.weight.dtype
    )
    assert other.aux_layers == list(drafter.config.aux_layers)
    weights = published(drafter)
    assert set(weights) == {f"{name}.weight" for name in NAMES.values()}
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[specdec_name(name)])
    return other


# ------------------------------------------------------------------------------------------------ the file itself


def test_it_is_short_and_stands_alone() -> None:
    source = FILE.read_text()
    assert len(source.splitlines()) <= 300
    tree = ast.walk(ast.parse(source))
    imported = {
        name.split(".")[0]
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    assert "importlib" not in imported and "__import__" not in source


# ------------------------------------------------------------------------------------------------ training


def batch_of(seed: int) -> Batch:
    """Rows of one document each, the last two padded; prompts and answers in turn."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, T, generator=generator) < 0.8
    documents = torch.zeros(4, T, dtype=torch.int64)
    documents[2, T - 3 :] = documents[3, 4:] = -1
    ids = torch.randint(0, VOCAB, (4, T), generator=generator)
    return Batch(ids, mask & (documents >= 0), documents)


class Ended(NamedTuple):
    """A target whose texts end with these tokens."""

    of: Target
    eos_token_ids: set[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


def trained_by_specdec(drafter: Drafter, target: Target, batch: Batch, steps: int) -> StepOutput:
    objective = ObjectiveConfig(steps=steps, weights=Decay(DECAY))
    return TrainStep(drafter, objective)(batch, target_outputs(target, drafter, batch, objective))


def trained_by_minimal(
    drafter: Any, target: Target, batch: Batch, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    said = minimal.read(target.model, drafter, batch.ids_BT)
    return minimal.ttt_loss(drafter, batch.ids_BT, batch.loss_mask_BT, *said, steps, DECAY)


@pytest.mark.parametrize("seed", range(2))
def test_losses_of_every_step_and_their_gradients_are_equal(seed: int) -> None:
    target, batch = tiny_target(seed), batch_of(seed)
    drafter = tiny_drafter(presets()["eagle3_1"], seed).requires_grad_()
    drafter.embed_tokens.requires_grad_(False)
    other = twin(drafter, target)
    other.embed_tokens.requires_grad_(False)

    out = trained_by_specdec(drafter, target, batch, K)
    loss, sums, counts = trained_by_minimal(other, target, batch, K)
    assert out.counts is not None
    supervised, rows = out.counts.supervised_K, out.counts.rows_K
    # the draft vocabulary lacks some favourites
    assert 0 < float(rows.sum()) < float(supervised.sum())
    assert counts.tolist() == rows.tolist()
    torch.testing.assert_close(sums, out.counts.loss_KN[:, 0], rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, out.loss, rtol=1e-12, atol=0)

    out.loss.backward()
    loss.backward()
    theirs = tensors.to_published(
        {name: gradient(x) for name, x in drafter.named_parameters()}, drafter.config
    )
    for name, parameter in other.named_parameters():
        wanted = theirs[specdec_name(name)]
        assert (name == "embed_tokens.weight") == (not wanted.any()), name
        torch.testing.assert_close(gradient(parameter), wanted, rtol=1e-9, atol=1e-12, msg=name)


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def test_where_nothing_is_supervised_the_loss_is_zero() -> None:
    target, batch = tiny_target(), batch_of(0)
    other = twin(tiny_drafter(presets()["eagle3_1"]), target)
    empty = batch._replace(loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    loss, _, counts = trained_by_minimal(other, target, empty, K)
    assert loss.item() == 0 and not counts.any()
    loss, _, counts = trained_by_minimal(
        other, target, batch._replace(loss_mask_BT=batch.documents_BT >= 0), T + 3
    )
    # more steps than the rows have tokens
    assert loss.isfinite() and counts[T - 2 :].tolist() == [0] * 5


def test_a_drafter_starts_as_specdecs_does() -> None:
    target, ids, end = tiny_target(), torch.randint(0, VOCAB, (5, 40)), {3, 60}
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 1.5)
    made = minimal.drafter_for(target.model, [(row, row > 9) for row in ids], 40, end)
    counts = torch.bincount(ids[ids > 9], minlength=VOCAB)
    wanted = FromTarget().drafter(tiny_config(presets()["eagle3_1"]), Ended(target, end), counts)
    assert made.d2t.tolist() == wanted.vocab.target_ids_D.tolist()
    for name, module in (
        ("embed_tokens", wanted.embed_tokens),
        ("lm_head", wanted.lm_head),
        ("norm", wanted.norms.output),
    ):
        assert torch.equal(made.get_submodule(name).weight, module.weight), name
    assert [name for name, x in made.named_parameters() if not x.requires_grad] == [
        "embed_tokens.weight"
    ]
    assert made.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


# ------------------------------------------------------------------------------------------------ decoding


class Recording(SpeculativeDecoder):
    """Keeps what its rounds propose."""

    def _new_round(self, longest: int) -> SpeculativeRound:
        round_ = super()._new_round(longest)
        assert isinstance(round_, SpeculativeRound)
        propose, self.drafts = round_.draft, list[list[int]]()

        def draft() -> DraftTree:
            tree = propose()
            self.drafts.append(tree.tokens_BN[0, 1:].tolist())
            return tree

        round_.draft = draft  # type: ignore[method-assign]
        return round_


def pair(kind: str, seed: int) -> tuple[Target, Drafter]:
    """A target and a drafter: one that knows nothing, one that is often right, one that always is."""
    if kind == "random":
        return tiny_target(seed), tiny_drafter(presets()["eagle3_1"], seed)
    target = markov_target(context=0.45 if kind == "noisy" else 0.0, seed=seed)
    spec = dataclasses.replace(
        presets()["eagle3_1"], draft_vocab_size=50 if kind == "noisy" else "all"
    )
    drafter = perfect_drafter(target, spec, seed)
    return target, disturb(drafter, 0.3, seed) if kind == "noisy" else drafter


@pytest.mark.parametrize(("kind", "depth"), [("random", 1), ("noisy", 4), ("perfect", 4)])
def test_chains_and_texts_are_specdecs_token_for_token(
    kind: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: Counter[int] = Counter()
    drafts: list[list[int]] = []
    draft = minimal.draft

    def recorded(*arguments: Any) -> Tensor:
        made: Tensor = draft(*arguments)
        drafts.append(made[0].tolist())
        return made

    monkeypatch.setattr(minimal, "draft", recorded)
    for seed, length in ((0, 1), (1, 9)):
        target, drafter = pair(kind, seed)
        other, decoder = twin(drafter, target), Recording(target, drafter, Chain(depth))
        prompt = torch.randint(
            0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length)
        )
        plain = PlainDecoder(target).generate(prompt[0].tolist(), 18).ids
        for end in (set[int](), {plain[7], plain[9]}):
            wanted = decoder.generate(prompt[0].tolist(), 18, end)
            drafts.clear()
            made, committed = minimal.speculate(target.model, other, prompt, 18, depth, end)
            assert drafts == decoder.drafts and {len(chain) for chain in drafts} <= {depth}
            assert made == wanted.ids == minimal.plain(target.model, prompt, 18, end)
            assert [count - 1 for count in committed] == list(wanted.accepted)
            assert made == plain[: len(made)] and (len(made) == 18 or made[-1] in end)
            passes.update(wanted.accepted)
    assert sum(passes.values()) > 10
    if kind == "noisy":
        assert passes[0] > 5 and passes[1] > 3 and max(passes) >= min(depth, 2), passes
    if kind == "perfect":
        assert passes[depth] == max(passes.values()), passes  # but where an end cuts the pass short


# ------------------------------------------------------------------------------------------------ the command


SMALL = [
    "--batch_size",
    "4",
    "--seq_len",
    "48",
    "--lr",
    "1e-2",
    "--prompts",
    "2",
    "--new_tokens",
    "20",
]
SMALL += ["--steps", "31", "--ttt_steps", "3", "--draft_vocab", "200", "--device", "cpu"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_target(target_directory: Path, tmp_path: Path) -> Path:
    """The tiny target with a chat template."""
    path = Path(shutil.copytree(target_directory, tmp_path / "target"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Conversations of two turns."""
    path = tmp_path / "chats.jsonl"
    turns = [
        ("user", "add {n}"),
        ("assistant", "return a + {n}"),
        ("user", "and b?"),
        ("assistant", "return b"),
    ]
    rows = [
        [{"role": role, "content": text.format(n=n)} for role, text in turns] for n in range(20)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_the_command_trains_and_decodes(
    kind: str, chat_target: Path, chats: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--text", str(text_file)] if kind == "text" else ["--chats", str(chats)]
    minimal.main(["--target", str(chat_target), *source, *SMALL])
    printed = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    (length,) = re.findall(r"acceptance length ([\d.]+)", printed)
    assert 1 <= float(length) <= 6
    assert "identical to plain decoding: 2 of 2 answers" in printed


def test_of_a_chat_the_assistants_turns_are_supervised(chat_target: Path, chats: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    rows = minimal.chat_rows(tokenizer, chats, 200)
    assert len(rows) == 20
    for n, (ids, mask) in enumerate(rows):
        assert tokenizer.decode(ids[mask]) == f"return a + {n}</s>return b</s>"
        assert (
            tokenizer.decode(ids[~mask])
            == f"<user>add {n}</s><assistant><user>and b?</s><assistant>"
        )
    assert minimal.chat_rows(tokenizer, chats, 3) == []  # cut before an answer begins


def test_a_text_becomes_rows_that_begin_as_texts_do(chat_target: Path, text_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    rows = minimal.text_rows(tokenizer, [text_file, text_file], 32)
    assert all(
        len(ids) == 32 and ids[0] == tokenizer.bos_token_id and mask.all() for ids, mask in rows
    )
    text = "".join(tokenizer.decode(ids[1:]) for ids, _ in rows)
    assert len(rows) > 20 and (2 * text_file.read_text()).startswith(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": "9999"}, "none is left to train on"),
        ({"target": "shallow"}, "fewer than 7 layers"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    change: dict[str, str],
    message: str,
    chat_target: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "target" in change:
        config = json.loads((chat_target / "config.json").read_text())
        (chat_target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    more = ["--prompts", change["prompts"]] if "prompts" in change else []
    with pytest.raises(SystemExit) as stopped:
        minimal.main(["--target", str(chat_target), "--text", str(text_file), *SMALL, *more])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
