"""Runs in vLLM's environment: vLLM's own connector of hidden states, for a CPU.

The stock one copies through CUDA streams and pinned memory, and asks for a layout of the cache that the CPU backend
does not have. vLLM 0.32 and 0.33.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes each request's states at once, under their final name when they are whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_lock = False
        self._written: set[str] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: the backend has only one."""
        return None

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        temporary = f"{pending.filename}.part"
        save_file(
            {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()},
            temporary,
        )
        os.replace(temporary, pending.filename)
        self._written.add(pending.req_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write what has ended; it is done at once."""
        if self.has_connector_metadata():
            for pending in getattr(self._get_connector_metadata(), "pending_saves", []):
                self._submit_async_write(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        done = self._accumulated_finished_req_ids & self._written
        self._accumulated_finished_req_ids -= done
        self._written -= done
        return done or None, None
