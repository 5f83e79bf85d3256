// Texts of numbers, and elements whose text is never taken for markup.

/** Return a duration in s, ms or us. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  return Math.abs(value) < 1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(2)} s`;
}

// To make a formatter takes far longer than to use one.
const WHOLE = new Intl.NumberFormat("en");

/** Return a number per second with few digits. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10 || value === 0 ? WHOLE.format(Math.round(value)) : value.toFixed(1);
}

/** Return bytes per second in GB/s (10^9), or in MB/s below 0.1 GB/s. */
export function byteRate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1e8 ? `${(value / 1e9).toFixed(2)} GB/s` : `${(value / 1e6).toFixed(1)} MB/s`;
}

/** Return a number of bytes in MB or GB. */
export function size(value) {
  return value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : `${(value / 1e6).toFixed(1)} MB`;
}

/** Return how long ago a Unix time was. */
export function ago(at, now) {
  const age = Math.max(0, now - at);
  if (age < 60) return `${age.toFixed(0)} s ago`;
  return age < 3600 ? `${Math.floor(age / 60)} min ago` : `${Math.floor(age / 3600)} h ago`;
}

/** Make an element. text: its text, which is never parsed as HTML */
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Set an element's text if it differs, so that readers of the screen are not told the same again. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Show pairs of names and values in a dl element. */
export function showFacts(list, facts) {
  while (list.children.length > facts.length) list.lastChild.remove();
  facts.forEach(([name, value], index) => {
    let row = list.children[index];
    if (!row) {
      row = element("div");
      row.append(element("dt"), element("dd"));
      list.append(row);
    }
    setText(row.firstChild, name);
    setText(row.lastChild, value);
  });
}

/** Let the browser save a file. */
export function save(data, name) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([data], { type: "application/json" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
