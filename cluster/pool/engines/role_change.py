"""The change of an engine's role while the engine runs (`raypd set-role`).

Every engine can prefill and decode, and every request tells it what to do. Its role is a preference: the routers of
ingresses use it, and the engine itself, whose steps mix as much prefill into decodes as the role allows
(actors/core/steps/chunk_budget.py). So a change of a role is:

1. `raypd set-role` calls the AdminService of an ingress, which calls Operations.set_role() in the controller.
2. EngineFleet.set_role() tells the engine. If the engine does not answer, the change fails, and nothing has changed.
3. EngineFleet.set_role() changes the role, saves it for a later controller, and publishes the membership.
4. At each ingress, SessionPool.update() gives the engine's session the new descriptor, and the router uses the new role
   from the next request on. Requests that have begun go on unchanged.

Later engines of the same slot serve in the new role as well, until the role is changed again.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.pool.engines.engine_incarnation import EngineIncarnation
from cluster.routing.engine_connection import EngineRole
from cluster.sessions.cluster_membership import Membership


def change_role(engine: EngineIncarnation, role: EngineRole, membership: Membership) -> Membership:
    """Change the role of an engine that has loaded its model. Returns the membership with the new role."""
    assert engine.descriptor is not None, "it serves"
    engine.role = role
    engine.descriptor = replace(engine.descriptor, role=role)
    return membership.with_role(*engine.key, role)
