"""A worker's role of the connector: one rank."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping
from typing import Any

from .. import _kvx
from ..errors import MisuseError
from . import config, discover, layout
from .config import Settings
from .messages import KvxHandshake, KvxMetadata, KvxReports
from .metrics import KvxStats, Since

logger = logging.getLogger(__name__)


class KvxWorker:
    """A worker's role: see the module."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self.settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._side: _kvx.WorkerSide | None = None
        self._life = b""
        self._rank = 0
        self._since = Since()

    @property
    def side(self) -> _kvx.WorkerSide:
        """kvx's worker."""
        if self._side is None:
            raise MisuseError("the caches are not registered: register_kv_caches was not called")
        return self._side

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Registers the caches, and starts to listen."""
        place = discover.place(self._vllm_config)
        caches, groups = discover.caches(self._vllm_config, self._kv_cache_config, tensors)
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        described, regions = layout.rank_layout(caches, groups, place, heads)
        owners = {cache.storage_address: tensors[cache.name].untyped_storage() for cache in caches}
        first = place.tp == 0 and place.pp == 0
        self._rank = place.pp * place.tp_size + place.tp
        self._life = discover.shared_life()
        settings = self.settings
        form = {
            "engine": settings.engine,
            # The first rank serves the cards of all.
            "listen": settings.address if first else config.join(_own_host(settings.host), 0),
            "keys": list(settings.keys),
            "key_of_group": settings.key_of_group,
            "facts": discover.facts(self._vllm_config, settings.model),
            "layout": described,
            "backend": settings.backend,
            "digests": settings.digests,
        }
        memory = [(address, size, owners[address]) for address, size in regions]
        self._side = _kvx.WorkerSide(json.dumps(form), self._life, memory)
        logger.info(
            "kvx: rank %d of engine %s listens at %s, with %s; caches: %d, regions: %d",
            self._rank, settings.engine, self._side.address(), ", ".join(self._side.backends), len(caches), len(regions),
        )  # fmt: skip

    def handshake(self) -> KvxHandshake:
        """The rank's card, for the scheduler."""
        return KvxHandshake(self.side.handshake_metadata(), self._life, self.side.address())

    def start(self, meta: KvxMetadata) -> None:
        """Begins what a step says."""
        if meta.cards is not None:
            self.side.serve_cards(meta.cards)
        self.side.start_load(meta.step)

    def reports(self, meta: KvxMetadata | None) -> KvxReports | None:
        """What there is to report, after a wait if nothing is computed."""
        side = self.side
        if not side.has_report() and not (meta and meta.idle_s and side.wait_for_report(meta.idle_s)):
            return None
        reports = [side.take_report()]
        while side.has_report():
            reports.append(side.take_report())
        return KvxReports({self._rank: reports})

    def stats(self) -> KvxStats | None:
        """What has been counted since it was last asked."""
        return None if self._side is None else self._since(self._side.stats())

    def shutdown(self) -> None:
        """Tells other engines goodbye."""
        if self._side is not None:
            self._side.shutdown()


def _own_host(host: str) -> str:
    """The host at which this rank listens: the engine's, or on another machine than its first rank's, that machine's own."""
    bare = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((bare, 0))
        return host
    except OSError:
        from vllm.utils.network_utils import get_ip

        return str(get_ip())
