"""Decides which encoder outputs the worker keeps, by the hash of the encoded item.

Requests that still have to read an entry hold it, by (request id, input id), since a prompt may show the same image
twice. An entry without a holder stays until its space is needed; the entry that was released first is evicted first.
Invariants:
- the embeddings of all entries fit into cache_size
- an entry is in the queue of freeable ones iff it has no holder
The next step carries evictions to the worker. The worker computes an entry in the step that allocated it: revoke() is
for a request that is taken back out of that step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from actors.core.requests.request import Request
from actors.errors import IntegrityError


@dataclass(slots=True)
class _Entry:
    num_embeds: int
    holders: dict[tuple[str, int], None] = field(default_factory=dict)


class EncoderCacheManager:
    """The encoder cache as the scheduler counts it. cache_size: in embeddings."""

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self._entries: dict[str, _Entry] = {}
        self._freeable: OrderedDict[str, None] = OrderedDict()
        self._freed: dict[str, None] = {}

    @property
    def num_freeable_slots(self) -> int:
        """The number of slots that are free, or would be after evicting every entry without a holder."""
        return self.num_free_slots + sum(self._entries[mm_hash].num_embeds for mm_hash in self._freeable)

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Let the request hold an input's entry, if there is one; returns whether there is."""
        mm_hash = request.mm_features[input_id].encoder_key
        entry = self._entries.get(mm_hash)
        if entry is None:
            return False
        self._freeable.pop(mm_hash, None)
        entry.holders[request.request_id, input_id] = None
        return True

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Whether an input can be encoded in this step; evicts entries without a holder to make room for the input.

        encoder_compute_budget: embeddings that the step may still compute
        num_embeds_to_schedule: embeddings that are going to be allocated before this input
        """
        num_embeds = request.mm_features[input_id].num_embeds
        if num_embeds > encoder_compute_budget:
            return False
        num_needed = num_embeds + num_embeds_to_schedule
        if num_needed > self.num_freeable_slots:
            return False
        while num_needed > self.num_free_slots:
            mm_hash, _ = self._freeable.popitem(last=False)
            self.num_free_slots += self._entries.pop(mm_hash).num_embeds
            self._freed[mm_hash] = None
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Make an entry that this step computes, after can_allocate(). Raises IntegrityError if there is no room."""
        feature = request.mm_features[input_id]
        if feature.encoder_key in self._entries or feature.num_embeds > self.num_free_slots:
            raise IntegrityError(f"{request.request_id}: no room for input {input_id}, or it is there already")
        self._entries[feature.encoder_key] = _Entry(feature.num_embeds, {(request.request_id, input_id): None})
        self.num_free_slots -= feature.num_embeds
        # The entry may have been evicted in the same step: the worker must not drop what it is about to compute.
        self._freed.pop(feature.encoder_key, None)

    def revoke(self, request: Request, input_id: int) -> tuple[str, int] | None:
        """Take back an entry that this step was to compute for the request.

        Returns another (request id, input id) that holds the entry and has to compute it, or None: the entry is gone.
        """
        mm_hash = request.mm_features[input_id].encoder_key
        entry = self._entries[mm_hash]
        entry.holders.pop((request.request_id, input_id), None)
        others = [holder for holder in entry.holders if holder[0] != request.request_id]
        if others:
            return others[0]
        del self._entries[mm_hash]
        self._freeable.pop(mm_hash, None)
        self.num_free_slots += entry.num_embeds
        return None

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Release the request's hold of one input's entry, if there is one."""
        mm_hash = request.mm_features[input_id].encoder_key
        entry = self._entries.get(mm_hash)
        if entry is None or (request.request_id, input_id) not in entry.holders:
            return
        del entry.holders[request.request_id, input_id]
        if not entry.holders:
            self._freeable[mm_hash] = None

    def free(self, request: Request) -> None:
        """Release all entries that the request holds."""
        for input_id in range(len(request.mm_features)):
            self.free_encoder_input(request, input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """Return the ids of the inputs whose entries the request holds."""
        return {
            input_id
            for input_id, feature in enumerate(request.mm_features)
            if (entry := self._entries.get(feature.encoder_key)) and (request.request_id, input_id) in entry.holders
        }

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the keys of the entries evicted since the last call, which the worker forgets."""
        freed, self._freed = self._freed, {}
        return list(freed)

    def reset(self) -> bool:
        """Evict everything, for instance after new weights. Refuses, and returns False, while any entry is held."""
        if len(self._freeable) != len(self._entries):
            return False
        self._freed.update(dict.fromkeys(self._entries))
        self._entries.clear()
        self._freeable.clear()
        self.num_free_slots = self.cache_size
        return True

    def holders(self) -> set[str]:
        """The ids of the requests that hold entries."""
        return {request_id for entry in self._entries.values() for request_id, _ in entry.holders}

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant of this file does not hold."""
        num_used = sum(entry.num_embeds for entry in self._entries.values())
        if self.num_free_slots + num_used != self.cache_size or self.num_free_slots < 0:
            raise IntegrityError(f"{num_used} slots used, {self.num_free_slots} free, of {self.cache_size}")
        unheld = {mm_hash for mm_hash, entry in self._entries.items() if not entry.holders}
        if unheld != set(self._freeable):
            raise IntegrityError(f"entries {sorted(unheld)} are held by nobody, freeable are {sorted(self._freeable)}")
        if self._freed.keys() & self._entries.keys():
            raise IntegrityError("an entry is there and reported as evicted")
