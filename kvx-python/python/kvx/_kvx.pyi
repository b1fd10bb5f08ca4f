"""Where kvx is written in Rust. Use the package ``kvx``, not this."""

from typing import Any

__all__ = ["__version__", "backends"]

__version__: str

def backends() -> list[dict[str, Any]]:
    """Every backend of this build, sorted by name, and what its probe says."""
