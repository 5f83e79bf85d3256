"""The buckets of the histograms.

Times that vLLM measures, too, have vLLM's buckets, so that quantiles of both agree in one dashboard. Phases are an
exception: vLLM's begin at 0.3 s, which says nothing about short prompts; raypd's begin at 5 ms.
"""

from __future__ import annotations

from typing import Final

TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
PHASE_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
TRANSFER_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TRANSFER_BYTES: Final = tuple(float(1 << power) for power in range(12, 38, 2))
TOKENS: Final = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 1_000_000
)
