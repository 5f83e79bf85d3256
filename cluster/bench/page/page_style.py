"""The style of a result's page: colours for light and dark, and plots side by side where the window is wide enough."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c1f24; --dim: #5f6773; --grid: #dfe3e8;
  --s0: #1f6feb; --s1: #d1570c; --warn: #9a4b00; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --text: #e6e9ee; --dim: #9aa4b1; --grid: #2f3640;
  --s0: #6cb0ff; --s1: #ffa657; --warn: #f0b060; } }
body { margin: 0 auto; padding: 16px; max-width: 1200px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 8px; }
p { margin: 4px 0; } .dim, .none, figcaption small { color: var(--dim); } .warn { color: var(--warn); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px 3px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; } .grid { stroke: var(--grid); stroke-width: 1; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dots { fill: none; stroke-width: 4; stroke-linecap: round; opacity: 0.55; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
.k0 { background: var(--s0); } .k1 { background: var(--s1); }
details { margin: 8px 0; } dt { font-weight: 600; margin-top: 6px; } dd { margin: 0 0 0 16px; }
"""
