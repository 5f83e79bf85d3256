"""The live page in a real browser: what it shows, by keys and on narrow screens, without errors or foreign content.

Tests of cluster/api/http/live_page/static. They need Chromium: `apt-get install chromium`, or RAYPD_CHROMIUM with the
path of another one. RAYPD_PICTURES names a folder for pictures of the page.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.cluster.api.grpc.test_access import ALICE, OPS, access
from tests.cluster.api.http.live_page.opened_page import opened
from tests.cluster.api.http.live_page.scripted_cluster import HOSTILE, ScriptedCluster, scripted_server
from tests.cluster.api.http.live_page.slow_requests import CAUSES, slow_requests
from tests.ports import free_port

pytestmark = [pytest.mark.more, pytest.mark.asyncio(loop_scope="module")]


async def _picture(page: Page, name: str, part: str = "", cluster: ScriptedCluster | None = None) -> None:
    """Take a picture for docs, if any are wanted.

    part:    the element that is shown; "" for all of the page, once its curves are some seconds long
    cluster: ends requests until then; None: all of them have ended
    """
    folder = os.environ.get("RAYPD_PICTURES")
    if not folder:
        return
    path = Path(folder) / f"{name}.png"
    if part:
        await page.locator(part).screenshot(path=path)
        return
    until = time.monotonic() + 25 if cluster is not None else 0.0
    while cluster is not None and time.monotonic() < until:
        number = cluster.num_ended
        cluster.end_request(f"chatcmpl-{number}", pair=number % 2, queued_s=0.1 + 0.4 * (number % 3), exposed_s=0.1)
        await asyncio.sleep(0.7)
    await expect(page.locator("html")).to_have_attribute("data-snapshot", re.compile("^(2.|[3-9].|...+)$"))
    await page.screenshot(path=path, full_page=True)


def _cluster() -> ScriptedCluster:
    cluster = ScriptedCluster()
    _end_many(cluster)
    return cluster


def _end_many(cluster: ScriptedCluster) -> None:
    now_s = time.time()
    for number in range(40):
        cluster.end_request(f"chatcmpl-{number}", ended_s=now_s - 50 + 1.2 * number, pair=number % 2)


async def test_the_page_shows_the_cluster_and_takes_no_name_for_markup(chromium: Browser) -> None:
    cluster = _cluster()
    cluster.num_waiting = 7
    cluster.end_request(HOSTILE, queued_s=4.0)
    cluster.show_in_flight({"live-1": time.time() - 2})
    async with scripted_server(cluster) as port, opened(chromium, port) as shown:
        page = shown.page
        await expect(page.locator("#health")).to_contain_text("Prefill queue: 7 requests wait for prefill at prefill-0")
        await expect(page.locator("#prefill .engine")).to_have_count(2)
        await expect(page.locator("#decode .engine")).to_have_count(2)
        await expect(page.locator("#prefill .engine[data-named=true]")).to_contain_text("prefill-0")
        await expect(page.locator("#links .link")).to_have_count(2)
        await expect(page.locator("#links .link").first).to_contain_text("GB/s")
        await expect(page.locator("#decode .engine").first).to_contain_text("KV 40 %")
        await expect(page.locator("#decisions li").first).to_contain_text("decode-1 took over")
        await expect(page.locator("#slowest li").first).to_contain_text(HOSTILE)
        await expect(page.locator("#legend li")).to_have_count(11)
        await expect(page.locator("#charts canvas")).to_have_count(2)
        await expect(page.locator("html")).to_have_attribute("data-snapshot", re.compile("^([4-9]|..+)$"))
        await _picture(page, "live-page", cluster=cluster)
        async with page.expect_download() as downloading:
            await page.locator("#trace").click()
        download = await downloading.value
        assert download.suggested_filename == "requests-perfetto.json"
        events = json.loads((await download.path()).read_bytes())["traceEvents"]
        assert HOSTILE in {event.get("args", {}).get("request_id") for event in events}
        await expect(page.locator("#trace")).to_contain_text("Saved")
        assert await page.title() == "raypd", "the name of a request has run no script"
        assert await page.locator("main img").count() == 0
        assert (shown.complaints, shown.foreign) == ([], [])


async def test_a_slow_request_is_explained_by_mouse_and_by_keys(chromium: Browser) -> None:
    cluster = ScriptedCluster()
    # It comes first, so it has the first lane, and nearly all of it.
    cluster.end_request("long", decode_s=52.0)
    _end_many(cluster)
    cluster.end_request("slow-one", exposed_s=6.0)
    async with scripted_server(cluster) as port, opened(chromium, port) as shown:
        page = shown.page
        await page.locator("#slowest button", has_text="slow-one").click()
        dialog = page.locator("#story")
        await expect(dialog).to_be_visible()
        await expect(page.locator("#story-title")).to_have_text("slow-one")
        await expect(page.locator("#story-cause")).to_contain_text("transfer exposed for 6.00 s")
        assert await page.locator("#story-spans .span").count() >= 4
        await _picture(page, "waterfall", "#story")
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await page.locator("#lanes").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#lanes-selected")).not_to_be_empty()
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_visible()
        await page.keyboard.press("Escape")
        box = await page.locator("#lanes").bounding_box()
        assert box is not None
        await page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 4)
        await expect(page.locator("#story-title")).to_have_text("long")
        assert (shown.complaints, shown.foreign) == ([], [])


async def test_a_request_in_flight_is_shown_so_far_and_followed_to_its_end(chromium: Browser) -> None:
    cluster = ScriptedCluster()
    cluster.show_in_flight({"live-one": time.time() - 20})
    async with scripted_server(cluster) as port, opened(chromium, port) as shown:
        page = shown.page
        await expect(page.locator("html")).to_have_attribute("data-snapshot", re.compile("."))
        await page.locator("#lanes").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#lanes-selected")).to_contain_text("live-one: in flight, decode at decode-0")
        await page.keyboard.press("Enter")
        facts = page.locator("#story-facts")
        await expect(page.locator("#story-title")).to_have_text("live-one")
        await expect(facts).to_contain_text("in flight")
        await expect(page.locator("#story-spans .span", has_text="queue, prefill-0")).to_contain_text("50.0 ms")
        cluster.live_records = cluster.in_flight = ()
        cluster.end_request("live-one", decode_s=20.0)
        await expect(facts).to_contain_text("stop")
        await page.keyboard.press("Escape")
        assert (shown.complaints, shown.foreign) == ([], [])


async def test_a_request_is_found_by_the_beginning_of_its_id(chromium: Browser) -> None:
    cluster = _cluster()
    async with scripted_server(cluster) as port, opened(chromium, port) as shown:
        page = shown.page
        await page.fill("#find-id", "chatcmpl")
        await page.keyboard.press("Enter")
        await expect(page.locator("#find-problem")).to_contain_text("as much of its beginning as no other request has")
        cluster.end_request("rare-one")
        await page.fill("#find-id", "rare")
        await page.keyboard.press("Enter")
        await expect(page.locator("#story-title")).to_have_text("rare-one")
        await page.keyboard.press("Escape")
        await expect(page.locator("#find-problem")).to_be_empty()
        # A browser's console has the statuses of refused calls, which is all right.
        assert [one for one in shown.complaints if "400" not in one] == []


async def test_four_slow_requests_are_explained_by_the_page_alone(chromium: Browser) -> None:
    cluster = ScriptedCluster()
    for record in slow_requests():
        cluster.store.put(record)
    async with scripted_server(cluster) as port, opened(chromium, port) as shown:
        page = shown.page
        for name, cause in CAUSES.items():
            await page.locator("#slowest button", has_text=name).click()
            await expect(page.locator("#story-title")).to_have_text(name)
            await expect(page.locator("#story-cause")).to_contain_text(cause)
            await _picture(page, f"slow-{name}", "#story")
            await page.keyboard.press("Escape")
        assert (shown.complaints, shown.foreign) == ([], [])


async def test_a_token_is_asked_for_and_kept_in_memory_only(chromium: Browser, tmp_path: Path) -> None:
    async with scripted_server(_cluster(), access(tmp_path / "tokens")) as port, opened(chromium, port) as shown:
        page = shown.page
        await expect(page.locator("#login")).to_be_visible()
        await expect(page.locator("#main")).to_be_hidden()
        await page.keyboard.type(ALICE)
        await page.keyboard.press("Enter")
        await expect(page.locator("#login-reason")).to_contain_text("admin: true")
        await page.keyboard.type(OPS)
        await page.keyboard.press("Enter")
        await expect(page.locator("#prefill .engine")).to_have_count(2)
        stored = await page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert OPS not in stored
        assert await page.input_value("#token") == ""
        # A browser's console has the statuses of refused calls, which is all right.
        assert [one for one in shown.complaints if "401" not in one and "403" not in one] == []


@pytest.mark.parametrize("dark", [False, True])
async def test_a_phone_has_room_for_all_of_it(chromium: Browser, dark: bool) -> None:
    cluster = _cluster()
    cluster.decode_kv_used = 0.97
    cluster.end_request("x" * 120, failure="decode-0 was lost")
    async with scripted_server(cluster) as port, opened(chromium, port, width=400, dark=dark) as shown:
        page = shown.page
        await expect(page.locator("#prefill .engine")).to_have_count(2)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        await page.locator("#slowest button").first.click()
        assert await page.evaluate("document.querySelector('#story').getBoundingClientRect().right") <= 400
        await page.keyboard.press("Escape")
        await _picture(page, f"phone-{'dark' if dark else 'light'}", cluster=cluster)
        colours = [await _colour(page)]
        await page.locator("#theme").click()
        colours.append(await _colour(page))
        assert colours == (
            ["rgb(18, 21, 26)", "rgb(246, 247, 249)"] if dark else ["rgb(246, 247, 249)", "rgb(18, 21, 26)"]
        )
        assert (shown.complaints, shown.foreign) == ([], [])


async def _colour(page: Page) -> str:
    return str(await page.evaluate("getComputedStyle(document.body).backgroundColor"))


async def test_the_page_comes_back_when_the_ingress_does(chromium: Browser) -> None:
    cluster = _cluster()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(scripted_server(cluster, port=free_port()))
        async with opened(chromium, port) as shown:
            page = shown.page
            await expect(page.locator("#connection")).to_have_text("live")
            await stack.aclose()
            await expect(page.locator("#connection")).to_contain_text("lost")
            await expect(page.locator("#prefill .engine")).to_have_count(2)
            async with scripted_server(cluster, port=port):
                await expect(page.locator("#connection")).to_have_text("live")
