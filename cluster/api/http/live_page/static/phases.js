// The phases of a request, in the order in which they are drawn: a later one covers an earlier one.
export const PHASES = [
  ["unreported", "not reported"],
  ["transfer_hidden", "transfer, hidden by prefill"],
  ["admission", "at the ingress"],
  ["queue", "queue"],
  ["reservation", "waits for decode blocks"],
  ["batch", "waits for the batch"],
  ["prefill", "prefill"],
  ["decode", "decode"],
  ["transfer_exposed", "transfer, waited for"],
  ["preempted", "preempted"],
  ["recovery", "recovery"],
];
export const RANK = new Map(PHASES.map(([name], rank) => [name, rank]));
export const LABEL = new Map(PHASES);

/** Return the colours of the phases as the present theme has them. */
export function phaseColours() {
  const style = getComputedStyle(document.documentElement);
  return new Map(PHASES.map(([name]) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
