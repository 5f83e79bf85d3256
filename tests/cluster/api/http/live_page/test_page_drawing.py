"""The page's modules in a real browser: what is drawn in parts looks like what is drawn at once, and nothing is lost.

Tests of cluster/api/http/live_page/static. They need Chromium, as test_page_in_chromium.py does.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from playwright.async_api import Browser

from tests.cluster.api.http.live_page.opened_page import opened
from tests.cluster.api.http.live_page.scripted_cluster import ScriptedCluster, scripted_server

pytestmark = [pytest.mark.more, pytest.mark.asyncio(loop_scope="module")]

_STORIES: Final = """
    // Times are whole pixels of a canvas of 1200: 60 s have 20 a second.
    const { Requests } = await import("/ui/requests.js");
    const story = (id, arrived, spans) => ({
      tenant: "", request_id: String(id), arrived_at_ns: arrived * 1e9, duration_s: spans.at(-1).ended_s, spans,
    });
    const queued = (id, arrived, took) => story(id, arrived, [
      { phase: "queue", began_s: 0, ended_s: took / 4 },
      { phase: "transfer_hidden", began_s: took / 4, ended_s: took },
      { phase: "prefill", began_s: took / 4, ended_s: took / 2 },
      { phase: "decode", began_s: took / 2, ended_s: took },
    ]);
    const snapshot = (now_s, stories, in_flight = []) => ({ now_s, is_first: false, stories, in_flight });
"""

_IN_PARTS_AND_AT_ONCE: Final = """async () => {
    const { Lanes } = await import("/ui/lanes.js");
    const requests = new Requests();
    const lanes = () => {
      const canvas = document.body.appendChild(document.createElement("canvas"));
      canvas.style.cssText = "display: block; width: 1200px; height: 130px";
      let hasMore = true;
      const one = new Lanes(canvas, requests, { more: () => (hasMore = true), open() {}, select() {} });
      const draw = () => {
        for (hasMore = true; hasMore; ) {
          hasMore = false;
          one.fit();
          one.draw();
        }
      };
      const laidOut = async () => { while (one.width === 0) await new Promise(requestAnimationFrame); };
      return { canvas, draw, laidOut };
    };
    const inParts = lanes();
    await inParts.laidOut();
    for (let second = 1; second <= 75; second += 1) {
      const stories = [];
      for (let n = 0; n < 40; n += 1) stories.push(queued(`${second}-${n}`, second - 1.2 + (n % 8) * 0.05, 0.8));
      if (second % 10 === 0) stories.push(queued(`long-${second}`, second - 40, 40));
      const live = [{ tenant: "", request_id: "live", arrived_at_s: 50, phase: "decode", spans: [] }];
      requests.update(snapshot(second, stories, second >= 50 && second < 70 ? live : []));
      inParts.draw();
      if (second === 20) inParts.canvas.style.width = "1201px";
      if (second === 21) inParts.canvas.style.width = "1200px";
      if (second === 20 || second === 21) for (let n = 0; n < 3; n += 1) await new Promise(requestAnimationFrame);
      requests.now = second + 0.5;
      if (second < 75) inParts.draw();
    }
    requests.now = 75;
    const atOnce = lanes();
    await atOnce.laidOut();
    atOnce.draw();
    for (let n = 0; n < 3; n += 1) await new Promise(requestAnimationFrame);
    inParts.draw();
    atOnce.draw();
    const pixels = ({ canvas }) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const [left, right] = [pixels(inParts), pixels(atOnce)];
    let numUnlike = 0, numPainted = 0;
    left.forEach((value, at) => {
      if (value !== right[at]) numUnlike += 1;
      if (at % 4 === 3 && value > 0) numPainted += 1;
    });
    return { sizes: [left.length, right.length], numUnlike, numPainted, numRequests: requests.items.size };
}"""


async def _evaluated(chromium: Browser, script: str) -> Any:
    """script: an async function, which may use what _STORIES defines"""
    async with scripted_server(ScriptedCluster()) as port, opened(chromium, port) as shown:
        result = await shown.page.evaluate(f"async () => {{ {_STORIES}\n return await ({script})(); }}")
        assert (shown.complaints, shown.foreign) == ([], [])
        return result


async def test_requests_drawn_as_they_end_look_like_all_of_them_drawn_at_once(chromium: Browser) -> None:
    found = await _evaluated(chromium, _IN_PARTS_AND_AT_ONCE)
    assert found["sizes"][0] == found["sizes"][1] > 0
    assert found["numRequests"] > 2400
    assert found["numPainted"] > 50_000
    assert found["numUnlike"] == 0


async def test_a_request_in_flight_has_the_colours_of_its_phases_so_far(chromium: Browser) -> None:
    seen = await _evaluated(
        chromium,
        """async () => {
            const { Lanes } = await import("/ui/lanes.js");
            const { phaseColours } = await import("/ui/phases.js");
            const canvas = document.body.appendChild(document.createElement("canvas"));
            canvas.style.cssText = "display: block; width: 1200px; height: 130px";
            const requests = new Requests();
            const opened = [];
            const on = { more() {}, open: (item) => opened.push(item.key), select() {} };
            const lanes = new Lanes(canvas, requests, on);
            while (lanes.width === 0) await new Promise(requestAnimationFrame);
            const spans = [
              ["admission", 0, 10], ["queue", 10, 20], ["unreported", 10, null], ["prefill", 20, 30],
              ["decode", 40, null],
            ];
            const live = (id, spans) => ({ tenant: "", request_id: id, arrived_at_s: 5, phase: "decode", spans });
            requests.update(snapshot(60, [], [live("r", spans), live("new", [])]));
            lanes.draw();
            const names = new Map([...phaseColours()].map(([name, colour]) => [colour, name]));
            const context = canvas.getContext("2d"), ratio = window.devicePixelRatio;
            const at = (second, lane) => {
              const y = (lane + 0.4) * lanes.laneHeight;
              const data = context.getImageData(second * 20 * ratio, y * ratio, 1, 1).data;
              return names.get("#" + [...data.slice(0, 3)].map((one) => one.toString(16).padStart(2, "0")).join(""));
            };
            canvas.dispatchEvent(new MouseEvent("click", { clientX: canvas.getBoundingClientRect().left + 400,
              clientY: canvas.getBoundingClientRect().top + 3 }));
            return [[10, 20, 30, 40, 55].map((second) => at(second, 0)), at(20, 1), opened.length];
        }""",
    )
    assert seen == [["admission", "queue", "prefill", "unreported", "decode"], "admission", 1]


async def test_a_minute_of_200_requests_a_second_is_kept(chromium: Browser) -> None:
    kept = await _evaluated(
        chromium,
        """async () => {
            const requests = new Requests();
            for (let second = 1; second <= 70; second += 1) {
              const stories = [];
              for (let n = 0; n < 200; n += 1) stories.push(queued(`${second}-${n}`, second - 2 + n / 200, 1));
              requests.update(snapshot(second, stories));
            }
            const notDrawn = [...requests.items.values()].filter((item) => item.lane < 0).length;
            return [requests.items.size, requests.numNotDrawn - notDrawn, requests.numLanes];
        }""",
    )
    # Those of a last second end at its beginning or later; 120 lanes have room for 120 requests a second.
    assert 60 * 200 <= kept[0] <= 61 * 200
    assert kept[1:] == [0, 120]


async def test_a_request_keeps_its_lane_when_it_ends_and_a_lane_is_free_again(chromium: Browser) -> None:
    lanes = await _evaluated(
        chromium,
        """async () => {
            const requests = new Requests();
            const live = (id, arrived_at_s) =>
              ({ tenant: "", request_id: id, arrived_at_s, phase: "decode", spans: [] });
            const laneOf = (id) => [...requests.items.values(), ...requests.live.values()]
              .find((item) => (item.story || item.live).request_id === id)?.lane;
            const found = [];
            requests.update(snapshot(10, [], [live("a", 9), live("b", 9.5)]));
            found.push([laneOf("a"), laneOf("b")]);
            // Its story and a view that still has it may come together.
            requests.update(snapshot(11, [queued("a", 9, 1.5)], [live("a", 9), live("b", 9.5)]));
            found.push([laneOf("a"), laneOf("b"), requests.live.size, requests.items.size]);
            requests.update(snapshot(12, [queued("c", 11, 1)], []));
            found.push([laneOf("c"), laneOf("b"), requests.numLanes]);
            return found;
        }""",
    )
    assert lanes == [[0, 1], [0, 1, 1, 1], [0, None, 2]]


async def test_events_are_read_whole_however_the_stream_is_cut(chromium: Browser) -> None:
    read = await _evaluated(
        chromium,
        """async () => {
            const { eventsOf } = await import("/ui/feed.js");
            const bytes = new TextEncoder().encode('data: {"a":"ä→"}\\n\\n: a comment\\n\\ndata: 2\\n\\ndata: cut off');
            const found = [];
            for (let size = 1; size <= bytes.length; size += 1) {
              const body = new ReadableStream({
                start(controller) {
                  for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
                  controller.close();
                },
              });
              const events = [];
              for await (const data of eventsOf(body)) events.push(data);
              found.push(events.join());
            }
            return [...new Set(found)];
        }""",
    )
    assert read == ['{"a":"ä→"},2']


async def test_a_frame_that_has_drawn_for_long_leaves_the_rest_to_others_and_the_newest_drawing_counts(
    chromium: Browser,
) -> None:
    drawn = await _evaluated(
        chromium,
        """async () => {
            const { Frames } = await import("/ui/frames.js");
            const frames = new Frames(), drawn = [];
            const draw = (name) => () => drawn.push([name, document.timeline.currentTime]);
            const long = () => { for (const began = performance.now(); performance.now() - began < 20; ); };
            return await new Promise((resolve) => {
              frames.ask("a", draw("an old a"));
              frames.ask("b", () => { draw("b")(); long(); frames.ask("again", draw("again")); });
              frames.ask("c", () => { draw("c")(); frames.ask("end", () => resolve(drawn)); });
              frames.ask("a", draw("a"));
            });
        }""",
    )
    assert [name for name, _ in drawn] == ["a", "b", "c", "again"]
    at = dict(drawn)
    assert at["a"] <= at["b"] < at["c"]
