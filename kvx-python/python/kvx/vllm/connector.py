"""vLLM's connector class. It hands each call to the role that its process has."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import kvx
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from . import compat, config, discover
from .messages import KvxMetadata
from .metrics import KvxPromMetrics, KvxStats, Since
from .scheduler import KvxScheduler
from .worker import KvxWorker

logger = logging.getLogger(__name__)


#: Loggers of the package, and of its native half.
LOGGERS = ("kvx", "kvx_connector", "kvx_core", "kvx_shm", "kvx_ucx")


def _log_as_vllm_does() -> None:
    """Shows what kvx logs where vLLM shows its own, unless the program has set that up itself."""
    theirs = logging.getLogger("vllm")
    for ours in map(logging.getLogger, LOGGERS):
        if not ours.handlers and theirs.handlers:
            ours.handlers, ours.propagate = list(theirs.handlers), False
            ours.setLevel(theirs.level)
    if forward := getattr(kvx, "forward_logs", None):
        forward(logging.WARNING)


_UNTESTED = compat.check(vllm.__version__, KVConnectorBase_V1)


class KvxConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV caches between vLLM instances with kvx: see ``docs/vllm.md``."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        transfer = vllm_config.kv_transfer_config
        settings = config.read(
            transfer.kv_connector_extra_config,
            engine=str(transfer.engine_id),
            role=str(transfer.kv_role),
            policy=str(transfer.kv_load_failure_policy),
            replica=vllm_config.parallel_config.data_parallel_index,
        )
        for warning in (_UNTESTED, *settings.warnings):
            if warning:
                logger.warning("%s", warning)
        shape = discover.shape(vllm_config, kv_cache_config)
        self._as_scheduler: KvxScheduler | None = None
        self._as_worker: KvxWorker | None = None
        self._since = Since()
        if role == KVConnectorRole.SCHEDULER:
            self._as_scheduler = KvxScheduler(settings, shape)
        else:
            self._as_worker = KvxWorker(settings, vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> KvxScheduler:
        assert self._as_scheduler is not None, "a worker's connector was asked what a scheduler's knows"
        return self._as_scheduler

    @property
    def _worker(self) -> KvxWorker:
        assert self._as_worker is not None, "a scheduler's connector was asked what a worker's knows"
        return self._as_worker

    # The worker's role.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the caches, and starts to listen."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """This rank's card."""
        return self._worker.handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins what the step says."""
        self._worker.start(self._bound())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns at once: a request is computed only once all of its cache is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: other engines read the cache where it lies."""

    def wait_for_save(self) -> None:
        """Returns at once, for the same reason."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load has failed at some rank; the scheduler's side tells vLLM of all others."""
        failed = self._bound().failed
        return KVConnectorTransferResults(
            finished_recving=set(failed), failed_recving={name for name, blocks in failed.items() if not blocks}
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of these requests that are not good."""
        return {block for blocks in self._bound().failed.values() for block in blocks}

    def build_connector_worker_meta(self) -> Any:
        """What this rank reports to the scheduler's side."""
        return self._worker.reports(self._bound())

    def _bound(self) -> KvxMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, KvxMetadata)
        return meta

    # The scheduler's role.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes the cards of all ranks."""
        self._scheduler.set_handshake(metadata)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The same, of an engine without stages."""
        self._scheduler.set_handshake({(0, tp): card for tp, card in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Blocks that somebody may still write are held in the pool as if a request had them."""
        blocks = gpu_block_pool.blocks

        def hold(numbers: Iterable[int]) -> None:
            if held := [blocks[number] for number in numbers]:
                gpu_block_pool.touch(held)

        def give_back(numbers: Iterable[int]) -> None:
            if held := [blocks[number] for number in numbers]:
                gpu_block_pool.free_blocks(held)

        self._scheduler.quarantine, self._scheduler.release = hold, give_back

    def on_new_request(self, request: Any) -> None:
        """A request has come: from now on its producer keeps what it has for it."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens come from another engine."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups that are transferred: what is loaded are the request's own blocks."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        self._scheduler.after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxMetadata:
        """What the workers do in this step."""
        return self._scheduler.build_meta(scheduler_output, KvxMetadata)

    def update_connector_output(self, connector_output: Any) -> None:
        """Reads what the ranks report."""
        self._scheduler.take_reports(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks are held, and its ticket."""
        return self._scheduler.request_finished(request, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same, of an engine with one group."""
        return self._scheduler.request_finished(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Whether the workers must be told something though there is nothing to compute."""
        return self._scheduler.has_pending()

    # Both.

    def get_kv_connector_stats(self) -> KvxStats | None:
        """What has been counted since it was last asked."""
        if self._as_worker is not None:
            return self._as_worker.stats()
        return self._since(self._scheduler.stats())

    def shutdown(self) -> None:
        """Tells other engines goodbye. vLLM does not call it when it is ended by a signal: they notice then."""
        if self._as_worker is not None:
            self._as_worker.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxStats:
        """Stats from what another process sent."""
        return KvxStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KvxPromMetrics:
        """What Prometheus sees."""
        return KvxPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
