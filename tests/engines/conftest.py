"""Stand-ins for vLLM, and a small chat target."""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from specdec.target import Target
from specdec.utils.vllm import VARIABLE
from tests.data.tiny import write_jsonl
from tests.engines.chat_targets import make_chat_target
from tests.engines.chats import LEARNT, asked, make_target
from tests.engines.fake_vllm import FakeVllm

LONG = 230.0  # seconds for processes to begin or end on a busy machine; pytest's own limit is 240


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that has a stand-in for vLLM; what it was told lies in ``tmp_path / "said"``."""
    path = stand_in(tmp_path / "python", "fake_vllm")
    monkeypatch.setenv("FAKE_VLLM_SAID", str(tmp_path / "said"))
    monkeypatch.delenv("FAKE_VLLM", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    return str(path)


def stand_in(path: Path, module: str) -> Path:
    """An executable that is taken for a Python with vLLM, and runs ``main`` of a module of this folder."""
    root = Path(__file__).parents[2]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "if sys.argv[1] == '-c': sys.exit()\n"  # whether it has vLLM
        "if sys.argv[1] == '-m': del sys.argv[1:3]\n"
        f"from tests.engines.{module} import main\nmain()\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def fake_proposals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for what records vLLM's proposals, which the environment names as vLLM's Python."""
    path = stand_in(tmp_path / "proposing", "fake_proposals")
    folder = tmp_path / "proposals"
    folder.mkdir()
    monkeypatch.setenv("FAKE_PROPOSALS", str(folder))
    monkeypatch.setenv(VARIABLE, str(path))
    return folder


@pytest.fixture
def served() -> Iterator[Callable[..., FakeVllm]]:
    """Makes fake servers in this process, and ends them."""
    made: list[FakeVllm] = []

    def make(drafting: bool, delay: float = 0.0) -> FakeVllm:
        made.append(FakeVllm(drafting, delay=delay))
        threading.Thread(target=made[-1].serve_forever, args=(0.05,), daemon=True).start()
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def end() -> Iterator[Callable[[Callable[[], bool], int], None]]:
    """Signals this process once something is true."""
    threads: list[threading.Thread] = []

    def start(when: Callable[[], bool], number: int) -> None:
        def wait() -> None:
            if soon(when, LONG):
                os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it comes true within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("chat_target"))


@pytest.fixture(scope="session")
def chat_targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's target, which learns once for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    common = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "chat_targets"
    common.mkdir(exist_ok=True)

    def make(name: str) -> Path:
        folder = common / name
        with FileLock(common / f"{name}.lock"):
            return folder if (folder / "config.json").exists() else make_chat_target(name, folder)

    return functools.cache(make)


@pytest.fixture
def target(chat_target: Path) -> Target:
    return Target.load(chat_target)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """What the target has learnt, with other answers, and every row with an id."""
    rows = [{"id": f"row-{n}", "messages": asked(said)} for n, said in enumerate(LEARNT)]
    return write_jsonl(tmp_path / "chats.jsonl", rows)


@pytest.fixture
def server(served: Callable[..., FakeVllm]) -> FakeVllm:
    """One that may be told to fail."""
    return served(False)
