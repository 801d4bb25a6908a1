"""Commands of jobs that take no time, run as ``python -m tests.studies.commands NAME OUT ...``; every run is noted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(name: str, out: Path, *more: str) -> int:
    out.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.runs").open("a") as runs:
        runs.write(f"{name} {os.getpid()} {os.environ['OMP_NUM_THREADS']}\n")
    if name == "fail":
        sys.stderr.write("specdec fit: error: the data is wrong\n")
        return 2
    if name == "die" and len((out.parent / f"{out.name}.runs").read_text().splitlines()) <= int(
        more[0]
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "empty":
        return 0
    if name == "wait":  # until a file is there, with a child that would outlive this process
        signal.signal(signal.SIGTERM, lambda *_: stop(out))
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
        (out / "pids").write_text(f"{os.getpid()} {child.pid}")
        while not Path(more[0]).exists():
            time.sleep(0.02)
        child.kill()
        child.wait()
    last = "DONE.json" if out.parent.name == "fits" else "metrics.json"
    (out / last).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return 0


def stop(out: Path) -> None:
    (out / "saved").write_text("")
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
