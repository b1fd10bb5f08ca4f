"""A connector that zeroes one block of what it received, so that a comparison of tokens can be seen to fail.

Named as `kv_connector_module_path` with this folder on the path; for no other use.
"""

from __future__ import annotations

from typing import Any

from kvx.vllm.connector import KvxConnector


class SpoilConnector(KvxConnector):
    """KvxConnector, but for one block of each request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._last: dict[str, int] = {}
        self._ready: list[int] = []
        self._tensors: dict[str, Any] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keeps the tensors."""
        self._tensors = kv_caches
        super().register_kv_caches(kv_caches)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remembers the first block that is loaded."""
        if num_external_tokens > 0:
            self._last[request.request_id] = blocks.get_block_ids()[0][0]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Has it zeroed once it is there."""
        super().update_connector_output(connector_output)
        self._ready += [self._last.pop(name) for name in connector_output.finished_recving or () if name in self._last]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tells the workers, before anything is computed from it."""
        meta = super().build_connector_meta(scheduler_output)
        meta.spoil, self._ready = self._ready, []
        return meta

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Zeroes it."""
        super().bind_connector_metadata(connector_metadata)
        for block in connector_metadata.spoil:
            for tensor in self._tensors.values():
                tensor[block].zero_()
