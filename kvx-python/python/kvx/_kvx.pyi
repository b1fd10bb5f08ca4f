"""Where kvx is written in Rust. Use the package ``kvx``, not this."""

from typing import Any, final

__all__ = ["LoadFailure", "SchedulerSide", "StepUpdates", "WorkerSide", "__version__", "backends"]

__version__: str

def backends() -> list[dict[str, Any]]:
    """Every backend of this build, sorted by name, and what its probe says."""

# For engines that have a scheduler of their own: `kvx.vllm` is made of these.

@final
class SchedulerSide:
    """What an engine's scheduler calls. It never touches memory or a socket: what the workers are to do is bytes, and so is what they report."""

    def __new__(cls, config: str, life: bytes) -> SchedulerSide:
        """Of a scheduler that has just started: its configuration as JSON, and the engine's life, 16 random bytes that its processes share."""

    def on_new_request(self, id: str, prompt_tokens: int, params: str | None = None) -> None:
        """A request has come; ``params`` are its ``kv_transfer_params``, as JSON."""

    def matched_tokens(self, id: str, prompt_tokens: int, params: str | None, computed: int) -> tuple[int | None, bool]:
        """How many tokens come from outside beyond those that the engine has (none: ask again later), and whether the request waits for them."""

    def after_alloc(self, id: str, tables: list[list[int]], external: int) -> None:
        """A request has blocks, all of them by group; so many tokens of them come from outside."""

    def build_step(self, scheduled: list[tuple[str, int, int, list[list[int]]]]) -> bytes:
        """What the workers are told in a step that computes these: id, tokens before, tokens now, blocks that were added by group."""

    def request_finished(
        self, id: str, prompt_tokens: int, params: str | None, status: str, tokens: int, tables: list[list[int]]
    ) -> tuple[bool, str | None]:
        """A request has ended as ``length``, ``stopped``, ``aborted`` or ``failed``: whether its blocks are held, and its ticket as JSON."""

    def preempted(self, id: str) -> bool:
        """The engine takes a request's blocks: whether they must be held all the same."""

    def update(self, rank: int, report: bytes) -> StepUpdates:
        """Takes what the worker of a rank has reported."""

    def set_handshake_metadata(self, rank: int, card: bytes) -> bool:
        """Takes a rank's card; whether all are there now."""

    def cards(self) -> list[bytes]:
        """The ranks' cards, in order."""

    def has_pending(self) -> bool:
        """Whether the next step has something to tell the workers."""

    def next_wake(self) -> float | None:
        """In how many seconds there will be something to tell them though nothing else happens."""

    def tables(self) -> dict[str, int]:
        """What is in its tables now."""

    def stats(self) -> dict[str, int]:
        """What has been counted since it was made."""

    def tokens_to_produce(self, prompt_tokens: int) -> int:
        """How many of a prompt's tokens a producer should compute, for consumers with the same policy."""

@final
class StepUpdates:
    """What of a rank's report the engine has to act on."""

    @property
    def sent(self) -> list[str]: ...
    @property
    def drained(self) -> list[str]: ...
    @property
    def received(self) -> list[tuple[str, int]]: ...
    @property
    def failed(self) -> list[LoadFailure]: ...
    @property
    def quarantined(self) -> list[tuple[int, int]]: ...
    @property
    def unquarantined(self) -> list[tuple[int, int]]: ...

@final
class LoadFailure:
    """A request that could not be loaded."""

    @property
    def request(self) -> str: ...
    @property
    def blocks(self) -> list[tuple[int, int]]: ...
    @property
    def computed(self) -> int: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def reason(self) -> str: ...

@final
class WorkerSide:
    """What a worker process of an engine calls: one rank, with its caches registered, its thread and its control channel."""

    def __new__(cls, config: str, life: bytes, regions: list[tuple[int, int, Any]]) -> WorkerSide:
        """Registers a rank's caches: its configuration as JSON, the engine's life, its memory as (address, bytes, what keeps it)."""

    @property
    def backends(self) -> list[str]: ...
    def handshake_metadata(self) -> bytes:
        """The rank's card."""

    def address(self) -> str:
        """Where its control channel listens."""

    def serve_cards(self, cards: list[bytes]) -> None:
        """Takes the cards of all ranks, once."""

    def start_load(self, step: bytes) -> None:
        """Begins what a step says."""

    def has_report(self) -> bool:
        """Whether something has finished that the scheduler waits for."""

    def wait_for_report(self, timeout_s: float) -> bool:
        """Waits for that; whether something has."""

    def take_report(self) -> bytes:
        """What has finished since the last report."""

    def stats(self) -> dict[str, int]:
        """What it has done since it was started."""

    def peers(self) -> str:
        """All peers, as they are now: JSON."""

    def open(self) -> tuple[int, int]:
        """Leases that are not freed, and requests that are not over or whose blocks are kept."""

    def shutdown(self) -> None:
        """Tells all peers goodbye, and ends its thread."""
