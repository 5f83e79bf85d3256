// Reads the stream of snapshots by fetch(), since EventSource can send no token.

const FIRST_DELAY_MS = 1000;
const MAX_DELAY_MS = 10000;

// The operator's token, in this page's memory alone.
let token = null;

/** Fetch as the operator whose token was given; without a token, as anybody. */
export function fetchAsOperator(url) {
  const headers = token === null ? {} : { authorization: `Bearer ${token}` };
  return fetch(url, { headers, cache: "no-store", credentials: "omit" });
}

/** Fetch JSON as the operator. Throws an error with the server's reason. */
export async function fetchJson(url) {
  const answer = await fetchAsOperator(url);
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer.json();
}

/** Yield the data of each event in a stream of server-sent events. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  // An event may come in many pieces: each is looked through once.
  let pieces = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n"), last = lines.pop();
    for (const line of lines) {
      const whole = pieces.join("") + line;
      pieces = [];
      if (whole.startsWith("data: ")) yield whole.slice(6);
    }
    pieces.push(last);
  }
}

/**
 * Follow the stream, and connect again where it ends.
 * on.snapshot(its text), on.state(state, reason), on.refused(status, reason): is asked for a token, or null to give up
 */
export async function follow(url, on) {
  let delay = FIRST_DELAY_MS;
  for (;;) {
    on.state("connecting", "");
    let reason = "the stream has ended";
    try {
      const answer = await fetchAsOperator(url);
      if (answer.status === 401 || answer.status === 403) {
        token = await on.refused(answer.status, await reasonOf(answer));
        continue;
      }
      if (!answer.ok) throw new Error(await reasonOf(answer));
      for await (const data of eventsOf(answer.body)) {
        delay = FIRST_DELAY_MS;
        on.state("live", "");
        on.snapshot(data);
      }
    } catch (error) {
      reason = error.message;
    }
    on.state("lost", reason);
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(MAX_DELAY_MS, delay * 2);
  }
}

async function reasonOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `HTTP ${answer.status}`;
  }
}
