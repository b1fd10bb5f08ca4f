"""What is counted, for vLLM's log and for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

#: Counters: the name in a step's stats, and what it counts. Those of workers are counted by each rank.
COUNTERS: dict[str, str] = {
    "loads": "Caches of requests that a rank has loaded",
    "failed_loads": "Loads that did not end as loaded at a rank",
    "bytes": "Bytes that ranks have read from other engines' memory",
    "segments": "Segments of memory that these bytes came in",
    "transfer_us": "Microseconds from the first byte asked for until the last was there, summed over loads",
    "granted": "Leases granted on caches for other engines",
    "sent": "Leases that ended as confirmed or given back",
    "expired": "Leases that nobody extended",
    "withdrawn": "Leases that were taken back",
    "unpublished": "Requests for another engine that were not published",
    "loads_begun": "Loads that the scheduler ordered, retries included",
    "retries": "Loads that were tried again",
    "received": "Requests that were loaded by every rank",
    "failed": "Requests that could not be loaded",
    "aborted": "Loads that were aborted",
    "released": "Leases given back without a load, or after one that failed",
    "bad_tickets": "Tickets that could not be read",
    "used_tickets": "Requests with a ticket that another request had used",
}


class KvxStats(KVConnectorStats):
    """What has been counted in one step, or between two lines of the log."""

    def reset(self) -> None:
        """Starts anew."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another's counts."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: how much, how fast, and what went wrong."""
        data = self.data
        loads, seconds = data.get("loads", 0), data.get("transfer_us", 0) / 1e6
        megabytes = data.get("bytes", 0) / 2**20
        reduced: dict[str, int | float] = {
            "Num loads": loads,
            "Avg load time (ms)": round(seconds / loads * 1e3, 3) if loads else 0,
            "Avg MB per load": round(megabytes / loads, 3) if loads else 0,
            "Throughput (MB/s)": round(megabytes / seconds, 3) if seconds else 0,
            "Avg number of segments": round(data.get("segments", 0) / loads, 1) if loads else 0,
        }
        rest = ("failed_loads", "granted", "sent", "expired", "withdrawn", "retries", "failed", "aborted", "bad_tickets")
        return reduced | {name: data[name] for name in rest if data.get(name)}


class Since:
    """What has been counted since it was last asked."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def __call__(self, now: Mapping[str, int]) -> KvxStats | None:
        """The difference, or nothing."""
        grown = {name: value - self._before.get(name, 0) for name, value in now.items() if name in COUNTERS}
        self._before = dict(now)
        grown = {name: value for name, value in grown.items() if value > 0}
        return KvxStats(data=grown) if grown else None


class KvxPromMetrics(KVConnectorPromMetrics):
    """One counter for each of :data:`COUNTERS`: ``vllm:kvx_loads``, which Prometheus shows as ``vllm:kvx_loads_total`` ..."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvx_{name}", documentation=f"{text}.", labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds a step's counts."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
