"""What the two sides of the connector tell each other through vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class KvxHandshake(KVConnectorHandshakeMetadata):
    """A rank's card, from its worker to the scheduler, once."""

    card: bytes
    #: The life of the engine: the same at all ranks.
    life: bytes
    #: Where the rank's control channel listens.
    address: str


@dataclass
class KvxMetadata(KVConnectorMetadata):
    """What the workers do in one step."""

    step: bytes
    #: The cards of all ranks, with the first step.
    cards: list[bytes] | None = None
    #: Requests whose load has failed at some rank and ended at all, and their blocks that are not good; without blocks, none is.
    failed: Mapping[str, frozenset[int]] = field(default_factory=dict)
    #: For how long to wait for news if there is none, in seconds: where nothing is computed.
    idle_s: float = 0.0


@dataclass
class KvxReports(KVConnectorWorkerMetadata):
    """What the ranks have to report after a step."""

    by_rank: dict[int, list[bytes]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The reports of both."""
        assert isinstance(other, KvxReports)
        merged = {rank: list(reports) for rank, reports in self.by_rank.items()}
        for rank, reports in other.by_rank.items():
            merged.setdefault(rank, []).extend(reports)
        return KvxReports(merged)
