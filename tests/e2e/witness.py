"""A connector that writes down what is in the cache of a request: at the prefill server when it is handed over, at the decode server when it has
arrived and nothing was computed from it. What is written knows nothing of kvx: a digest for each layer and head of the model.

Named as `kv_connector_module_path` with this folder on the path; for no other use. Knows one cache group, and blocks of vLLM's CPU backend.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import kvx
import torch
from vllm.distributed.parallel_state import get_tp_group

from kvx.vllm.connector import KvxConnector

#: The environment variable that names the folder to write to.
FOLDER = "KVX_WITNESS"


class WitnessConnector(KvxConnector):
    """KvxConnector, and a file of what each rank has."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Transfers that are tried again are seen in the log alone.
        logging.getLogger("kvx_connector").setLevel(logging.DEBUG)
        kvx.forward_logs(logging.DEBUG)
        self._side = vllm_config.kv_transfer_config.kv_role
        self._block = vllm_config.cache_config.block_size
        self._coming: dict[str, tuple[str, int, list[int]]] = {}
        self._there: list[tuple[str, int, list[int]]] = []
        self._tensors: dict[str, Any] = {}

    # The scheduler's role: which requests to look at, as (the prefill server's name, tokens, blocks).

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        """A prefill server hands a request over."""
        held, ticket = super().request_finished_all_groups(request, block_ids)
        if ticket is not None:
            self._there.append((request.request_id, request.num_prompt_tokens, list(block_ids[0])))
        return held, ticket

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A decode server will have a request."""
        if num_external_tokens > 0:
            name = request.kv_transfer_params["remote_request_id"]
            self._coming[request.request_id] = name, request.num_prompt_tokens, list(blocks.get_block_ids()[0])
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """A decode server has it."""
        super().update_connector_output(connector_output)
        for name in connector_output.finished_recving or ():
            if name in self._coming:
                self._there.append(self._coming.pop(name))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tells the workers, before anything more is computed."""
        meta = super().build_connector_meta(scheduler_output)
        meta.witness, self._there = self._there, []
        return meta

    # The worker's role.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keeps the tensors."""
        self._tensors = kv_caches
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Writes down what is there."""
        super().bind_connector_metadata(connector_metadata)
        rank = get_tp_group().rank_in_group
        for name, tokens, table in connector_metadata.witness:
            with (Path(os.environ[FOLDER]) / f"{self._side}-{rank}.jsonl").open("a") as file:
                for layer, tensor in sorted(self._tensors.items()):
                    for head in range(tensor.shape[1]):
                        line = {
                            "request": name,
                            "layer": layer,
                            "head": rank * tensor.shape[1] + head,
                            "digest": digest(tensor, table, head, tokens, self._block),
                        }
                        file.write(json.dumps(line) + "\n")


def digest(tensor: Any, table: list[int], head: int, tokens: int, block: int) -> str:
    """Of the keys and values of a head, token by token: in each block keys are transposed, values are not."""
    dim = tensor.shape[-1] // 2
    keys, values = [], []
    for number in table[: -(-tokens // block)]:
        halves = tensor[number, head].reshape(2, block * dim)
        keys.append(halves[0].reshape(dim, block).T)
        values.append(halves[1].reshape(block, dim))
    of = hashlib.blake2b(digest_size=16)
    for parts in (keys, values):
        of.update(torch.cat(parts)[:tokens].contiguous().view(torch.uint8).numpy().tobytes())
    return of.hexdigest()
