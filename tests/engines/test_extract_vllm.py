"""Features from vLLM: refusals without one, and a real one's numbers beside the target's own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.cli import main
from specdec.data import TextData
from specdec.engines import extract
from specdec.features import Cached, OnTheFly, Streamed
from specdec.features.runners import INSIDE
from specdec.features.store import FeatureIndex
from specdec.target import Target, TargetSource
from specdec.utils.vllm import VARIABLE
from tests.features.test_streamed import below
from tests.tiny import llama_config

FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)
job = json.loads(sys.argv[2])
if "unheard" in job["more"]:
    sys.stdout.write(json.dumps({{"refused": "unexpected argument 'unheard'"}}) + "\\n")
    sys.exit()
sys.exit("the model does not load, in " + str(job["more"].get("tensor_parallel_size")))
"""


@pytest.fixture(scope="module")
def servable(target_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose heads are wide enough for vLLM's kernels."""
    path = tmp_path_factory.mktemp("servable")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(target_directory)
    config = llama_config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def arguments(target: Path, text: Path) -> list[str]:
    return [
        *(
            "--model.target.source",
            str(target),
            "--model.drafter.draft_vocab_size",
            "200",
            "--engine",
            "vllm",
        ),
        *(
            "--data",
            "TextData",
            "--data.train",
            str(text),
            "--data.val",
            str(text),
            "--data.seq_len",
            "40",
        ),
    ]


def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python with a vLLM that fails."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(path))


def test_a_python_without_a_known_vllm_is_refused(tmp_path: Path) -> None:
    """By the script that runs there."""
    job = json.dumps({"known": ["0.1.", "0.2."]})
    done = subprocess.run(
        [sys.executable, INSIDE / "extract.py", job], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["refused"].startswith(
        "specdec needs vLLM 0.1.x or 0.2.x, and this Python has "
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{tensor_parallel_size: 2}", "vLLM ended by itself: the model does not load, in 2"),
        ("{}", "vLLM ended by itself: the model does not load, in None"),
        ('{"unheard": 1}', "vLLM refuses: unexpected argument 'unheard'"),
    ],
)
def test_vllm_takes_more_arguments(
    given: str, message: str, servable: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake(monkeypatch, tmp_path)
    out = tmp_path / "cache"
    asked = ["cache", *arguments(servable, text_file), "--out", str(out)]
    assert main([*asked, "--vllm_args", given]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_target_for_vllm_takes_no_device_of_its_own(
    servable: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake(monkeypatch, tmp_path)
    loaded: list[Target] = []
    load = TargetSource.load

    def seen(source: TargetSource, device: str = "cpu") -> Target:
        assert source.device_map is None
        loaded.append(load(source, device))
        return loaded[-1]

    monkeypatch.setattr(TargetSource, "load", seen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = ["cache", *arguments(servable, text_file), "--model.target.device_map", "auto"]
    assert main([*asked, "--out", str(tmp_path / "cache")]) == 2
    assert "vLLM ended" in capsys.readouterr().err
    assert [target.device.type for target in loaded] == ["cpu"]


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has vLLM")
def test_a_real_vllm_gives_the_targets_features(
    servable: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every boundary from the embeddings to the last, and the final state, of all rows; and a run reads them."""
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    for name, value in quiet.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "cache"
    layers = list(range(8))
    monkeypatch.setattr(extract, "SHARD_BYTES", 500_000)
    more = ["--layers", *map(str, layers), "--out", str(out)]
    assert main(["cache", *arguments(servable, text_file), *more]) == 0
    contract = FeatureIndex.read(out / "index.json").contract
    assert contract.engine.startswith("vllm 0.32.") and contract.layers == tuple(layers)
    target = Target.load(servable)
    data = TextData(str(text_file), str(text_file), seq_len=40)
    data.prepare(target.tokenizer)
    for asked, final in ((layers, False), ([7], True)):
        source = Cached(str(out)).open(target, data, asked, final)
        rows = data.splits.train
        real = rows.documents_BT >= 0
        stored, true = (one(target, rows, asked, final) for one in (source, OnTheFly()))
        pairs: list[Any] = [(stored.aux_BTNH, true.aux_BTNH), (stored.final_BTH, true.final_BTH)]
        for found, wanted in pairs:
            torch.testing.assert_close(found[real], wanted[real], rtol=1e-5, atol=1e-5)


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has vLLM")
def test_a_producer_runs_a_real_vllm(
    servable: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed to a trainer that has parts of the target; the states are those of its layers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    whole, parts = Target.load(servable), Target.load(servable, parts=True)
    data = TextData(str(text_file), str(text_file), seq_len=40)
    data.prepare(whole.tokenizer)
    layers, spec = (
        [2, 4, 6],
        Streamed(engine="vllm", rows=4, ahead=1, vllm_args={"max_num_seqs": 8}),
    )
    source: Any = spec.open(parts, data, layers, False)
    data.reader = source
    try:
        assert source.contract.engine.startswith("vllm 0.32.") and parts.is_of(whole.identity)
        for number, batch in zip(range(5), batches := iter(data.train_dataloader()), strict=False):
            # vLLM dies, and the producer starts it again for the rows that were not announced yet
            if number == 1:
                (vllm,) = [
                    pid
                    for pid, command in below(os.getpid())
                    if "inside_vllm/extract.py" in command
                ]
                os.kill(vllm, signal.SIGKILL)
            real = batch.documents_BT >= 0
            found, wanted = (
                source(parts, batch, layers, False),
                OnTheFly()(whole, batch, layers, False),
            )
            for ours, own in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours[real], own[real], rtol=1e-5, atol=1e-5)
        batches.close()  # type: ignore[attr-defined]
    finally:
        source.close()
