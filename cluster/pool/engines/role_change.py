"""An engine takes another role while it runs (`raypd set-role`): what changes, and who follows it.

The engine itself is not told: it does what each request asks of it. Its role is what ingresses route by, so a new role
is a new snapshot of the membership. The way of the change:

1. `raypd set-role` calls the admin service of an ingress, which calls Operations.set_role() in the controller.
2. EngineFleet.set_role() changes the role here, saves it for a later controller, and publishes the membership.
3. At each ingress SessionPool.update() gives the engine's session its new descriptor, and the router chooses by it
   from the next request on. Requests that have begun go on as they are.

A slot keeps the role when another engine fills it, until the role is changed again.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.pool.engines.engine_incarnation import EngineIncarnation
from cluster.routing.engine_connection import EngineRole
from cluster.sessions.cluster_membership import Membership


def change_role(engine: EngineIncarnation, role: EngineRole, membership: Membership) -> Membership:
    """Give an engine that has loaded another role; returns the membership in which it serves in that role."""
    assert engine.descriptor is not None, "it serves"
    engine.role = role
    engine.descriptor = replace(engine.descriptor, role=role)
    return membership.with_role(*engine.key, role)
