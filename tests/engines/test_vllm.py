"""What was trained is what vLLM serves: drafters of ``specdec fit`` in a real vLLM, on a CPU, in float32."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli import main
from specdec.decoding import Chain, Generation, PlainDecoder, Request, Sampling, SpeculativeDecoder
from specdec.diagnostics.parity_eight_bits import MOST_INT8_ERROR
from specdec.diagnostics.parity_files import read_files
from specdec.diagnostics.planted import planted, write_files
from specdec.drafter import load_drafter
from specdec.engines.client import Endpoint
from specdec.engines.proposals import ProposalEngine
from specdec.engines.server import drafter_checkpoint, free_port
from specdec.export import export_drafter
from specdec.target import Target, TargetSource
from specdec.utils.vllm import VARIABLE
from tests.engines import inside_vllm
from tests.engines.conftest import alive, soon
from tests.engines.trained import DRAFTERS, METHODS, PROMPTS, make_target, train_drafter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, DRAFTS = 61, 3
# of each prompt, where tokens are drawn; and whose, which accepts at every depth
COPIES, DRAWN = 24, "eagle3_1"

Inside = Callable[..., Any]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """Does one job after another in a process of vLLM's environment."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no Python with vLLM; docs/serve.md says how to make one")
    log = tmp_path_factory.mktemp("inside") / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, inside_vllm.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=os.environ | inside_vllm.QUIET,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    jobs, answers = process.stdin, process.stdout

    def run(do: str, **job: Any) -> Any:
        jobs.write(json.dumps({"do": do, **job}) + "\n")
        jobs.flush()
        answer = answers.readline()
        assert answer, log.read_text()[-4000:]
        return json.loads(answer)

    yield run
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def target(inside: Inside, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(make_target(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return [target.tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """The target's greedy tokens; that vLLM without a drafter says them too, tests/engines/test_regenerate.py shows."""
    return [PlainDecoder(target).generate(ids, TOKENS, ()).ids for ids in prompts]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(
    request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory, as ``specdec fit`` leaves it."""
    return train_drafter(
        request.param, Path(target.source), tmp_path_factory.mktemp("drafter") / request.param
    )


@pytest.fixture
def name(drafter: Path) -> str:
    return drafter.parent.name


@pytest.fixture(scope="module")
def inside_drafted(
    drafter: Path,
    target: Target,
    prompts: list[list[int]],
    inside: Inside,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """What vLLM says with the exported drafter: greedily, and at temperature 1."""
    made = drafter_checkpoint(
        drafter, TargetSource(target.source), tmp_path_factory.mktemp("exported") / "drafter"
    )
    assert (made.method, made.parallel) == METHODS[drafter.parent.name]
    speculative = {
        "method": made.method,
        "model": str(made.directory),
        "num_speculative_tokens": DRAFTS,
    }
    speculative |= {"parallel_drafting": made.parallel}
    asked = [(0, prompts), (1, prompts * COPIES)]
    found: list[dict[str, Any]] = inside(
        "offline", target=target.source, drafter=speculative, tokens=TOKENS, asked=asked
    )
    return found


def decoded(target: Target, drafter: Path, prompts: list[list[int]]) -> list[Generation]:
    """What our evaluator does, end tokens ignored."""
    decoder = SpeculativeDecoder(target, load_drafter(drafter), Chain(depth=DRAFTS))
    return [decoder.generate(ids, TOKENS, ()) for ids in prompts]


@pytest.mark.parametrize("drafter", [DRAWN], indirect=True)
def test_tokens_and_acceptance_are_ours_at_every_position(
    drafter: Path, target: Target, prompts: list[list[int]], plain: list[list[int]],
    inside_drafted: list[dict[str, Any]],
) -> None:  # fmt: skip
    found = inside_drafted[0]
    assert found["ids"] == plain
    ours = decoded(target, drafter, prompts)
    assert [one.ids for one in ours] == plain
    # both count what was accepted behind the last token
    accepted = [count for one in ours for count in one.accepted]
    assert found["drafts"] == [len(accepted)]
    assert found["draft_tokens"] == [DRAFTS * len(accepted)]
    assert found["accepted_tokens"] == [sum(accepted)]
    assert found["accepted_tokens_per_pos"] == [
        sum(count > k for count in accepted) for k in range(DRAFTS)
    ]
    # a drafter that accepts nothing would prove nothing
    assert 1 + sum(accepted) / len(accepted) > 1.2


@pytest.mark.parametrize("drafter", [DRAWN], indirect=True)
def test_acceptance_at_temperature_one_is_ours_within_chance(
    drafter: Path, target: Target, prompts: list[list[int]], inside_drafted: list[dict[str, Any]]
) -> None:
    found, asked = inside_drafted[1], prompts * COPIES
    decoder = SpeculativeDecoder(
        target, load_drafter(drafter), Chain(depth=DRAFTS), Sampling(temperature=1.0), batch=8
    )
    requests = [Request(ids, TOKENS, seed) for seed, ids in enumerate(asked)]
    accepted = [generation.accepted for _, generation in decoder.generate_all(requests, ())]
    passes = np.array([len(one) for one in accepted])
    for k in range(DRAFTS):
        deep = np.array([sum(count > k for count in one) for one in accepted])
        ours, theirs = (
            deep.sum() / passes.sum(),
            found["accepted_tokens_per_pos"][k] / found["drafts"][0],
        )
        # of a ratio of sums over texts, which are what is independent; the other side is distributed alike
        error = np.sqrt(2 * len(asked) * np.var(deep - ours * passes)) / passes.sum()
        assert abs(ours - theirs) < 3.3 * error  # 1 in 1000 by chance, and the chance is seeded
        assert 0 < error < 0.03


@pytest.fixture
def serving(drafter: Path, target: Target, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``specdec serve`` on its way."""
    argv = [
        *("serve", "--target", target.source, "--drafter", str(drafter), "--port", str(free_port())),
        *("--draft_tokens", str(DRAFTS), "--log_file", str(tmp_path / "log"), "--timeout", "300"),
        *("--", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | inside_vllm.QUIET,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def counted(endpoint: Endpoint, name: str) -> float:
    """A counter of vLLM's."""
    counts = re.findall(
        rf"^vllm:{name}_total(?:\{{.*\}})? (\S+)", endpoint.text("/metrics"), re.MULTILINE
    )
    return sum(map(float, counts))


@pytest.mark.parametrize("drafter", ["eagle3_1"], indirect=True)
def test_served_asked_and_stopped(
    serving: subprocess.Popen[str], drafter: Path, name: str, target: Target, plain: list[list[int]], inside: Inside,
    tmp_path: Path,
) -> None:  # fmt: skip
    assert serving.stdout is not None
    url = serving.stdout.readline().strip()
    assert url, (tmp_path / "log").read_text()[-4000:]
    processes = descendants(serving.pid)
    assert len(processes) >= 3  # who keeps vLLM, its API and its engine
    endpoint = Endpoint(url)
    before = counted(endpoint, "generation_tokens")
    said = inside("chat", url=url, text=PROMPTS[0], tokens=TOKENS)
    assert said["model"] == endpoint.model() == target.source
    assert "".join(said["parts"]) == target.tokenizer.decode(plain[0], skip_special_tokens=True)
    # in pieces, some of several tokens
    assert 2 < len([part for part in said["parts"] if part]) < TOKENS
    assert soon(lambda: counted(endpoint, "generation_tokens") - before == TOKENS)
    # some drafts were accepted
    assert 0 < counted(endpoint, "spec_decode_num_drafts") < TOKENS - 1
    serving.send_signal(signal.SIGINT)
    _, err = serving.communicate(timeout=60)
    assert serving.returncode == 0, err
    assert not any(map(alive, processes))


FLAGS = ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]


def parity_report(
    drafter: Path, target: Target, tmp_path: Path, *more: str
) -> tuple[int, dict[str, Any]]:
    """The exit status and what is said of the engine."""
    argv = [
        "parity",
        "--target",
        target.source,
        "--drafter",
        str(drafter),
        "--engine",
        "vllm",
        *more,
    ]
    argv += ["--max_new_tokens", str(TOKENS), "--out", str(tmp_path / "parity")]
    drafts = [] if drafter.parent.name == "dflash" else ["--draft_tokens", str(DRAFTS)]
    status = main([*argv, *drafts, "--", *FLAGS])
    report = json.loads((tmp_path / "parity" / "parity.json").read_text())
    return status, report["engine"]


@pytest.fixture(scope="module")
def engine() -> Iterator[ProposalEngine]:
    """One process for all comparisons of this module: a start takes longer than what it is asked."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in inside_vllm.QUIET.items():  # what vLLM needs on a small machine
            patch.setenv(variable, value)
        with ProposalEngine.started() as process:
            yield process


@pytest.fixture
def one_engine(engine: ProposalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """``specdec parity`` asks the engine that runs already."""
    monkeypatch.setattr(ProposalEngine, "started", lambda: contextlib.nullcontext(engine))


@pytest.mark.usefixtures("one_engine")
def test_every_proposal_of_a_trained_drafter_is_ours(
    drafter: Path, target: Target, tmp_path: Path
) -> None:
    status, engine = parity_report(drafter, target, tmp_path)
    assert status == 0 and engine["holds"], engine
    assert (engine["wrong_tokens"], engine["near_tokens"], engine["apart"]) == (0, 0, 0)
    positions = engine["positions"]
    assert [position["verdict"] for position in positions] == ["equal"] * DRAFTS
    assert [position["accepted"] for position in positions] == [
        position["expected"] for position in positions
    ]
    assert positions[0]["proposals"] > 20 and positions[0]["accepted"] > 0
    assert engine["probes"][0]["changed"] >= 10


FEEDBACK = "the other feedback (norm_output)"


@pytest.mark.parametrize("fault", [FEEDBACK, "a window of 8"])
@pytest.mark.parametrize("drafter", ["eagle3_1"], indirect=True)
@pytest.mark.usefixtures("one_engine")
def test_parity_finds_what_is_planted_in_an_export(
    fault: str, drafter: Path, target: Target, tmp_path: Path
) -> None:
    """The same answers, and other proposals."""
    drafter_checkpoint(drafter, TargetSource(target.source), tmp_path / "exported")
    sound = read_files(tmp_path / "exported")
    faulty = planted(fault, sound, target.head_weight(), target.num_layers)
    assert isinstance(faulty, tuple)
    write_files(faulty, tmp_path / "planted")
    status, engine = parity_report(
        drafter, target, tmp_path, "--exported", str(tmp_path / "planted")
    )
    assert status == 1 and not engine["holds"] and engine["wrong_tokens"] == 0
    assert sum(position["different"] for position in engine["positions"]) > 0
    if fault == FEEDBACK:  # the first draft reads the target's states alone
        assert engine["positions"][0]["different"] == 0


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("drafter", ["eagle3_1"], indirect=True)
@pytest.mark.usefixtures("one_engine")
def test_a_quantized_export_is_served_as_its_reference_says(
    name: str, drafter: Path, target: Target, tmp_path: Path
) -> None:
    """vLLM's own eight-bit kernels; a reference that leaves activations alone proposes something else more often.

    Where a CPU has no VNNI, vLLM's int8 products overflow. Then parity says so, and most proposals are still equal.
    """
    export_drafter(load_drafter(drafter), target, tmp_path / "exported", quantize=name)
    status, engine = parity_report(
        drafter, target, tmp_path, "--exported", str(tmp_path / "exported")
    )
    report = tmp_path / "parity" / "parity.json"
    different = sum(position["different"] for position in engine["positions"])
    assert engine["wrong_tokens"] == 0 and engine["probes"][0]["changed"] >= 10
    if (engine["int8_error"] or 0) > MOST_INT8_ERROR:
        assert name == "int8" and "vnni" not in Path("/proc/cpuinfo").read_text()
        assert different < 10 and bool(status) == (not engine["holds"]), engine
        assert not different or "VNNI" in json.loads(report.read_text())["verdict"]
    else:
        assert status == 0 and engine["holds"] and different == 0, engine
        assert engine["rounding"]["engine"] <= 2 * engine["rounding"]["reference"] + 3
    # and the file of another drafter's rounding is none of this one
    raw, tensors = read_files(tmp_path / "exported")
    scale = "midlayer.mlp.down_proj.weight_scale"
    write_files((raw, tensors | {scale: tensors[scale].roll(1, 0)}), tmp_path / "planted")
    argv = [
        "parity",
        "--target",
        target.source,
        "--drafter",
        str(drafter),
        "--max_new_tokens",
        "16",
    ]
    assert main([*argv, "--exported", str(tmp_path / "planted")]) == 1


@pytest.mark.parametrize("drafter", ["eagle3_1"], indirect=True)
def test_bench(
    drafter: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in inside_vllm.QUIET.items():
        monkeypatch.setenv(variable, value)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    argv = [
        "serve",
        "--bench",
        str(prompts),
        "--port",
        "0",
        "--out",
        str(tmp_path / "bench"),
        "--target",
        target.source,
    ]
    argv += [
        "--drafter",
        str(drafter),
        "--concurrency",
        "2",
        "--max_new_tokens",
        "32",
        "--ignore_eos",
        "true",
    ]
    flags = [
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--enforce-eager",
    ]
    assert main([*argv, "--timeout", "300", "--", *flags]) == 0
    served, plain = (
        json.loads((tmp_path / "bench" / f"{name}-2.json").read_text())
        for name in ("drafter", "baseline")
    )
    assert served["total_output_tokens"] == 32 * served["completed"]
    assert served["spec_decode_acceptance_length"] > 1.2
    assert served["median_ttft_ms"] > 0 and served["median_tpot_ms"] > 0
    assert served["generated_texts"] == plain["generated_texts"] != []


def descendants(pid: int) -> list[int]:
    """All processes that one has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found
