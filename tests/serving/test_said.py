"""The reason of a fall is found in a log like vLLM's."""

from pathlib import Path

import pytest

from specdec.serving import said

LOG = """\
(APIServer pid=1) WARNING 11-21 This can cause errors like `OSError: [Errno 24] Too many open files`

(EngineCore pid=2) INFO 11-21 Initializing
(Worker pid=3) ERROR 11-21     raise ValueError(
(Worker pid=3) ERROR 11-21 ValueError: no room on node 0
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "ValueError: no room on node 0"),
        ("a.b.ValidationError: 1 error\n  Value error, too long. [x]\n  see https://c\n", "Value error, too long. [x]"),
        ("WARNING\n  Killed \n\n", "Killed"),
        (LOG.splitlines()[0], LOG.splitlines()[0]),
        ("", "it said nothing"),
    ],
)
def test_reasons(log: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert said.reason(path) == reason


def test_the_end_of_a_log(tmp_path: Path) -> None:
    assert said.tail(tmp_path / "nowhere") == [] and said.reason(tmp_path / "nowhere") == "it said nothing"
    (tmp_path / "log").write_bytes(b"\n".join(b"line %d" % n for n in range(90)) + b"\n\xff\n")
    assert said.tail(tmp_path / "log", 2) == ["line 89", "\N{REPLACEMENT CHARACTER}"]
    assert len(said.tail(tmp_path / "log")) == said.TAIL
