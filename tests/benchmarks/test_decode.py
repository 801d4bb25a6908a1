"""The decoding benchmark: one real run on a tiny target, its arithmetic on made-up numbers."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.decoding import outside, prompts
from benchmarks.decoding.command import main
from benchmarks.decoding.measured import Measured, equal_tokens, ratio
from benchmarks.decoding.of_specdec import Measured as OfSpecdec
from benchmarks.decoding.of_transformers import Measured as OfTransformers
from benchmarks.decoding.prompts import PromptSet, held_out, read, repeated, repetition
from benchmarks.decoding.report import markdown, to_json
from benchmarks.decoding.results import ROUNDS, SPEEDS, Results
from benchmarks.decoding.scratch import keep
from benchmarks.decoding.session import Settings, Worker, run, turns
from benchmarks.decoding.systems import KEYS, Means, choose, entries
from benchmarks.decoding.worker import Job, Made, System, timed
from specdec.decoding import Chain, DynamicTree, Growth, PlainDecoder
from specdec.drafter import DrafterSpec, save
from specdec.target import Target
from tests.export.made import made_drafter
from tests.tiny import llama_config

GROWTH = "tree:depth=3,top_k=2,nodes=4"
BY_KEY = {entry.key: entry for entry in entries([GROWTH])}
PROMPT = [0, 40, 41, 42, 43, 40, 41, 42, 43, 40]


@pytest.fixture
def drafter_directory(target_directory: Path, tmp_path: Path) -> Path:
    """A random drafter of the tiny target."""
    target = Target.load(target_directory)
    return save(made_drafter(DrafterSpec(draft_vocab_size="all"), target), tmp_path / "drafter")


def job(target: Path, drafter: Path | None = None, **options: Any) -> Job:
    where = None if drafter is None else str(drafter)
    return Job("of_specdec", options, "float32", 1, 64, str(target), where, None, None, None)


def test_a_run_writes_its_tables_and_every_answer(
    tmp_path: Path, target_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "prompts.json", tmp_path / "decode_{dtype}_here_202601.md"
    file.write_text(json.dumps({"one": [PROMPT], "other": [PROMPT[:5], PROMPT[2:]]}))
    command = f"--target {target_directory} --prompts {file} --systems specdec-eager transformers-lookup specdec-chain3"
    command += " --dtypes float32 --tokens 12 --threads 1 --warm-up 1"
    arguments = [*command.split(), "--out", str(out)]
    assert main([*arguments, "--sets", "other"]) == 0
    said = capfd.readouterr().out
    assert "left out: specdec-chain3 (no --drafter)" in said and "left out: vllm (not among --systems)" in said
    path = tmp_path / "decode_float32_here_202601.md"
    text, data = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert "## other, 2 prompts" in text and "| transformers-lookup | prompt lookup of 4 |" in text
    assert "2 prompts of 12 new tokens are fewer than 16 of 256" in text
    ours, lookup = data["systems"]
    for system in (ours, lookup):
        answers = system["sets"]["other"]["answers"]
        assert [len(repeats) for repeats in answers] == [1, 1]
        assert all(0 < a["first_seconds"] < a["seconds"] < 10 for repeats in answers for a in repeats)
        assert system["sets"]["other"]["equal_tokens"] == [12, 12]
    assert ours["sets"]["other"]["acceptance_length"] == 1 <= lookup["sets"]["other"]["acceptance_length"]
    assert ours["sets"]["other"]["round"]["verify"] > ours["sets"]["other"]["round"]["draft"] > 0
    assert main(arguments) == 2
    assert "exists already" in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "--tokens at least 2"),
        (["--growth", "bush"], "expected one of"),
        (["--out", "a.md"], "two dtypes want two files"),
        (["--systems", "vllm"], "nothing to measure: specdec-eager (not among --systems)"),
        (["--prompts", "/nowhere.json"], "--prompts /nowhere.json: not a JSON object"),
    ],
)
def test_what_cannot_be_run_is_told(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--threads", "1", *arguments]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_everyone_takes_part_or_is_left_out_by_name() -> None:
    everything = Means("drafter", "python", "assistant", [GROWTH, "chain:depth=5"])
    chosen, left_out = choose(KEYS, everything)
    assert [e.key for e in chosen if e.key.startswith("specdec-growth")] == ["specdec-growth", "specdec-growth-2"]
    assert (len(chosen), left_out) == (len(KEYS) + 1, {})
    chosen, left_out = choose(KEYS, Means(None, None, None, []))
    assert [e.key for e in chosen] == ["specdec-eager", "specdec", "transformers", "transformers-lookup"]
    assert left_out["specdec-growth"] == left_out["vllm-eagle3"] == "no --drafter"
    assert (left_out["vllm"], left_out["transformers-assisted"]) == ("no --vllm", "no --assistant")
    _, left_out = choose(KEYS, everything._replace(growths=[]))
    assert left_out == {"specdec-growth": "no --growth"}


def test_turns_move_on() -> None:
    order = list(turns(prompts=3, systems=2, repeats=2))
    assert order[:4] == [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)]
    assert order[6:8] == [(1, 0, 1), (1, 0, 0)]
    assert len(set(order)) == 12


def test_a_worker_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^specdec: /nowhere/python cannot be run: No such file"):
        Worker("/nowhere/python", "specdec", job(tmp_path), tmp_path / "log")
    with pytest.raises(ValueError, match=r"^specdec ended: .*cannot access|^specdec ended: ls: .*$"):
        Worker("/bin/ls", "specdec", job(tmp_path), tmp_path / "log")


def test_repetition_counts_what_stood_before() -> None:
    assert repetition([1, 2, 3, 4], [5, 6, 7, 8]) == repetition([1] * 8, [5, 6]) == 0
    assert repetition([1, 2, 3, 4], [1, 2, 3, 4]) == 0.25
    assert repetition([1, 2, 3], [4, 1, 2, 3, 4, 1]) == pytest.approx(2 / 6)
    assert repetition([9], [5] * 10) == 0.6  # the first four of them are the first such gram


def test_prompts_read_from_a_file_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [[1, 2], [3]]}')
    found = read(file)
    assert (found.warm_up, found.longest, found.sets[0].prompts) == ([1, 2], 2, [[1, 2], [3]])
    for wrong in ('{"a": []}', '{"a": [[]]}', "{}", '{"a": [1]}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="wants at least one prompt"):
            read(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="not a JSON object"):
        read(file)


def test_the_sets_of_held_out_text(target_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def shares(target: Target, texts: list[list[int]], tokens: int) -> list[float]:
        asked.extend(texts)
        return [0.5, 0.1, 0.3, 0.2, 0.9, 0.8, 0.1, 0.4]

    monkeypatch.setattr(prompts, "_repetitions", shares)
    target = Target.load(target_directory)
    found = held_out(target, 2, 8)
    first, same, varied = found.sets
    assert [each.name for each in found.sets] == ["held-out", "repeated", "varied"]
    assert all(len(ids) == 128 for each in found.sets for ids in each.prompts) and found.longest == 128
    assert varied.prompts == [asked[1], asked[6]]
    assert found.warm_up not in first.prompts + asked
    assert (same.names, len(asked)) == (first.names, 8)
    assert repetition(same.prompts[0][:48], same.prompts[0][48:]) > 0.5 > repetition(asked[0][:48], asked[0][48:])


def test_a_block_is_the_first_lines(target_directory: Path) -> None:
    tokenizer = Target.load(target_directory).tokenizer
    text = "def one(a, b):\n    return a + b + 1\n\n\nclass Two:\n    pass\n" + "x" * 200
    ids = repeated(text, tokenizer)
    block = tokenizer.encode("".join(text.splitlines(keepends=True)[:4]), add_special_tokens=False)
    lines = 4
    while len(block) < 24:
        lines += 1
        block = tokenizer.encode("".join(text.splitlines(keepends=True)[:lines]), add_special_tokens=False)
    assert len(ids) == 128 and ids[0] == tokenizer.bos_token_id
    period = next(p for p in range(1, 64) if ids[1:-p] == ids[1 + p :])
    assert 24 <= period <= 48


def test_repetitions_are_those_of_plain_greedy_text(target_directory: Path) -> None:
    target = Target.load(target_directory)
    texts = [PROMPT, PROMPT[1:], PROMPT[3:]]
    want = [repetition(ids, PlainDecoder(target).generate(ids, 20).ids) for ids in texts]
    assert prompts._repetitions(target, texts, 20) == want


def test_specdec_counts_its_passes(target_directory: Path, drafter_directory: Path) -> None:
    plain = OfSpecdec(job(target_directory, compiled=False))
    made = plain.made(plain.generate(PROMPT, 20))
    assert (len(made.ids), made.passes, made.committed) == (20, 19, 19)
    drafted = OfSpecdec(job(target_directory, drafter_directory, compiled=False, growth="chain:depth=3"))
    answer = timed(drafted, PROMPT, 20)
    assert answer["ids"] == made.ids and answer["passes"] <= 19 <= answer["committed"] <= 19 + 3
    assert 0 < answer["prompt_ms"] < sum(answer[k] for k in ("prompt_ms", "draft_ms", "verify_ms"))
    assert sum(answer[k] for k in ("prompt_ms", "draft_ms", "verify_ms")) < 1e3 * answer["seconds"]
    assert 0 < answer["first_seconds"] < answer["seconds"]
    assert drafted.more == {"growth": "chain of 3"} and drafted.accept(PROMPT, 20) is None


def test_transformers_decode_the_same_text(target_directory: Path) -> None:
    want = PlainDecoder(Target.load(target_directory)).generate(PROMPT, 20).ids
    for options in ({}, {"lookup": 4}, {"assisted": True}):
        one = job(target_directory)._replace(options=options, assistant=str(target_directory))
        answer = timed(OfTransformers(one), PROMPT, 20)
        assert answer["ids"] == want and answer["committed"] == 20
        assert answer["passes"] == 20 if not options else answer["passes"] <= 20
    assert answer["passes"] < 20  # the assistant is the target itself


def test_too_few_tokens_are_no_answer() -> None:
    class Ends(System):
        def generate(self, prompt: list[int], tokens: int) -> list[int]:
            return [1]

        def made(self, raw: list[int]) -> Made:
            return Made(raw, 1, 1)

    with pytest.raises(ValueError, match="1 tokens came where 5 were asked for"):
        timed(Ends(job(Path())), PROMPT, 5)


def uncompiled(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any] = lambda out: out) -> None:
    monkeypatch.setattr(outside, "REPLAYS", 1)
    monkeypatch.setattr(outside, "Compiled", lambda function, *_: lambda *args: change(function(*args)))


@pytest.mark.parametrize("growth", [None, Chain(3), DynamicTree(depth=3, top_k=2, nodes=5)])
def test_acceptance_alone_is_the_rounds_own(
    growth: Growth | None, target_directory: Path, drafter_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = OfSpecdec(job(target_directory, drafter_directory, compiled=False, growth="chain:depth=3"))
    drafter = None if growth is None else one.drafter
    calls = []
    forward = one.target.forward
    monkeypatch.setattr(one.target, "forward", lambda *args: calls.append(1) or forward(*args))
    uncompiled(monkeypatch)
    found = outside.Outside(one.target, drafter, growth, PROMPT, 20).measure()
    assert found["call_ms"] > 0 and 0 < found["accept_ms"] < 100
    assert len(calls) <= 20  # of the recording; the replays ran no model
    uncompiled(monkeypatch, lambda out: out + 1 if isinstance(out, torch.Tensor) else out)  # not the trees
    with pytest.raises(ValueError, match="commits other tokens"):
        outside.Outside(one.target, drafter, growth, PROMPT, 20)


def test_the_target_and_the_drafter_are_kept_in_the_dtype(
    target_directory: Path, drafter_directory: Path, tmp_path: Path
) -> None:
    kept = keep(str(target_directory), str(drafter_directory), "bfloat16", tmp_path)
    model = LlamaForCausalLM.from_pretrained(kept.target)
    assert (model.dtype, kept.method) == (torch.bfloat16, "eagle3")
    original = Target.load(target_directory, dtype="bfloat16").head_weight()
    assert torch.equal(model.lm_head.weight, original)
    assert kept.served is not None and (Path(kept.served) / "config.json").exists()


def made_up(key: str, seconds: float, passes: int = 255, ids: list[int] | None = None) -> Measured:
    """Two prompts, 255 tokens after the first; the second takes thrice as long and was disturbed."""
    about = {"start_seconds": 1.0, "first_text_seconds": 2.0, "threads": 2, "versions": {"torch": "2"}}
    one = Measured(BY_KEY[key], about)
    for prompt, times in enumerate((1, 3)):
        answer = {
            "seconds": seconds * times, "first_seconds": 0.1, "others": 0.5 * prompt, "ids": ids or list(range(256)),
            "passes": passes, "committed": 255, "prompt_ms": None, "draft_ms": None, "verify_ms": None,
        }  # fmt: skip
        if one.entry.ours:
            of_rounds = 1e3 * (seconds * times - 0.1)
            answer |= {"prompt_ms": 100.0, "draft_ms": 0.2 * of_rounds, "verify_ms": 0.78 * of_rounds}
            if one.entry.options["compiled"]:
                answer |= {"accept_ms": 0.05 * (1 + 2 * prompt), "call_ms": 0.02}
        one.add("held-out", prompt, answer)
    return one


def made_up_results(*more: Measured) -> Results:
    """Plain 1 s and 3 s, a chain of 85 passes twice as fast, vLLM at 0.9 of it and at half."""
    sets = [PromptSet("held-out", "made up", ["a", "b"], [[1], [2]])]
    measured = [made_up("specdec", 1.0), made_up("specdec-chain3", 0.5, 85), *more]
    return Results("float32", sets, measured, {"vllm-eagle3": "no --drafter"})


def test_figures_of_a_system() -> None:
    chain = made_up("specdec-chain3", 0.5, 85)
    assert chain.rate("held-out") == pytest.approx(512 / 2)
    assert chain.rate_after("held-out") == pytest.approx(510 / 1.8)
    assert chain.acceptance("held-out") == pytest.approx(3.0)
    found = chain.round("held-out")
    assert found is not None and found.count == 170
    assert found.draft == pytest.approx(0.2 * 1800 / 170) and found.verify == pytest.approx(0.78 * 1800 / 170)
    assert found.host == pytest.approx(0.02 * 1800 / 170)
    assert found.overhead == pytest.approx((0.1 + found.host) / (found.draft + found.verify + found.host))
    chain.add("held-out", 0, {**chain.answers["held-out"][0][0], "seconds": 0.1})
    chain.add("held-out", 0, {**chain.answers["held-out"][0][0], "seconds": 0.2})
    assert chain.seconds("held-out") == [0.2, 1.5]  # medians
    assert made_up("vllm", 1.0).round("held-out") is None


def test_ratios_are_paired() -> None:
    plain, chain = made_up("specdec", 1.0), made_up("specdec-chain3", 0.5)
    found = ratio(chain, plain, "held-out")
    assert found == (2.0, 2.0, 2.0)  # whichever prompts are drawn
    chain.answers["held-out"][1][0]["seconds"] = 3.0
    found = ratio(chain, plain, "held-out")
    assert found.value == pytest.approx(4 / 3.5) and (found.low, found.high) == (1.0, 2.0)
    assert str(found) == "1.14 [1.00, 2.00]"


def test_texts_are_compared_up_to_the_first_difference() -> None:
    assert equal_tokens([[1, 2, 3], [1, 2, 3], [4]], [[1, 2, 3], [1, 5, 3], [5]]) == [3, 1, 0]


def test_verdicts_take_the_faster_peer() -> None:
    results = made_up_results(made_up("vllm-eager", 2.0), made_up("vllm", 0.9))
    plain, grown_missing = results.verdicts("held-out")[0], results.verdicts("held-out")[1:]
    assert "vllm (plain, its own compilation)" in plain.claim and not plain.holds
    assert plain.found == "0.90 [0.90, 0.90]"
    assert [v.claim[:14] for v in grown_missing] == ["specdec-chain3"]  # no vLLM with a drafter, no growth
    assert grown_missing[0].holds  # 2 % and 0.1 ms of 10.6
    results = made_up_results(made_up("vllm-eagle3", 0.6, 85), made_up("specdec-growth", 0.5, 85))
    chain, grown = results.verdicts("held-out")[:2]
    assert chain.holds and chain.found == "1.20 [1.20, 1.20]"
    assert grown.holds and grown.claim.startswith(f"{GROWTH}, compiled at least 1.8 times as fast as specdec")


def test_tables_and_files_hold_all_of_it() -> None:
    results = made_up_results(made_up("vllm", 2.0, ids=[*range(255), 7]))
    plain, chain, vllm = results.speeds("held-out")
    assert all(len(line) == len(SPEEDS) for line in (plain, chain, vllm))
    assert (plain[4], chain[4], vllm[5], chain[5]) == ("-", "2.00 [2.00, 2.00]", "-", "4.00 [4.00, 4.00]")
    assert vllm[7:] == ["0 of 2", "255, 255"] and chain[7] == "2 of 2"
    assert [line[0] for line in results.rounds("held-out")] == ["specdec", "specdec-chain3"]
    assert len(results.rounds("held-out")[0]) == len(ROUNDS)
    assert "answers of specdec (1), specdec-chain3 (1), vllm (1)" in results.warnings("held-out")[0]
    about = {
        "date": "2026-01-02", "git_commit": "abc", "git_dirty": True, "command": "c", "cpu": "x", "cores": 2,
        "threads": 2, "memory_gb": 1, "platform": "p", "python": "3", "load_at_start": [0], "load_at_end": [0],
        "target": "t", "drafter": None, "assistant": None, "tokens": 256, "repeats": 1, "warm_up": 1,
    }  # fmt: skip
    text = markdown(about, {"torch": "2"}, results)
    assert "abc, with changes" in text and "Left out: vllm-eagle3 (no --drafter)" in text
    assert "holds" in text and "| vllm | plain, its own compilation |" in text
    data = json.loads(json.dumps(to_json(about, results)))
    assert data["systems"][2]["sets"]["held-out"]["equal_tokens"] == [255, 255]
    assert "ids" not in data["systems"][0]["sets"]["held-out"]["answers"][0][0]
    assert data["sets"][0]["verdicts"][0]["holds"] is True


@pytest.mark.vllm
def test_vllm_decodes_the_same_text(tmp_path: Path) -> None:
    python = os.environ.get("SPECDEC_VLLM_PYTHON")
    if not python:
        pytest.skip("SPECDEC_VLLM_PYTHON names no interpreter with vLLM")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 32, "vocab_size": 300}
    model = LlamaForCausalLM(llama_config(**sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(tmp_path / "model")
    target = Target.load(tmp_path / "model")
    drafter = save(made_drafter(DrafterSpec(draft_vocab_size="all"), target), tmp_path / "drafter")
    kept = keep(str(tmp_path / "model"), str(drafter), "float32", tmp_path)
    chosen = [BY_KEY["specdec-eager"], BY_KEY["vllm-eager"], BY_KEY["vllm-eagle3-eager"]]

    def of(entry: Any) -> Job:
        return Job(
            entry.module, entry.options, "float32", 1, 64, kept.target, str(drafter), kept.served, kept.method, None
        )

    texts = prompts.Prompts(PROMPT, [PromptSet("a", "", ["0"], [PROMPT])])
    settings = Settings(sys.executable, python, 1, 20, 1, 1)
    ours, plain, eagle = run(chosen, texts, of, settings, tmp_path, lambda _: None)
    assert ours.ids("a") == plain.ids("a") == eagle.ids("a")
    assert plain.acceptance("a") == 1
    in_process = OfSpecdec(job(tmp_path / "model", drafter, compiled=False, growth="chain:depth=3"))
    made = in_process.made(in_process.generate(PROMPT, 20))
    assert eagle.answers["a"][0][0]["passes"] == pytest.approx(made.passes, abs=1)
