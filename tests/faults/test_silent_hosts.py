"""A network between two hosts that drops everything, and tells nobody, while nothing is on its way."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.live_engines import TRANSFER, LiveEngines
from tests.faults.two_hosts import TwoHosts

pytestmark = [pytest.mark.more, pytest.mark.alone]


@pytest.mark.parametrize(
    ("link_timeout_s", "chunk_timeout_s", "noticed_s"),
    [
        pytest.param(1.0, 60.0, 20.0, id="by what the peer does not say"),
        pytest.param(30.0, 2.0, 20.0, id="by TCP's probes of the data connection"),
    ],
)
async def test_a_silent_network_is_noticed_at_both_ends_before_anybody_needs_the_link(
    link_timeout_s: float, chunk_timeout_s: float, noticed_s: float, engines_on_hosts: LiveEngines, hosts: TwoHosts
) -> None:
    engines = engines_on_hosts
    timeouts = {"link_timeout_s": link_timeout_s, "chunk_timeout_s": chunk_timeout_s, "connect_timeout_s": 5.0}
    prefill, decode = await engines.start_pair(is_fresh=True, transfer=TRANSFER.model_copy(update=timeouts))
    await engines.check_handed_over(prefill, decode)
    loop = asyncio.get_running_loop()
    with hosts.dropping_everything():
        begun_s = loop.time()
        await asyncio.gather(*(engine.wait_for(num_links=0) for engine in (prefill, decode)))
        assert loop.time() - begun_s < noticed_s
        # The decode engine dials, hears nothing, and computes the prompt itself.
        await engines.check_pair(engines.ask(), prefill, decode)
        assert decode.count("num_prompt_tokens_computed") > 0
    await engines.check_whole(prefill, decode)
    await engines.check_pair(engines.ask(), prefill, decode)
    await engines.check_handed_over(prefill, decode)
    assert (prefill.count("num_links_lost"), prefill.count("num_stalls")) == (0, 0)
