"""Where kvx is written in Rust. Use the package ``kvx``, not this."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, SupportsIndex, final

from ._engine import Blocks

__all__ = [
    "Backend",
    "Bell",
    "Engine",
    "Fetch",
    "Key",
    "Layout",
    "Lease",
    "LoadFailure",
    "Model",
    "Region",
    "SchedulerSide",
    "StepUpdates",
    "Ticket",
    "WorkerSide",
    "__version__",
    "backends",
    "log_close",
    "log_forked",
    "log_open",
    "log_take",
    "metrics",
    "open_backend",
    "record_metrics",
]

__version__: str

def backends() -> list[dict[str, Any]]:
    """Every backend of this build, sorted by name, and what its probe says."""

def open_backend(name: str | None, options: Sequence[tuple[str, str]]) -> Backend:
    """Opens a backend: the one that is named, else the one that ``KVX_BACKEND`` names, else the best that can be used here."""

def record_metrics() -> None:
    """Counts, from now on, in every engine that is started."""

def metrics() -> str:
    """Everything counted so far, in Prometheus's text format."""

def log_open(level: int) -> None:
    """Keeps what is said from this level on, by Python's numbers, for whoever takes it with ``log_take``."""

def log_take(
    timeout: float,
) -> tuple[list[tuple[int, str, str, float, str | None, str | None, int | None]], int] | None:
    """What was said and not yet taken, and how much was lost; waits up to ``timeout`` seconds for something.

    ``None`` once it is closed and everything was taken.
    """

def log_close() -> None:
    """Nothing more is kept."""

def log_forked() -> None:
    """To be called in a child that was forked."""

@final
class Backend:
    """A fabric that is open: what registers memory and moves bytes. ``kvx.open_backend`` opens one."""

    @property
    def name(self) -> str:
        """Its name."""
    @property
    def chosen(self) -> str:
        """Which backend was chosen, why, and what was found."""
    @property
    def capabilities(self) -> dict[str, Any]:
        """What it can do, as it was opened."""
    def allocate(self, nbytes: SupportsIndex) -> Region:
        """Zeroed memory of the kind that it moves fastest: what peers on the same host can map, huge pages, memory near a device."""
    def close(self) -> None:
        """Ends every connection, waits until nothing moves any more, and frees everything.

        Engines that use it must be closed before. Once is enough; to let go of the backend does the same without waiting.
        """
    def __enter__(self) -> Backend: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Key:
    """A secret that all engines of one deployment share: who has it may talk to them, nobody else. It is never printed."""

    @staticmethod
    def generate() -> Key:
        """A new key, from the operating system's random numbers."""
    @staticmethod
    def from_bytes(data: bytes) -> Key:
        """A key of these 32 bytes. They should be random: a password is guessed."""
    @staticmethod
    def from_text(text: str) -> Key:
        """The key that ``text`` holds, in the form of a key's file."""
    @staticmethod
    def from_file(path: str | PathLike[str], *, group: bool = False) -> Key:
        """Reads a key's file, which nobody but its owner may read or write; with ``group``, its group may read it, too."""
    def write_new(self, path: str | PathLike[str]) -> None:
        """Writes it into a new file that its owner alone may read."""

@final
class Model:
    """What a model's layers keep per token."""

    @staticmethod
    def from_config(config: str | PathLike[str] | Mapping[str, Any]) -> Model:
        """The model that a Hugging Face ``config.json`` describes.

        ``config`` is the path of one, of a directory that holds one, or what it says, as a mapping.
        """
    @staticmethod
    def preset(name: str) -> Model:
        """A well-known model, by one of the names that ``presets`` lists: what its ``config.json`` says, in bf16."""
    @staticmethod
    def presets() -> list[str]:
        """The names of all presets."""
    @staticmethod
    def llama_like(layers: SupportsIndex, kv_heads: SupportsIndex, head_dim: SupportsIndex, dtype: str = "bf16") -> Model:
        """A model whose layers all keep ``kv_heads`` heads of ``head_dim`` elements, with full attention."""
    @staticmethod
    def mla_like(layers: SupportsIndex, latent_dim: SupportsIndex, dtype: str = "bf16") -> Model:
        """A model whose layers all keep a latent of ``latent_dim`` elements per token."""
    @property
    def name(self) -> str:
        """The model's name."""
    @property
    def num_layers(self) -> int:
        """How many layers it has, those without a cache included."""
    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, over all heads."""
    @property
    def layers(self) -> list[Any]:
        """What each layer keeps."""
    @property
    def facts(self) -> dict[str, str]:
        """What two engines must agree on, by name."""
    def layouts(
        self,
        named: str,
        *,
        blocks: SupportsIndex,
        block_tokens: SupportsIndex,
        tp: SupportsIndex = 1,
        pp: SupportsIndex = 1,
        replicas: SupportsIndex = 1,
        replica: SupportsIndex = 0,
        kernel_block_tokens: SupportsIndex | None = None,
        window_blocks: SupportsIndex | None = None,
        window_block_tokens: SupportsIndex | None = None,
        state_blocks: SupportsIndex | None = None,
        regions: str = "tensor",
        group_by_window: bool = False,
        group_layers: SupportsIndex | None = None,
        alias_groups: bool = False,
        null_block: SupportsIndex | None = None,
        conv_order: str | None = None,
        draft: Model | None = None,
    ) -> list[Layout]:
        """The layouts of all ranks of one data parallel replica: by pipeline stage, and then by tensor parallel rank.

        ``named`` is one of ``Layout.names()``. ``blocks`` and ``block_tokens`` are those of the block table: the engine's logical
        blocks. ``regions`` says which tensors share a region: ``tensor``, ``layer`` or ``single``.
        """

@final
class Layout:
    """Where everything lies in one rank's memory.

    Checked when it is made: every element is inside its region, and no two share a byte.
    """

    @staticmethod
    def names() -> list[str]:
        """The names of all layouts that ``Model.layouts`` makes."""
    @staticmethod
    def from_dict(parts: dict[str, Any]) -> Layout:
        """A layout of these parts, in the form that ``to_dict`` gives: for what has no name."""
    def to_dict(self) -> dict[str, Any]:
        """All of it: ``coords``, ``regions``, ``groups``, ``tensors``."""
    @property
    def coords(self) -> dict[str, Any]:
        """Where the rank stands: ``tp``, ``pp``, ``dp``, and the ``grid`` of all ranks."""
    @property
    def region_bytes(self) -> list[int]:
        """Bytes of each region that it needs, in order."""
    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its cache groups: what has a block table of its own."""
    @property
    def tensors(self) -> list[dict[str, Any]]:
        """Its tensors: layer, role, element type, group, region, the offset of the first element, and extent and stride in bytes of each
        axis."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Region:
    """Memory that may be registered with a backend: allocated by kvx, or lent by whoever owns it.

    Memory that is lent is not copied, and its owner is kept alive for as long as kvx may touch it. Nobody may take it away meanwhile by
    other means, such as ``resize``.
    """

    @staticmethod
    def host(nbytes: SupportsIndex) -> Region:
        """Zeroed memory of the host, from the first byte of a page on. ``Backend.allocate`` is faster for some backends."""
    @staticmethod
    def of(obj: object, *, device: SupportsIndex | None = None) -> Region:
        """The memory of ``obj``, which is not copied: anything with DLPack, the buffer protocol, ``__array_interface__`` or
        ``__cuda_array_interface__``, such as tensors of PyTorch and arrays of NumPy.

        It must be writable, and one run of bytes without gaps, in whatever order of axes. ``device`` says which CUDA device it is on,
        where the object does not.
        """
    @staticmethod
    def at_address(
        address: SupportsIndex, nbytes: SupportsIndex, owner: object, *, device: SupportsIndex | None = None
    ) -> Region:
        """Memory at an address, which ``owner`` keeps there. Whoever calls this vouches for it: use ``of`` where that will do.

        ``nbytes`` bytes from ``address`` on must be memory that can be read and written for as long as ``owner`` lives: the host's, or
        that of the CUDA device ``device``.
        """
    @property
    def nbytes(self) -> int:
        """Size in bytes."""
    @property
    def memory(self) -> str:
        """What memory it is: ``host``, or ``cuda:0`` and the like."""
    @property
    def address(self) -> int:
        """The address of its first byte."""
    def view(self) -> memoryview:
        """Its bytes, not copied; they stay there for as long as the view does.

        What is written while kvx reads or writes the same bytes is seen in part or not at all.
        """
    def read(self, offset: SupportsIndex, nbytes: SupportsIndex) -> bytes:
        """A copy of ``nbytes`` bytes from ``offset`` on."""
    def write(self, offset: SupportsIndex, data: bytes) -> None:
        """Copies ``data`` to ``offset``."""
    @property
    def __array_interface__(self) -> dict[str, Any]:
        """How NumPy sees it: bytes, not copied."""
    def __len__(self) -> int: ...

@final
class Ticket:
    """Where a request's cache lies on the engine that has it, and under which lease.

    It goes to the other engine by any way: as bytes, or as ``kv_transfer_params`` of a request.
    """

    @staticmethod
    def from_bytes(data: bytes) -> Ticket:
        """The ticket that these bytes hold."""
    def to_bytes(self) -> bytes:
        """The ticket as bytes."""
    @staticmethod
    def from_params(params: Mapping[str, Any]) -> Ticket:
        """The ticket in a request's ``kv_transfer_params``."""
    def to_params(self, request: str = "") -> dict[str, Any]:
        """The ticket as ``kv_transfer_params``. ``request`` is this side's own id of the request, for whoever reads logs."""
    @property
    def key(self) -> str:
        """The transfer's name on both sides."""
    @property
    def engine(self) -> str:
        """The engine that gave it out."""
    @property
    def address(self) -> str:
        """Where that engine serves its cards."""
    @property
    def access(self) -> str:
        """What the lease allows: ``read`` or ``write``."""
    @property
    def lease(self) -> str:
        """The lease's name."""
    @property
    def ttl(self) -> float:
        """How long the lease runs unless it is extended, in seconds."""
    @property
    def tokens(self) -> int:
        """How many tokens' cache is there."""
    @property
    def whole(self) -> bool:
        """Whether all of it is there already."""
    @property
    def groups(self) -> list[tuple[int, int, list[int]]]:
        """The blocks of each cache group: ``(block_tokens, first, ids)``."""
    @property
    def states(self) -> list[bool]:
        """Whether each cache group holds a state rather than tokens."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Bell:
    """What an event loop of asyncio reads to learn what is over."""

    def __new__(cls) -> Bell: ...
    def fileno(self) -> int:
        """The descriptor."""
    def take(self) -> list[int]:
        """The numbers of what is over since this was last asked."""

@final
class Engine:
    """All ranks of one replica, each with a thread of its own. ``kvx.Engine`` is in front of it."""

    def __new__(
        cls,
        name: str,
        *,
        facts: Sequence[tuple[str, str]],
        ranks: Sequence[tuple[Layout, Sequence[Region], Sequence[Backend]]],
        keys: Sequence[Key],
        plaintext: str | None,
        listen: str,
        ttl: float,
        hard: float,
        deadline: float,
        digests: bool,
        transports: Sequence[str] | None,
    ) -> Engine: ...
    @property
    def address(self) -> str:
        """Where its cards are served."""
    def publish(self, key: str, tokens: SupportsIndex, blocks: Blocks, write: bool) -> Lease:
        """Leases blocks to be read (``write``: to be written)."""
    def fetch(
        self, ticket: Ticket, start: SupportsIndex, end: SupportsIndex, blocks: Blocks, write: bool
    ) -> Fetch:
        """Reads what a ticket leases (``write``: writes into it)."""
    def status(self) -> dict[str, Any]:
        """What there is now at all ranks."""
    def open_counts(self) -> tuple[int, int]:
        """Leases that are not over, and fetches that are not over or whose blocks are kept: the sums of all ranks."""
    def close(self) -> None:
        """Ends it: its peers are told, its threads have ended when this returns. Once is enough."""
    @property
    def closed(self) -> bool:
        """Whether it is closed."""

@final
class Lease:
    """A lease: ``kvx.Lease`` is in front of it."""

    @property
    def ticket(self) -> Ticket:
        """What the other engine is given."""
    def withdraw(self, why: str) -> None:
        """Takes the blocks back."""
    def done(self) -> bool:
        """Whether it is over."""
    def wait(self, timeout: float | None) -> bool:
        """Waits until it is over, for at most ``timeout`` seconds. Whether it is."""
    def tell(self, bell: Bell, number: SupportsIndex) -> None:
        """Rings ``bell`` with ``number`` when it is over."""
    def outcome(self) -> list[str] | None:
        """Why it ended; ``None`` while it has not."""

@final
class Fetch:
    """A request that is fetched or stored: ``kvx.Fetch`` is in front of it."""

    def abort(self) -> None:
        """Gives it up. It still has to be waited for: its blocks are in use until it is over."""
    def done(self) -> bool:
        """Whether it is over."""
    def wait(self, timeout: float | None) -> bool:
        """Waits until it is over, for at most ``timeout`` seconds. Whether it is."""
    def tell(self, bell: Bell, number: SupportsIndex) -> None:
        """Rings ``bell`` with ``number`` when it is over."""
    def outcome(self) -> list[dict[str, Any]] | None:
        """What each rank moved; ``None`` while it is not over."""
    def quiet(self) -> bool:
        """Whether it is over, and nothing can move in its blocks any more."""

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
