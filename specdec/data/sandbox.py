"""A process that renders somebody else's chat template under limits, so that one that loops or grows does no harm.

Jinja's sandbox keeps a template away from the machine. It does not keep it from running forever or from filling the
memory. :mod:`specdec.data.rendering` starts this file as a script and sends it a template once. The file imports
nothing of specdec, so that it starts within a second. Its limits count its own computing and memory: a process that
stands still has taken none.

A request is a line of JSON with ``source``, ``conversations``, ``special`` (the tokenizer's special tokens by name),
``memory`` (bytes beyond what the process has), ``seconds`` (of computing) and ``characters`` (of one rendering). The
answer is a line of JSON: ``error``, null or the reason.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template


def limit_memory(memory: int) -> None:
    """Let this process take this many bytes more than it has; Linux alone counts what it has."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    limit = pages * resource.getpagesize() + memory
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_time(seconds: float) -> None:
    """Let this process compute this many seconds more; then the kernel ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def fault_of(request: dict[str, Any]) -> str | None:
    """Why the template cannot be used, from rendering each conversation; None if it can.

    A template may well refuse a conversation: only one that refuses all of them is at fault.
    """
    reasons = []
    for conversation in request["conversations"]:
        try:
            texts, _ = render_jinja_template(
                conversations=[conversation["messages"]],
                tools=conversation["tools"],
                chat_template=request["source"],
                add_generation_prompt=conversation["prompt"],
                **request["special"],
            )
            if len(texts[0]) > request["characters"]:
                return f"it makes {len(texts[0]):,} characters of it"
        except MemoryError:
            return "memory"
        except Exception as error:  # noqa: BLE001  a template raises what it likes
            reasons.append(reason_of(error))
    refuses_all = len(reasons) == len(request["conversations"])
    return reasons[0] if reasons and refuses_all else None


def reason_of(error: Exception) -> str:
    """The words of a template that refuses; of any other error its kind, too."""
    if isinstance(error, jinja2.TemplateError | ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def answer_requests() -> None:
    """Answer requests until the pipe closes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_memory(request["memory"])
        limit_time(request["seconds"])
        try:
            fault = fault_of(request)
        except MemoryError:
            fault = "memory"
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        sys.stdout.write(json.dumps({"error": fault}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    answer_requests()
