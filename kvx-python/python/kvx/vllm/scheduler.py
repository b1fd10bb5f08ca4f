"""The scheduler's role of the connector.

vLLM asks, kvx-connector decides: this module translates. It needs neither vLLM nor torch; requests and outputs are vLLM's own objects.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import _kvx
from ..errors import KvxError, MisuseError
from . import params
from .config import Settings

logger = logging.getLogger(__name__)

Meta = TypeVar("Meta")


@dataclass(frozen=True)
class Shape:
    """What the scheduler knows of the engine's caches."""

    tp: int
    pp: int
    groups: Sequence[Mapping[str, Any]]
    #: Groups of which nothing is given or had.
    local_only: frozenset[int] = frozenset()
    #: The smallest window of a group, in tokens: what a producer must not run past. ``None`` where all groups keep all tokens.
    window: int | None = None

    @property
    def ranks(self) -> int:
        """Ranks that take part in each request."""
        return self.tp * self.pp


class KvxScheduler:
    """The scheduler's role: see the module."""

    def __init__(self, settings: Settings, shape: Shape) -> None:
        self.settings = settings
        self.shape = shape
        self._side: _kvx.SchedulerSide | None = None
        #: Requests with transfers: their parameters, as they came.
        self._requests: dict[str, str] = {}
        #: Requests whose ticket cannot be used and that are to fail, by why; once they have blocks.
        self._doomed: dict[str, str] = {}
        #: Failures that the workers are to say: vLLM hears of them from workers only.
        self._failed: dict[str, frozenset[int]] = {}
        #: Requests that vLLM has waiting for a load.
        self._loading: set[str] = set()
        self._cards: list[bytes] | None = None
        #: Called with blocks that must not be used again yet, and with those that may.
        self.quarantine: Callable[[Iterable[int]], None] = lambda blocks: None
        self.release: Callable[[Iterable[int]], None] = lambda blocks: None

    # What ranks said of themselves when they started.

    def set_handshake(self, cards: Mapping[tuple[int, int], Any]) -> None:
        """Takes the cards of all ranks, by (stage, tensor parallel rank): the connector begins."""
        lives = {card.life for card in cards.values()}
        if len(lives) != 1:
            raise MisuseError("the ranks of this engine do not agree on its life: they are of several starts")
        side = _kvx.SchedulerSide(self._config(), lives.pop())
        for (pp, tp), card in cards.items():
            side.set_handshake_metadata(pp * self.shape.tp + tp, card.card)
        if len(cards) != self.shape.ranks:
            raise MisuseError(f"cards of {len(cards)} ranks, where the engine has {self.shape.ranks}")
        self._side, self._cards = side, side.cards()

    def _config(self) -> str:
        settings = self.settings
        groups = [
            {"group": dict(group), "local_only": number in self.shape.local_only}
            for number, group in enumerate(self.shape.groups)
        ]
        return json.dumps(
            {
                "engine": settings.engine,
                "cards": settings.address,
                "grid": [self.shape.tp, self.shape.pp],
                "groups": groups,
                "produces": settings.produces,
                "consumes": settings.consumes,
                "recompute": settings.recompute,
                "lease_s": settings.lease_s,
                "hard_s": max(settings.hard_s, settings.lease_s),
                "deadline_s": settings.deadline_s,
                "retries": settings.retries,
                "backoff_s": settings.backoff_s,
                "host_buffer": False,
                "pool_blocks": None,
                "max_requests": settings.max_requests,
            }
        )

    @property
    def side(self) -> _kvx.SchedulerSide:
        """kvx's scheduler."""
        if self._side is None:
            raise MisuseError("the workers' cards have not come: set_xfer_handshake_metadata was not called")
        return self._side

    # What vLLM asks.

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        asked = request.kv_transfer_params
        if params.wants_remote_decode(asked) and self.settings.produces:
            self._stop_before_window(request, asked)
        text = params.as_json(asked)
        if text is None:
            return
        try:
            self.side.on_new_request(request.request_id, request.num_prompt_tokens, text)
        except KvxError as error:
            # It is served all the same, as if it had come without a transfer.
            logger.error("request %s has no transfer: %s", request.request_id, error)
            return
        self._requests[request.request_id] = text

    def _stop_before_window(self, request: Any, asked: dict[str, Any]) -> None:
        """Leaves a prompt's last token to the consumer, where a layer has a window.

        The consumer computes that token itself. What its window needs then begins one token earlier than what is kept once the token is in
        the cache.
        """
        window = self.shape.window
        if window is None or request.num_prompt_tokens < max(window, 2) or asked.get("kvx_stopped_before_last"):
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-1:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        else:
            return
        del request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        asked["kvx_stopped_before_last"] = True

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens come from outside, and whether the request waits for them."""
        text = self._requests.get(request.request_id)
        if text is None:
            return 0, False
        try:
            return self.side.matched_tokens(request.request_id, request.num_prompt_tokens, text, computed)
        except MisuseError as error:
            logger.error("request %s has no transfer: %s", request.request_id, error)
            return 0, False
        except KvxError as error:
            # The policy is to fail it. vLLM fails a request whose load fails: it waits for one that will.
            self._doomed[request.request_id] = str(error)
            return max(request.num_prompt_tokens - computed, 0), request.num_prompt_tokens > computed

    def after_alloc(self, request: Any, tables: Sequence[list[int]], external: int) -> None:
        """A request has blocks, ``external`` tokens of which come from outside."""
        if request.request_id not in self._requests:
            return
        name = request.request_id
        if external > 0:
            self._loading.add(name)
        why = self._doomed.pop(name, None)
        if why is None:
            try:
                self.side.after_alloc(name, [list(table) for table in tables], external)
                return
            except KvxError as error:
                why = str(error)
        logger.error("the cache of request %s cannot be loaded: %s", name, why)
        if external > 0:
            self._failed[name] = frozenset()

    def build_meta(self, output: Any, make: Callable[..., Meta]) -> Meta:
        """What the workers do in the step that ``output`` describes, made of its parts by ``make``."""
        for name in output.preempted_req_ids or ():
            if name in self._requests:
                self.side.preempted(name)
        failed, self._failed = self._failed, {}
        self._loading.difference_update(failed)
        cards, self._cards = self._cards, None
        step = self.side.build_step(self._computed(output))
        idle = 0.0 if output.total_num_scheduled_tokens or failed or not self._awaits() else self.settings.idle_wait_s
        return make(step=step, cards=cards, failed=failed, idle_s=idle)

    def _computed(self, output: Any) -> list[tuple[str, int, int, list[list[int]]]]:
        """What is computed in the step, of requests with transfers."""
        if not self._requests:
            return []
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tokens = output.num_scheduled_tokens
        return [(name, count, tokens[name], []) for name, count in before.items() if name in self._requests]

    def _awaits(self) -> bool:
        """Whether workers will have something to report."""
        tables = self.side.tables()
        return bool(tables["leases"] or tables["loads"])

    def request_finished(self, request: Any, tables: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks are held, and what goes to the consumer."""
        name = request.request_id
        text = self._requests.pop(name, None)
        if text is None:
            return False, None
        self._doomed.pop(name, None)
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        end = params.end_of(request.status)
        try:
            hold, ticket = self.side.request_finished(
                name, request.num_prompt_tokens, text, end, tokens, [list(table) for table in tables]
            )
        except KvxError as error:
            logger.error("request %s is not published: %s", name, error)
            hold, ticket = False, None
        if name in self._loading and not hold and name not in self._failed:
            # Nothing is written any more, and vLLM goes on waiting until a worker says so.
            self._failed[name] = frozenset()
        return hold, None if ticket is None else json.loads(ticket)

    def has_pending(self) -> bool:
        """Whether there is something for the workers though nothing is to be computed."""
        return bool(self._failed) or (self._side is not None and self._side.has_pending())

    # What the workers report.

    def take_reports(self, output: Any) -> None:
        """Reads the ranks' reports in a step's output, and says in it what they come to for vLLM."""
        meta = output.kv_connector_worker_meta
        if meta is None:
            return
        received, sent = set(output.finished_recving or ()), set(output.finished_sending or ())
        for rank in sorted(meta.by_rank):
            for report in meta.by_rank[rank]:
                updates = self.side.update(rank, report)
                # A request whose load was aborted has finished: vLLM frees it as one that has received.
                received.update(updates.drained)
                received.update(name for name, _ in updates.received)
                sent.update(updates.sent)
                self.quarantine(block for _, block in updates.quarantined)
                self.release(block for _, block in updates.unquarantined)
                for failure in updates.failed:
                    self._fail(failure, quarantined={block for _, block in updates.quarantined})
        self._loading.difference_update(received)
        output.finished_recving = received or None
        output.finished_sending = sent or None

    def _fail(self, failure: _kvx.LoadFailure, quarantined: set[int]) -> None:
        then = "computed here" if failure.recompute else "failed"
        logger.error("the cache of request %s cannot be loaded, it is %s: %s", failure.request, then, failure.reason)
        blocks = frozenset(block for _, block in failure.blocks)
        # With several groups a block's number says nothing; a request with blocks that may still be written must give up all.
        whole = len(self.shape.groups) > 1 or bool(quarantined)
        self._failed[failure.request] = frozenset() if whole else blocks

    def stats(self) -> dict[str, int]:
        """What has been counted since the start. What workers count under the same name has another here."""
        if self._side is None:
            return {}
        stats = self._side.stats()
        stats["loads_begun"] = stats.pop("loads")
        return stats

    def tables(self) -> dict[str, int]:
        """What is in the tables now: nothing, once all is over."""
        return {} if self._side is None else self._side.tables()
