"""Shared test settings."""

import gc
import json
import os
import signal
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, save_drafter
from specdec.target import Target

os.environ["TOKENIZERS_PARALLELISM"] = "false"
# of what tests start: threads of several processes on a few cores only wait
os.environ["OMP_NUM_THREADS"] = "1"
if threading.current_thread() is threading.main_thread():  # a shell's background job ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny tensors: a second thread only waits for the first

SAFE_PATH = os.environ.get("PYTHONSAFEPATH")
TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n}\n\n\n" for n in range(40))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported modules and collected tests, a million objects, stay until the end: no garbage collection looks at them,
    neither while they are made nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a real vLLM begin first: they take minutes, and nobody should wait for them alone in the end."""
    slow = {item.path for item in items if item.get_closest_marker("vllm")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True, scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tests keep tokens: not with the user's."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(path))
        yield path


@pytest.fixture(autouse=True)
def safe_path_restored() -> Iterator[None]:
    """``PYTHONSAFEPATH`` is what it was at first: ``specdec.cli.main``, called by a test, sets it for the process."""
    _set_safe_path(SAFE_PATH)
    yield
    _set_safe_path(SAFE_PATH)


@pytest.fixture(autouse=True)
def precision_restored() -> Iterator[None]:
    """Fails a test that leaves torch's precision of float32 products changed: later tests would be of other numbers."""
    yield
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert precision == "highest", "the test left torch's precision of float32 products changed"


def _set_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop("PYTHONSAFEPATH", None)
    else:
        os.environ["PYTHONSAFEPATH"] = value


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """No compiled graph is there before a test, none is counted, and none is left."""
    from torch._dynamo.utils import counters  # two seconds, of the tests that compile alone

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of forty short functions."""
    path = tmp_path_factory.mktemp("text") / "functions.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random seven-layer Llama of width 32 with a byte-level tokenizer of 300 tokens, as a directory."""
    path = tmp_path_factory.mktemp("target")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # opinions worth learning
    model.save_pretrained(path)
    return path


@pytest.fixture
def drafter_directory(target_directory: Path, tmp_path: Path) -> Path:
    """A random drafter for the tiny target."""
    target = Target.load(target_directory)
    config = DrafterConfig.for_target(
        DrafterSpec(draft_vocab_size="all"),
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        identity=target.identity,
    )
    torch.manual_seed(0)
    return save_drafter(Drafter(config, torch.arange(target.vocab_size)), tmp_path / "drafter")


@pytest.fixture
def foreign_drafter(drafter_directory: Path) -> Path:
    """The same drafter, which says that it is another target's."""
    config = json.loads((drafter_directory / "config.json").read_text())
    config["drafter"]["target"]["fingerprint"] = "other"
    (drafter_directory / "config.json").write_text(json.dumps(config))
    (drafter_directory / "SHA256SUMS").unlink()
    return drafter_directory
