"""Starts the further ranks of an engine and builds rank 0's worker beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from actors.config import EngineConfig
from actors.model.errors import RankLost
from actors.model.loader import choose_device
from actors.model.tensor_parallel.group import Rendezvous, TensorParallelGroup, join_group
from actors.model.tensor_parallel.rank_calls import RankTrust
from actors.ranks.rank_hub import RankHub
from actors.ranks.rank_launcher import RankLauncher, Ranks
from actors.ranks.rank_messages import RankTask
from actors.worker import Worker
from actors.worker_builder import build_worker
from kv_transfer.links.control_streams import Control
from kv_transfer.params import EngineAddress
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust

JOIN_TIMEOUT_S: Final = 30.0
"""How long the ranks may take to form their process group, once all of them have connected to rank 0."""
_STOP_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """An engine's ranks, ready to serve: rank 0's worker, and the connections to the further ranks.

    further_rank_addresses: the addresses (host:port) of the control streams of ranks 1, 2, … for KV transfers
    """

    worker: Worker
    hub: RankHub
    ranks: Ranks
    group: TensorParallelGroup
    further_rank_addresses: tuple[str, ...]


def gather_ranks(
    config: EngineConfig,
    identity: EngineAddress,
    control: Control,
    on_progress: Callable[[], None],
    say: Callable[[str], None],
    launch: RankLauncher,
    trust: Trust,
) -> RankGroup:
    """Start every further rank, and build rank 0's worker while they build theirs.

    Blocks until all ranks have loaded the weights.
    identity: the engine's address
    launch:   starts the further ranks
    trust:    the secrets with which the engine's ranks prove themselves
    The other arguments are as for build_worker. Raises what build_worker raises, or RankLost with a further rank's
    reason.
    """
    parallel = config.parallel
    size, host = parallel.tensor_parallel_size, identity.control_address.rpartition(":")[0]
    with ExitStack() as opened:
        party = Party(identity.engine_id, identity.incarnation)
        member = Member(party, trust)
        hub = RankHub(host, size - 1, parallel.rank_timeout_s, on_progress, member, control.refusals)
        opened.callback(hub.close)
        device = choose_device(config.model)
        rendezvous = Rendezvous(host, device, JOIN_TIMEOUT_S)
        opened.callback(rendezvous.close)
        say(f"starting {size - 1} further ranks")
        ranks = launch(_tasks(config, identity, hub, rendezvous.address, trust))
        opened.callback(ranks.stop, _STOP_TIMEOUT_S)
        # On the way out, this runs before ranks.stop: ranks that are ready end only once the hub has hung up.
        opened.callback(hub.close)
        hub.accept_all(parallel.rank_start_timeout_s, ranks.find_lost)
        try:
            group = join_group(
                rendezvous,
                0,
                size,
                device=device,
                host=host,
                timeout_s=JOIN_TIMEOUT_S,
                trust=RankTrust(trust, party, trust.tls, control.refusals),
            )
            opened.callback(group.close)
            group.set_timeout(parallel.rank_start_timeout_s)
            own = EngineAddress(f"{identity.engine_id}/0", identity.incarnation, identity.control_address)
            worker = build_worker(config, own, control, on_progress, say, group)
        except RankLost as error:
            raise hub.explain(error) from error
        opened.callback(worker.shutdown)
        ready = hub.collect_ready(parallel.rank_start_timeout_s)
        group.set_timeout(parallel.rank_timeout_s)
        opened.pop_all()
        rendezvous.close()
    return RankGroup(worker, hub, ranks, group, tuple(rank.control_address for rank in ready))


def _tasks(
    config: EngineConfig, identity: EngineAddress, hub: RankHub, rendezvous: tuple[str, int], trust: Trust
) -> Sequence[RankTask]:
    assert trust.material is not None, "an engine has the cluster's secret before it starts"
    return [
        RankTask(config, identity.engine_id, identity.incarnation, rank, hub.address, rendezvous, trust.material)
        for rank in range(1, config.parallel.tensor_parallel_size)
    ]
