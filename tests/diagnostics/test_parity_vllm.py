"""A served model's answers, pass by pass, and ours; tests/engines/test_vllm.py has the real vLLM."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.diagnostics.parity import PROMPTS, TRIES, EnginePasses, VllmAnswer, ask, compare_passes
from specdec.drafter import Drafter, DrafterSpec, ScalarMix, load_drafter, save_drafter
from specdec.engines.client import Endpoint
from specdec.export.formats import DRAFT_TOKENS
from specdec.target import Target
from specdec.utils.vllm import VARIABLE
from tests.diagnostics.conftest import SMALL
from tests.engines.conftest import alive
from tests.engines.fake_vllm import DRAFTS, FakeVllm
from tests.export.made import made_drafter
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets

Servers = Callable[..., FakeVllm]
PROMPT, IDS = [5, 6], list(range(10, 30))
DEPTH, TOKENS, SHARE = 4, 33, 1e-9


@pytest.fixture
def server(served: Servers) -> FakeVllm:
    made = served(True)
    made.plans[tuple(PROMPT)] = (IDS, [2, 0, 3, 1])
    return made


def test_passes_and_what_they_accepted(server: FakeVllm) -> None:
    found = ask(Endpoint(server.url), "the-target", PROMPT, 11)
    assert found == VllmAnswer(PROMPT, IDS[:11], 3, [1, 4, 5, 9], [2, 0, 3, 1])
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == (PROMPT, 11, 0.0, True)
    assert body["repetition_penalty"] == 1.0 and body["model"] == "the-target"


def test_the_last_piece_is_cut_at_the_end(server: FakeVllm) -> None:
    found = ask(Endpoint(server.url), "the-target", PROMPT, 8)
    assert found.known == [1, 4, 5] and len(found.ids) == 8 and found.accepted == [2, 0, 2]


def test_passes_that_come_together_are_asked_again(server: FakeVllm) -> None:
    server.joined = 2
    assert ask(Endpoint(server.url), "the-target", PROMPT, 11).known == [1, 4, 5, 9]
    assert len(server.bodies) == 3 and len({body["cache_salt"] for body in server.bodies}) == 3
    server.joined = TRIES
    with pytest.raises(ValueError, match=f"in 4 pieces and counted 11 in 4 passes and the prompt's, {TRIES} times"):
        ask(Endpoint(server.url), "the-target", PROMPT, 11)


METRICS = FakeVllm.metrics


def fewer(self: FakeVllm) -> str:
    """vLLM drafts nothing where drafts would reach beyond its longest text."""
    whole = METRICS(self).replace("num_drafts_total", "num_drafts_dropped")
    return f"{whole}vllm:spec_decode_num_drafts_total{{}} {self.passes // 2}\n"


def more(self: FakeVllm) -> str:
    self.generated += 1
    return METRICS(self)


@pytest.mark.parametrize(("metrics", "message"), [(fewer, "in 2 passes and .* below"), (more, "does somebody else")])
def test_counters_that_do_not_fit(
    metrics: Callable[[FakeVllm], str], message: str, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeVllm, "metrics", metrics)
    with pytest.raises(ValueError, match=message):
        ask(Endpoint(server.url), "the-target", PROMPT, 11)


def test_a_server_without_a_drafter_or_without_ids(served: Servers, server: FakeVllm) -> None:
    alone = served(False)
    alone.plans = server.plans
    with pytest.raises(ValueError, match="drafts nothing: is it served with the drafter"):
        ask(Endpoint(alone.url), "the-target", PROMPT, 11)
    server.plans = {}
    with pytest.raises(ValueError, match=r"sends no token_ids, which vLLM does from 0.10.2 on"):
        ask(Endpoint(server.url), "the-target", PROMPT, 11)


@pytest.mark.parametrize("ids", [["a"], [1.5], 7, {"a": 1}, [None]])
def test_token_ids_that_are_none(ids: object, server: FakeVllm) -> None:
    events = [{"choices": [{"token_ids": ids}]}, {"choices": []}]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    server.failures = {"x": [f"{lines}data: [DONE]\n\n".encode()]}
    with pytest.raises(ValueError, match="sends no token_ids, which vLLM does"):
        ask(Endpoint(server.url), "the-target", "x", 11)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 61, 2**70])
def test_tokens_of_another_vocabulary(token: int, target: Target, drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="does it serve another target"):
        compare_passes(target, drafter, [answer([3], [4, token], [1], [0])], SHARE)


@pytest.fixture(scope="module")
def target() -> Target:
    return markov_target(context=0.4)


@pytest.fixture(scope="module", params=["eagle1", "eagle3_1"])
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return disturb(perfect_drafter(target, presets()[request.param]), 0.5)


def answer(prompt: list[int], ids: list[int], known: list[int], accepted: list[int]) -> VllmAnswer:
    return VllmAnswer(prompt, ids, DEPTH, known, accepted)


def decoded(target: Target, drafter: Drafter) -> list[VllmAnswer]:
    """Our decoder stands for the engine."""
    decoder, found = SpeculativeDecoder(target, drafter, Chain(DEPTH)), []
    for prompt in ([3, 9, 27, 20], [50]):
        made = decoder.generate(prompt, TOKENS)
        known = [1]
        for accepted in made.accepted[:-1]:
            known.append(known[-1] + accepted + 1)
        found.append(answer(prompt, made.ids, known, list(made.accepted)))
    return found


def verdicts(found: EnginePasses) -> list[str]:
    return [one.verdict for one in found.positions]


def test_the_prediction_is_what_decoding_accepts(target: Target, drafter: Drafter) -> None:
    answers = decoded(target, drafter)
    accepted = [a for one in answers for a in one.accepted]
    assert len(set(accepted)) > 2, "every number of accepted drafts should come up"
    found = compare_passes(target, drafter, answers, SHARE)
    assert found.fault is None and verdicts(found) == ["equal"] * DEPTH
    assert [one.accepted for one in found.positions] == [one.expected for one in found.positions]
    whole = [a for one in answers for n, a in zip(one.known, one.accepted, strict=True) if n + DEPTH < TOKENS]
    assert found.positions[0].accepted == sum(a > 0 for a in whole) > 0
    assert {one.passes for one in found.positions} == {len(whole)}
    assert (found.tokens, found.rounding, found.different) == (2 * TOKENS, 0, 0)


def test_a_pass_that_accepts_less_or_more_is_found_where_it_is(target: Target, drafter: Drafter) -> None:
    """The other passes stay what they are: none depends on how those before it went."""
    first, last = decoded(target, drafter)
    number = next(n for n, a in enumerate(first.accepted[:-1]) if a >= 2)
    known = [*first.known[: number + 1], first.known[number] + 2, *first.known[number + 1 :]]
    accepted = [*first.accepted[:number], 1, first.accepted[number] - 2, *first.accepted[number + 1 :]]
    less = answer(first.prompt, first.ids, known, accepted)
    found = compare_passes(target, drafter, [less, last], SHARE)
    assert found.fault is not None and verdicts(found)[1] == "DIFFERENT in 1"
    found = compare_passes(target, drafter, [less, last], 1.0)
    assert found.fault is None and verdicts(found)[1] == "equal but for rounding in 1"

    number = next(n for n, a in enumerate(first.accepted[:-1]) if a == 0)
    known = first.known[: number + 1] + first.known[number + 2 :]
    accepted = [*first.accepted[:number], 1 + first.accepted[number + 1], *first.accepted[number + 2 :]]
    found = compare_passes(target, drafter, [answer(first.prompt, first.ids, known, accepted)], SHARE)
    assert found.positions[0].different == 1 and found.fault is not None


def test_another_drafter_and_another_target(target: Target, drafter: Drafter) -> None:
    """What an engine does that leaves a norm out; and tokens that are not the target's."""
    answers = decoded(target, drafter)
    other = disturb(perfect_drafter(target, DrafterSpec()), 0.5, seed=1)
    found = compare_passes(target, other, answers, SHARE)
    assert found.fault is not None and found.positions[0].different > 0 and found.different == 0
    first = answers[0]
    wrong = first._replace(ids=[*first.ids[:5], (first.ids[5] + 1) % 61, *first.ids[6:]])
    found = compare_passes(target, drafter, [wrong], SHARE)
    assert found.different >= 1 and found.rounding == 0 and found.fault is not None
    close = compare_passes(target, drafter, [wrong], 1.0)
    assert (close.different, close.rounding) == (0, found.different)


def test_a_draft_that_the_drafter_has_no_word_for(target: Target) -> None:
    """However wide the tolerance, a token outside the draft vocabulary is never drafted."""
    small = perfect_drafter(target, DrafterSpec(draft_vocab_size=30))
    ids = PlainDecoder(target).generate([50], TOKENS).ids
    words = small.vocab.target_ids_D.tolist()
    place = next(n for n in range(1, TOKENS - DEPTH) if ids[n] not in words)
    found = compare_passes(target, small, [answer([50], ids, [place], [1])], SHARE)
    assert found.positions[0].different == 1 and found.positions[0].expected == 0


def test_the_command_with_a_server_that_runs(
    line: list[str], served: Servers, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, fake = Target.load(target_directory), served(True)
    decoder = SpeculativeDecoder(model, load_drafter(tmp_path / "drafter"), Chain(DRAFTS))
    for text in PROMPTS:
        made = decoder.generate(asked := model.tokenizer(text)["input_ids"], 8 + DRAFT_TOKENS)
        fake.plans[tuple(asked)] = (made.ids, made.accepted)
    line += ["--engine", "vllm", "--url", f"{fake.url}/v1"]
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "vLLM and decoding" in told
    assert told.splitlines()[-1] == "what was trained is what is decoded and what vLLM serves"
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["holds"] and report["engine"]["holds"] and report["engine"]["tokens"] == 3 * (8 + DRAFT_TOKENS)
    assert fake.passes > report["engine"]["positions"][0]["passes"] > 3

    prompt, (ids, accepted) = next(iter(fake.plans.items()))
    fake.plans[prompt] = (ids, [accepted[0] + 1, *accepted[1:]])
    assert main(line) == 1
    told = capsys.readouterr().out
    assert "DIFFERENT in 1" in told and "NOT THE SAME: vLLM accepts other drafts" in told.splitlines()[-1]
    fake.plans[prompt] = ([(token + 1) % 300 for token in ids], accepted)
    assert main(line) == 1
    assert "tokens not this target's" in capsys.readouterr().out.splitlines()[-1]


def test_the_command_starts_one_and_ends_it(
    line: list[str], fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line += ["--engine", "vllm", "--draft_tokens", "3"]
    monkeypatch.setenv(VARIABLE, fake)
    assert main([*line, "--out", str(tmp_path / "out"), "--", "--max-model-len", "64"]) == 2
    seen = capsys.readouterr()
    assert "sends no token_ids" in seen.err.splitlines()[-1]
    assert "training and export" in seen.out and not (tmp_path / "out").exists()  # what was compared before is shown
    said = json.loads((tmp_path / "said").read_text())
    argv = said["argv"]
    assert argv[-4:] == ["--dtype", "float32", "--max-model-len", "64"]
    speculative = json.loads(argv[argv.index("--speculative-config") + 1])
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 3)
    assert not Path(speculative["model"]).exists() and not any(map(alive, said["pids"]))
    monkeypatch.setenv("FAKE_VLLM", "crash")
    assert main([*line, "--exported", str(tmp_path / "served")]) == 2
    error = capsys.readouterr().err
    assert "ended by itself with status 3: RuntimeError: the engine did not start" in error.splitlines()[-1]
    assert "  fake vLLM starts" in error


def test_what_is_not_servable_is_not_served(
    fake: str,
    target_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, fake)
    drafter = made_drafter(DrafterSpec(ScalarMix(), draft_vocab_size=200), Target.load(target_directory))
    save_drafter(drafter, tmp_path / "sum")
    argv = ["parity", "--target", str(target_directory), "--drafter", str(tmp_path / "sum"), *SMALL]
    assert main([*argv, "--engine", "vllm"]) == 1
    told = capsys.readouterr().out
    assert "fusion ScalarMix: states are concatenated" in told and "training and export" not in told
    assert "NOT SERVED" in told and not (tmp_path / "said").exists()


def test_mistakes_are_one_line(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, url = ["--engine", "vllm"], ["--url", "http://127.0.0.1:9"]
    for more, message in (
        (url, "--url would go to vLLM, which is not asked without --engine vllm"),
        (["--draft_tokens", "5"], "--draft_tokens would go to vLLM"),
        (["--", "--enforce-eager"], "flags after -- would go to vLLM"),
        ([*engine, *url, "--draft_tokens", "5"], "--draft_tokens would start vLLM, which is not started with --url"),
        ([*engine, "--", "--dtype=half"], "--dtype after -- is not passed on"),
        ([*engine, *url], "is the server up?"),
        ([*engine, *url, "--target.dtype", "float64"], "vLLM has no float64"),
    ):
        assert main([*line, *more]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1], more
