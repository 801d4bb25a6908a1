"""vLLM's offline engine, in this process. Runs in vLLM's environment."""

import os
from typing import Any

from benchmarks.decoding.worker import Job, Made, System

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
CACHE = 64 << 20  # bytes of keys and values; one short text takes a tenth of it on a small target


class Measured(System):
    """Options: ``eager``, and ``draft_tokens``, which is zero for plain decoding."""

    packages = ("vllm-cpu", "transformers")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        arguments: dict[str, Any] = {
            "dtype": job.dtype,
            "max_model_len": job.longest + 16,
            "max_num_seqs": 1,
            "enforce_eager": job.options["eager"],
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": CACHE,
            "seed": 0,
        }
        self.more["arguments"] = dict(arguments)
        self.speculative = bool(job.options["draft_tokens"])
        if self.speculative:
            arguments["speculative_config"] = {
                "method": job.method,
                "model": job.served,
                "num_speculative_tokens": job.options["draft_tokens"],
            }
        self.llm = LLM(model=job.target, **arguments)

    def before(self) -> None:
        self.counted = self._counters()

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (out,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(out.outputs[0].token_ids)

    def made(self, raw: list[int]) -> Made:
        drafts, accepted = (now - then for now, then in zip(self._counters(), self.counted, strict=True))
        if not self.speculative:
            return Made(raw, len(raw) - 1, len(raw) - 1)
        return Made(raw, drafts, drafts + accepted)

    def _counters(self) -> tuple[int, int]:
        """Drafts and accepted tokens so far."""
        if not self.speculative:
            return 0, 0
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in COUNTERS}
        drafts, accepted = (int(values[name]) for name in COUNTERS)
        return drafts, accepted
