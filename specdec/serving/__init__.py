"""A serving engine as a child process, and what a drafter is worth in it."""

from specdec.serving.engine import find_vllm
from specdec.serving.launch import Launch
from specdec.serving.server import Server, ServerError

__all__ = ["Launch", "Server", "ServerError", "find_vllm"]
