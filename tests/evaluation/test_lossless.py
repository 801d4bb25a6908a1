"""The certificate: real decoders pass every check, broken ones are found out, and one failed check fails it."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from specdec.decoding import (
    AdaptiveChain,
    Chain,
    DraftShape,
    DynamicTree,
    Request,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)
from specdec.decoding.accept import Accepted, DraftTree, Rule, WithoutReplacement
from specdec.decoding.sampling import AcceptanceNoise
from specdec.drafter import Drafter
from specdec.evaluation.lossless import TOP_K, certify, check_greedy, check_sampled, most_open
from specdec.target import Target
from tests.evaluation.made import alter, soft_target
from tests.perfect import disturb, make_markov, perfect_drafter
from tests.tiny import llama_config, presets, tiny_drafter, tiny_target

EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "model_type": "mixtral",
    "sliding_window": None,
}

PROMPTS = [[3, 4, 5], [9], list(range(20))]
SHAPES: list[DraftShape] = [
    Chain(3), AdaptiveChain(3, min_product=0.05), StaticTree(), DynamicTree(depth=3, top_k=3, nodes=9),
]  # fmt: skip
TARGET, DRAFTER = tiny_target(), tiny_drafter(presets()["eagle3_1"])


def drawing(
    target: Target, drafter: Drafter, sampling: Sampling, shape: DraftShape = Chain(2)  # noqa: B008
) -> SpeculativeDecoder:  # fmt: skip
    """A decoder whose continuations can all be listed."""
    return SpeculativeDecoder(target, drafter, shape, replace(sampling, top_k=TOP_K), batch=32)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_greedy_decoding_says_what_the_target_says(shape: DraftShape) -> None:
    found = check_greedy(SpeculativeDecoder(TARGET, DRAFTER, shape), PROMPTS, 20)
    assert found["fault"] is None and found["near_ties"] == found["wrong"] == []
    assert found["tokens"] == 60 and found["shape"] == shape.name


def test_every_wrong_token_is_found_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that says another token at one place of a text, and leaves out the last of another."""

    def wrong(_: SpeculativeDecoder, asked: Request, ids: list[int]) -> list[int]:
        return [*ids[:4], ids[4] ^ 1, *ids[5:]] if len(asked.prompt) == 3 else ids[:-1]

    alter(monkeypatch, wrong)
    found = check_greedy(SpeculativeDecoder(TARGET, DRAFTER, Chain(2)), PROMPTS[:2], 20)
    assert found["fault"] == f"{len(found['wrong'])} of 39 tokens wrong"
    first = found["wrong"][0]
    assert (first["prompt"], first["position"], first["token"]) == (0, 4, first["likeliest"] ^ 1)
    assert first["gap"] > first["allowed"] > 0 and all(one["prompt"] == 0 for one in found["wrong"])
    assert (
        check_greedy(SpeculativeDecoder(TARGET, DRAFTER, Chain(2)), PROMPTS[1:2], 20)["fault"]
        == "the answers are 1 token short"
    )


@pytest.mark.parametrize("apart", [1e-6, 1.0], ids=["near tie", "another token"])
def test_a_near_tie_is_no_fault(apart: float) -> None:
    """Tokens of a pair have nearly one head row: whichever of them is said, it may be rounding's choice."""
    target = tiny_target().model.float()
    with torch.no_grad():
        rows = target.get_output_embeddings().weight
        rows[1:60:2] = rows[:60:2] * (1 - apart)
        rows[60:] = 0
    with pytest.MonkeyPatch.context() as patch:
        alter(patch, lambda decoder, asked, ids: [*ids[:-1], ids[-1] ^ 1])
        found = check_greedy(
            SpeculativeDecoder(
                Target(target), tiny_drafter(presets()["eagle3_1"]).float(), Chain(2)
            ),
            PROMPTS[1:2],
            6,
        )
    told, untold = (
        (found["near_ties"], found["wrong"]) if apart < 1 else (found["wrong"], found["near_ties"])
    )
    assert (
        [one["position"] for one in told] == [5]
        and not untold
        and (found["fault"] is None) == (apart < 1)
    )


@pytest.mark.slow
def test_a_tie_of_two_experts_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits it moves a mixture's logits by more than rounding does, however it is decoded; others stay wrong."""
    sizes = llama_config(head_dim=32, intermediate_size=64).to_dict()
    torch.manual_seed(0)
    mixture = MixtralForCausalLM(MixtralConfig(**{**sizes, **EXPERTS}))
    target = Target(make_markov(mixture, 0.75).to(torch.bfloat16))
    drafter = disturb(
        perfect_drafter(target, replace(presets()["eagle3_1"], draft_vocab_size="all")), 0.3
    )
    asked = SpeculativeDecoder(target, drafter.bfloat16(), Chain(4)), PROMPTS, 100
    assert check_greedy(*asked)["fault"] is None
    with monkeypatch.context() as patch:
        patch.setattr(
            "specdec.evaluation.lossless.moved_logits", lambda target, ids_1T: torch.zeros(1)
        )
        assert check_greedy(*asked)["fault"] == "1 of 300 tokens wrong"
    alter(monkeypatch, lambda decoder, asked, ids: [*ids[:40], (ids[40] + 7) % 61, *ids[41:]])
    assert check_greedy(*asked)["fault"]


@pytest.mark.parametrize(
    ("rule", "shape"),
    [("without_replacement", Chain(2)), ("block", AdaptiveChain(3, 0.3, 0.2))],
    ids=str,
)
def test_sampled_decoding_has_the_targets_distribution(rule: str, shape: DraftShape) -> None:
    target, drafter = soft_target()
    sampling = Sampling(temperature=0.9, rule=rule, draft_temperature=1.2)  # type: ignore[arg-type]
    found = check_sampled(drawing(target, drafter, sampling, shape), PROMPTS[0], 100)
    assert found["fault"] is None and found["impossible"] == 0 and found["degrees"] > 3
    # no two cells expect five draws each
    few = check_sampled(drawing(target, drafter, sampling), PROMPTS[0], 9)
    assert few["degrees"] == few["impossible"] == 0 and few["fault"].endswith("draw more")


@dataclasses.dataclass(frozen=True)
class AcceptsAll(WithoutReplacement):
    """Every draft is taken, whatever the target says."""

    def accept(self, drafts: DraftTree, p_BNV: torch.Tensor, noise: AcceptanceNoise) -> Accepted:
        verdict = super().accept(drafts, p_BNV, noise)
        return verdict._replace(path_BN=torch.ones_like(verdict.path_BN))


def test_a_biased_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = soft_target()
    rules: dict[str, Rule] = {"without_replacement": AcceptsAll()}
    monkeypatch.setattr("specdec.decoding.accept.RULES", rules)
    sampling = Sampling(temperature=0.9, rule="without_replacement", draft_temperature=3.0)
    found = check_sampled(drawing(target, drafter, sampling), PROMPTS[0], 100)
    assert found["fault"] and found["p_value"] < 1e-12


def test_where_there_is_no_choice_every_draw_says_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p leaves one token at each place: nothing can be counted, and nothing else can be said."""
    target, drafter = soft_target()
    sampling = Sampling(temperature=0.9, top_p=1e-6, rule="one_hot")
    found = check_sampled(drawing(target, drafter, sampling), PROMPTS[0], 20)
    assert (found["continuations"], found["degrees"], found["fault"]) == (1, 0, None)
    alter(monkeypatch, lambda decoder, asked, ids: [ids[0] ^ 1, *ids[1:]])
    wrong = check_sampled(drawing(target, drafter, sampling), PROMPTS[0], 3)
    assert wrong["fault"] == "the target never makes such draws as 3 of 3"


def test_draws_follow_the_prompt_after_which_they_tell_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, _ = soft_target()
    sampling, prompts = (
        Sampling(temperature=0.9, rule="one_hot"),
        [[5], [6, 7], [8], list(range(30)) * 4],
    )
    even = {3: [1 / 3] * 3, 2: [0.5, 0.5], 1: [1.0]}
    probs = {5: even[1], 6: even[3], 8: even[2], 0: even[3]}
    monkeypatch.setattr(
        "specdec.evaluation.lossless._continuations",
        lambda target, sampling, prompt: {(n,): p for n, p in enumerate(probs[prompt[0]])},
    )
    assert most_open(target, sampling, prompts, 100, 3) == 1
    # a third of twelve is too few for a cell
    assert most_open(target, sampling, prompts, 12, 3) == 2
    room = target.config.max_position_embeddings
    with pytest.raises(ValueError, match="no prompt leaves room for 3 more tokens"):
        most_open(target, sampling, [[1] * (room - 2)], 100, 3)


def test_the_statement_covers_every_shape_and_rule() -> None:
    target, drafter = soft_target()
    asked = Sampling(temperature=0.7, top_p=0.95, seed=5)
    shapes = [Chain(2), DynamicTree(depth=2, top_k=2, nodes=4)]
    found = certify(target, drafter, shapes, PROMPTS[:2], max_new_tokens=6, runs=60, sampling=asked)
    assert found["holds"] and found["seed"] == 5 and json.loads(json.dumps(found)) == found
    kinds = [(check["check"], check.get("rule")) for check in found["checks"]]
    greedy, drawn = ("greedy", None), [("sampled", "WithoutReplacement"), ("sampled", "Block")]
    assert kinds == [greedy, ("sampled", "OneHot"), *drawn, greedy, ("sampled", "OneHot")]
    assert found["checks"][0]["tokens"] == 12
    for check in found["checks"][1:4]:
        assert check["sampling"] == dataclasses.asdict(asked) | {
            "top_k": 3,
            "rule": check["sampling"]["rule"],
        }


def test_one_check_that_fails_fails_the_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = soft_target()
    nothing = certify(target, drafter, [Chain(2)], PROMPTS[:1], max_new_tokens=1, runs=20)
    assert not nothing["holds"] and "no pass verified anything" in nothing["checks"][0]["fault"]
    alter(monkeypatch, lambda decoder, asked, ids: [(ids[0] + 1) % target.vocab_size, *ids[1:]])
    assert not certify(target, drafter, [Chain(2)], PROMPTS[:1], max_new_tokens=4, runs=20)["holds"]


def test_in_16_bits_no_draws_are_made_and_the_statement_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, drafter = soft_target()
    low, drafter = Target(target.model.bfloat16()), drafter.bfloat16()
    found = certify(low, drafter, [Chain(2)], PROMPTS, max_new_tokens=6, runs=300)
    assert [check["check"] for check in found["checks"]] == ["greedy"] and found["sampled"] is None
    assert "draws are checked in float32 alone" in caplog.text
