"""Runs in vLLM's own environment: ``python inside_vllm.py``, in JSON, a line in and a line out for every job."""

import gc
import json
import os
import sys
from typing import Any

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def offline(
    target: str,
    drafter: dict[str, Any] | None,
    tokens: int,
    asked: list[tuple[float, list[list[int]]]],
) -> list[dict[str, Any]]:
    """For each temperature and its prompts the tokens, every prompt with a seed of its own, and the counters of all."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.sample import rejection_sampler

    expand = rejection_sampler.expand_batch_to_tokens
    more = {"speculative_config": drafter} if drafter else {}
    llm = LLM(
        model=target, dtype="float32", max_model_len=256, max_num_seqs=16, enforce_eager=True, disable_log_stats=False,
        seed=0, **more,
    )  # fmt: skip
    found, before = [], _counted(llm)
    for temperature, prompts in asked:
        if temperature > 0:
            _keep_temperatures()
        how = [
            SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=number)
            for number in range(len(prompts))
        ]
        made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        after = _counted(llm)
        counts = {
            name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after
        }
        found.append({"ids": [list(one.outputs[0].token_ids) for one in made], **counts})
        before = after
    # another engine may start in this process
    rejection_sampler.expand_batch_to_tokens = expand
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def _counted(llm: Any) -> dict[str, list[int]]:
    """The counters of drafts so far: a number each, or one for every position."""
    return {
        metric.name.removeprefix("vllm:spec_decode_num_"): list(
            getattr(metric, "values", None) or [metric.value]
        )
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode")
    }


def _keep_temperatures() -> None:
    """Mend https://github.com/vllm-project/vllm/issues/55005: on a CPU, what each draft is divided by gets lost."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(
        of_each: torch.Tensor,
        ends: torch.Tensor,
        tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(of_each == replace_from, replace_to, of_each).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand


def chat(url: str, text: str, tokens: int) -> dict[str, Any]:
    """A streamed chat completion through OpenAI's client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    parts = [event.choices[0].delta.content or "" for event in stream if event.choices]
    return {"model": model, "parts": parts}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    for line in sys.stdin:
        job = json.loads(line)
        answer = {"offline": offline, "chat": chat}[job.pop("do")](**job)
        answers.write(f"{json.dumps(answer)}\n")
