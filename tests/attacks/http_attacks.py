"""What clients can send by HTTP to take an ingress down, or others' answers away."""

from __future__ import annotations

from tests.attacks.target import Attack

ATTACKS: list[Attack] = []
