"""The systems that :mod:`benchmarks.decode` times: each builds what answers a prompt, in a process for itself.

An answer is the new token ids, and how many passes of the target came after the prompt's.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# bytes of keys and values; one short text takes a tenth of it on a small target
VLLM_CACHE = 64 << 20
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# of the process: a server that nobody holds would end at once
UNTIL_THE_END = contextlib.ExitStack()

Answer = Callable[[list[int], int], tuple[list[int], int]]


def of_specdec(job: dict[str, Any]) -> Answer:
    """specdec's decoders."""
    from specdec.decoding import PlainDecoder, SpeculativeDecoder, parse_shape
    from specdec.drafter import load_drafter
    from specdec.target import Target

    target = Target.load(job["target"], job["device"], dtype=job["dtype"])
    if job["shape"] is None:
        decoder = PlainDecoder(target, compiled=job["compiled"])
    else:
        drafter = load_drafter(job["drafter"], dtype=target.dtype).to(job["device"])
        decoder = SpeculativeDecoder(
            target, drafter, parse_shape(job["shape"]), compiled=job["compiled"]
        )

    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        made = decoder.generate(prompt, tokens, ())
        return made.ids, len(made.accepted)

    return answer


def of_vllm(job: dict[str, Any]) -> Answer:
    """vLLM's offline engine, in this process."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    more = {}
    if job["draft_tokens"]:
        more["speculative_config"] = {
            "method": job["method"], "model": job["served"], "num_speculative_tokens": job["draft_tokens"],
        }  # fmt: skip
    llm = LLM(
        model=job["target"], dtype=job["dtype"], max_model_len=job["longest"] + 16, max_num_seqs=1,
        enforce_eager=not job["compiled"], enable_prefix_caching=False, skip_tokenizer_init=True,
        disable_log_stats=False, kv_cache_memory_bytes=VLLM_CACHE, seed=0, **more,
    )  # fmt: skip

    def passes() -> int:
        found = {
            metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
        }
        return int(found.get("vllm:spec_decode_num_drafts", 0))

    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        before = passes() if job["draft_tokens"] else 0
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        ids = list(out.outputs[0].token_ids)
        return ids, passes() - before if job["draft_tokens"] else len(ids) - 1

    return answer


def of_transformers(job: dict[str, Any]) -> Answer:
    """transformers' ``generate``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=getattr(torch, job["dtype"])
    ).eval()
    model.to(job["device"])
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        ids = torch.tensor([prompt], device=job["device"])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens
        )
        return out[0, len(prompt) :].tolist(), tokens - 1

    return answer


def of_llama(job: dict[str, Any]) -> Answer:
    """A llama.cpp server on this machine; it counts drafts in its own metrics."""
    from specdec.engines.client import Endpoint
    from specdec.engines.llama import KEY, LlamaLaunch, complete, find_llama_server
    from specdec.engines.llama_bench import for_bench
    from specdec.engines.scrape import read_counters
    from specdec.export.formats import DrafterCheckpoint
    from specdec.target import TargetSource

    file = Path(job["gguf"][job["quantized"] or job["dtype"]])
    drafter = DrafterCheckpoint(*job["gguf_drafter"]) if job["draft_tokens"] else None
    launch = LlamaLaunch(
        find_llama_server(), TargetSource(job["target"]), file, port=0, draft_tokens=job["draft_tokens"] or None,
        extra=("--threads", str(job["threads"])),
    )  # fmt: skip
    folder = Path(UNTIL_THE_END.enter_context(tempfile.TemporaryDirectory()))
    served = for_bench(launch, 1, job["longest"]).server(drafter, folder / "server.log")
    endpoint = Endpoint(UNTIL_THE_END.enter_context(served).url, key=KEY)

    def passes() -> int:
        return int(read_counters(endpoint).passes)

    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        before = passes() if drafter else 0
        ids: list[int] = complete(endpoint, prompt, tokens, ignore_eos=True)["tokens"]
        return ids, passes() - before if drafter else len(ids) - 1

    return answer


SYSTEMS = {
    "specdec": of_specdec,
    "vllm": of_vllm,
    "transformers": of_transformers,
    "llama.cpp": of_llama,
}
