"""vLLM's own scheduler over kvx's connector and kvx's own worker, with a model runner that computes nothing.

The cache is real memory that a real worker moves; what a forward pass would write there is a pattern of the request and the token, so that what
arrives can be looked at. No model's weights are needed, only a `config.json`.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvx.vllm import KvxConnector, discover
from kvx.vllm.layout import Place

BLOCK, BLOCKS, HEADS, DIM = 32, 100, 2, 32

init_none_hash(sha256)


def write_model(folder: Path) -> Path:
    """What vLLM wants to know of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM,
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def without_a_model() -> Iterator[None]:
    """What a worker asks of vLLM's groups of processes and of a model's layers, of which there are none here."""
    with (
        mock.patch.object(discover, "place", lambda config: Place(0, 1, 0, 1)),
        mock.patch.object(discover, "shared_life", lambda: os.urandom(16)),
        mock.patch.object(discover, "_backends", lambda config, names: dict.fromkeys(names, CPUAttentionBackend)),
        mock.patch.object(discover, "_variant", lambda *arguments: "vec"),
    ):
        yield


class Engine:
    """One engine with one rank."""

    _names = itertools.count(1)

    def __init__(
        self, model: Path, key: Path, role: str, port: int, *, policy: str = "fail", blocks: int = BLOCKS,
        extra: dict[str, Any] | None = None, windows: Iterable[int | None] = (None,), caching: bool = True,
    ) -> None:  # fmt: skip
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
        cache.kv_cache_layout = "LBHNC"
        transfer = KVTransferConfig(
            kv_connector="KvxConnector",
            kv_connector_module_path="kvx.vllm",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"key_file": str(key), "host": "127.0.0.1", "port": port, "backend": "shm"} | (extra or {}),
        )
        scheduling = SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=64, max_model_len=2048, enable_chunked_prefill=True, is_encoder_decoder=False
        )
        self.config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="bfloat16", seed=0, skip_tokenizer_init=True),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            scheduler_config=scheduling,
            kv_transfer_config=transfer,
        )
        self.config.cache_config.num_gpu_blocks = blocks
        self.windows = tuple(windows)
        groups = [KVCacheGroupSpec([f"layers.{at}.attn"], self._spec(window)) for at, window in enumerate(self.windows)]
        self.caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.caches,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
        )
        shape = (blocks, HEADS, BLOCK, 2 * DIM)
        self.tensors = {group.layer_names[0]: torch.zeros(shape, dtype=torch.bfloat16) for group in groups}
        self.worker = KvxConnector(self.config, KVConnectorRole.WORKER, self.caches)
        with without_a_model():
            self.worker.register_kv_caches(self.tensors)
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))})
        self.free_at_start = self.free
        #: By request: the seed of its pattern, its blocks by group.
        self.seeds: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.tickets: dict[str, dict[str, Any] | None] = {}
        self.computed: dict[str, int] = {}
        self.spoil: Callable[[KVConnectorOutput], None] = lambda output: None

    @staticmethod
    def _spec(window: int | None) -> Any:
        common: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.bfloat16}
        return FullAttentionSpec(**common) if window is None else SlidingWindowSpec(**common, sliding_window=window)

    # What the engine's frontend does.

    def add(self, prompt: int, params: dict[str, Any] | None, *, tokens: int = 3, seed: int = 1) -> Request:
        """A request of so many tokens comes. Requests of one seed begin alike."""
        sampling = SamplingParams(max_tokens=tokens)
        sampling.update_from_generation_config({}, 2)
        made = Request(
            request_id=f"{self.config.kv_transfer_config.kv_role}-{next(self._names)}",
            prompt_token_ids=[(seed * 31 + at) % 1000 for at in range(prompt)],
            sampling_params=sampling,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        made.kv_transfer_params = params
        self.seeds[made.request_id] = seed
        self.scheduler.add_request(made)
        return made

    def abort(self, request: Request) -> None:
        """A client has gone."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    # What the engine does in a step.

    def step(self) -> None:
        """Schedules, "computes", moves and hears what came of it: each of vLLM's calls, in its order."""
        plan = self.scheduler.schedule()
        meta = pickle.loads(pickle.dumps(plan.kv_connector_metadata))
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        sampled = self._forward(plan)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(plan.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(self.worker.build_connector_worker_meta())),
        )
        self.worker.clear_connector_metadata()
        self.spoil(output)
        names = list(plan.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] if name in sampled else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=None if output.is_empty() else output,
        )
        for outputs in self.scheduler.update_from_output(plan, ran).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.tickets[one.request_id] = one.kv_transfer_params

    def _forward(self, plan: Any) -> set[str]:
        """Writes what a forward pass would; names of requests that have a new token."""
        start: dict[str, int] = {}
        for new in plan.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            start[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for name, more, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            start[name] = computed
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(table) for table in more]
            elif more is not None:
                for table, added in zip(self.tables[name], more, strict=True):
                    table += added
        sampled = set()
        for name, count in plan.num_scheduled_tokens.items():
            first = start[name]
            if name not in self.computed:
                self.computed[name] = 0
            self.computed[name] += count
            for group in range(len(self.windows)):
                for at in range(first, first + count):
                    self._cell(name, group, at)[:] = self._pattern(name, group, at)
            if first + count >= self.scheduler.requests[name].num_prompt_tokens:
                sampled.add(name)
        return sampled

    # What is in the cache.

    def _cell(self, name: str, group: int, at: int) -> torch.Tensor:
        """Key and value of a token, [heads, 2, dim], where this backend keeps them: keys are transposed."""
        block = self.tensors[f"layers.{group}.attn"][self.tables[name][group][at // BLOCK]]
        halves = block.view(HEADS, 2, BLOCK * DIM)
        keys = halves[:, 0].view(HEADS, DIM, BLOCK)[:, :, at % BLOCK]
        values = halves[:, 1].view(HEADS, BLOCK, DIM)[:, at % BLOCK]
        return _Cell(keys, values)

    def _pattern(self, name: str, group: int, at: int) -> torch.Tensor:
        base = (self.seeds[name] * 7 + group * 50 + at) % 200
        return (torch.arange(HEADS * 2 * DIM) % 50 + base).view(HEADS, 2, DIM).to(torch.bfloat16)

    def right(self, request: Request, tables: list[list[int]], tokens: range, group: int = 0) -> bool:
        """Whether these tokens of a request are in these blocks."""
        self.tables[request.request_id] = tables
        cells = ((self._cell(request.request_id, group, at), self._pattern(request.request_id, group, at)) for at in tokens)
        return all(torch.equal(cell.both(), pattern) for cell, pattern in cells)

    def blocks_of(self, request: Request) -> list[list[int]]:
        """The blocks that a request has."""
        return [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request.request_id)]

    @property
    def free(self) -> int:
        """Blocks that no request has."""
        return int(self.scheduler.kv_cache_manager.block_pool.free_block_queue.num_free_blocks)

    @property
    def idle(self) -> bool:
        """Whether nothing is left: of requests, blocks, leases, loads."""
        scheduler = self.scheduler
        tables = self.connector._scheduler.tables()
        return (
            not scheduler.requests
            and self.free == self.free_at_start
            and not any(tables.values())
            and not self.connector._scheduler._requests
            and not self.connector._scheduler._failed
            and not self.connector._scheduler._loading
            and self.worker._worker.side.open() == (0, 0)
        )

    def close(self) -> None:
        """Ends it as a process would that is ended."""
        self.worker.shutdown()


class _Cell:
    """Key and value of one token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = keys, values

    def __setitem__(self, where: slice, pattern: torch.Tensor) -> None:
        self._keys[where], self._values[where] = pattern[:, 0], pattern[:, 1]

    def both(self) -> torch.Tensor:
        """[heads, 2, dim]."""
        return torch.stack((self._keys, self._values), 1)


def run(*engines: Engine, until: Callable[[], bool], patience: float = 20.0) -> None:
    """Lets engines step in turn until something holds."""
    end = time.monotonic() + patience
    while not until():
        assert time.monotonic() < end, "it does not come to this"
        for engine in engines:
            engine.step()
