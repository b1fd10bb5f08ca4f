"""kvx under vLLM: the connector that moves KV caches between prefill and decode instances.

Name it where vLLM wants a KV connector::

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "KvxConnector", "kv_connector_module_path": "kvx.vllm",
        "kv_role": "kv_producer", "kv_connector_extra_config": {"key_file": "/etc/kvx/key"}}'

Importing this package needs neither vLLM nor torch; :class:`KvxConnector` does, and is looked up when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvxConnector

__all__ = ["KvxConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvxConnector":
        from .connector import KvxConnector

        return KvxConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
