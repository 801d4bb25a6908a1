"""Switches turned on a drafter: live ones change proposals, one that nothing reads is told."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.cli import main
from specdec.decoding import Chain, DynamicTree, PlainDecoder, Proposer, SpeculativeDecoder
from specdec.drafter import Drafter, PostNorm, Recurrence, load, save
from specdec.drafter.recurrence import FeedRaw
from specdec.evaluation.probe import Probed, _proposals, flips, probe_switches, rebuilt
from specdec.target import Target
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets, variants

PROMPTS = [[3, 4, 5, 6], [9]]
GROWTH = Chain(4)
SPECS = presets() | variants()


def pair(name: str = "eagle3_1") -> tuple[Target, Drafter]:
    """A drafter that is right often, with norms whose weights are not ones, so that they matter."""
    target = markov_target(context=0.45)
    drafter = disturb(perfect_drafter(target, SPECS[name]), 0.4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight_name, weight in drafter.named_parameters():
            if "norm" in weight_name:
                weight.mul_(0.7 + torch.rand(weight.shape, generator=generator, dtype=weight.dtype))
    return target, drafter


def by_flip(found: list[Probed]) -> dict[tuple[str, str], Probed]:
    return {(one.switch, one.flipped): one for one in found}


@pytest.mark.parametrize("name", ["eagle3", "eagle3_1"])
def test_the_switches_of_a_real_drafter_are_alive(name: str) -> None:
    target, drafter = pair(name)
    found = by_flip(probe_switches(target, drafter, GROWTH, PROMPTS, 12))
    aux = {"eagle3": {"each", "concat"}, "eagle3_1": {"none", "concat"}}[name]
    turned = {("norms.aux", value) for value in aux} | {("norms.embed", "False"), ("norms.hidden", "False")}
    turned |= {("norms.residual", "normed"), ("norms.query_key", "True")}
    if name == "eagle3":
        turned |= {("norms.output", "False"), ("recurrence", "PostNorm")}
    else:
        turned |= {("recurrence", "PreNorm")}
    assert {flip for flip, one in found.items() if one.reason is None} == turned
    for flip in turned:
        one = found[flip]
        assert not one.dead and one.changed is not None and 0 < one.changed <= 1, one
        assert one.length_flipped is not None and one.length_flipped >= 1
    trained = SpeculativeDecoder(target, drafter, GROWTH)
    passes = [count for prompt in PROMPTS for count in trained.generate(prompt, 12).accepted]
    assert {one.length_trained for one in found.values()} == {1 + sum(passes) / len(passes)}
    assert any(one.length_flipped != one.length_trained for one in found.values() if one.reason is None)


def test_what_cannot_be_turned_says_why() -> None:
    found = {(one.switch, one.value): one.reason for one in flips(pair("eagle3_1")[1].config)}
    assert found["norms.input", "True"] is not None and "entry Narrow" in str(found["norms.input", "True"])
    assert "PostNorm needs norms.output" in str(found["norms.output", "False"])
    eagle1 = {(one.switch, one.value): one for one in flips(pair("eagle1")[1].config)}
    assert "mixes nothing" in str(eagle1["norms.aux", "each"].reason)
    assert "entry Wide" in str(eagle1["norms.residual", "normed"].reason)
    assert eagle1["norms.input", "True"].config is not None
    target, drafter = pair("eagle1")
    probed = by_flip(probe_switches(target, drafter, GROWTH, PROMPTS[:1], 6))
    one = probed["norms.residual", "normed"]
    assert one.length_flipped is None and one.changed is None and not one.dead and one.reason


def test_a_recurrence_that_ignores_its_switch_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair("eagle3")
    monkeypatch.setattr(PostNorm, "build", lambda self, config: FeedRaw())
    found = by_flip(probe_switches(target, drafter, GROWTH, PROMPTS, 12))
    assert [flip for flip, one in found.items() if one.dead] == [("recurrence", "PostNorm")]
    dead = found["recurrence", "PostNorm"]
    assert dead.changed == 0 and dead.length_flipped == dead.length_trained


def test_a_recurrence_of_ones_own_has_no_opposite() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(Recurrence):
        def build(self, config: Any) -> torch.nn.Module:
            return FeedRaw()

    config = dataclasses.replace(pair()[1].config, recurrence=Own())
    last = list(flips(config))[-1]
    assert last.config is None and last.reason == "recurrence Own has no opposite that is known here"


def test_weights_are_kept_and_new_norms_are_ones() -> None:
    drafter = pair("eagle3")[1]
    state = torch.get_rng_state()
    for flip in flips(drafter.config):
        if flip.config is None:
            continue
        own = drafter.state_dict()
        for name, weight in rebuilt(drafter, flip.config).state_dict().items():
            wanted = own[name] if name in own else torch.ones_like(weight)
            assert torch.equal(weight, wanted) and weight.dtype == wanted.dtype, name
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("growth", [GROWTH, DynamicTree(depth=3, top_k=2, nodes=6)], ids=["chain", "dynamic"])
def test_proposals_are_those_of_decoding(growth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the places at which decoding proposes."""
    target, drafter = pair()
    prompt = PROMPTS[0]
    seen: list[tuple[int, Any]] = []
    original = Proposer.propose

    def propose(self: Proposer, length_B: Any, root_B: Any, *rest: Any) -> Any:
        tree = original(self, length_B, root_B, *rest)
        seen.append((int(length_B[0]), (tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist())))
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(Proposer, "propose", propose)
        ids = SpeculativeDecoder(target, drafter, growth).generate(prompt, 20).ids
    assert ids == PlainDecoder(target).generate(prompt, 20).ids
    proposals = _proposals(target, drafter, growth, [(len(prompt), [*prompt, *ids])])
    assert len(proposals) == 20 and len(seen) > 3
    for place, tree in seen:
        assert proposals[place - len(prompt)] == tree


def test_what_cannot_be_probed_is_refused() -> None:
    target, drafter = pair()
    with pytest.raises(ValueError, match="probe: no prompt given"):
        probe_switches(target, drafter, GROWTH, [])
    with pytest.raises(ValueError, match="chain of 1 drafts one level, which no recurrence reaches"):
        probe_switches(target, drafter, Chain(1), PROMPTS)


def test_the_command_tells_every_switch(
    target_directory: Path, drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = load(drafter_directory)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.mul_(torch.rand_like(weight) * 8)
    save(drafter, tmp_path / "sharp")
    (tmp_path / "p.txt").write_text("def add(a, b):\ndef add_3(\n")
    line = ["probe", "--target", str(target_directory), "--drafter", str(tmp_path / "sharp")]
    line += ["--prompts", str(tmp_path / "p.txt"), "--max_new_tokens", "8", "--growth", "chain:depth=3"]
    status = main([*line, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == int(any(one["dead"] for one in told))
    assert [one["switch"] for one in told].count("norms.aux") == 2 and told[-1]["switch"] == "recurrence"
    assert main(line) == status
    text = capsys.readouterr().out
    assert all(one["switch"] in text for one in told) and "PreNorm" in text
