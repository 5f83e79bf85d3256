"""Stands in for Ray's dashboard agent in a local Ray cluster: a program that offers none of the agent's services.

    python -I -S agent_stand_in.py SESSION_DIRECTORY NODE_ID

The raylet waits for three files with the ports of the agent's services, in which -1 stands for a service that is not
there. Ray's own agent writes -1, too, where the packages of the dashboard are not installed. The raylet ends when the
agent ends, so this program waits until the raylet has ended, which closes its standard input. It imports nothing of
Ray or raypd, so it starts within milliseconds.
"""

from __future__ import annotations

import os
import sys

SERVICES = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main() -> None:
    """Write the files, and wait for the end of the raylet."""
    directory, node_id = sys.argv[1:]
    for service in SERVICES:
        path = f"{directory}/{service}_{node_id}"
        with open(f"{path}.new", "w") as file:  # noqa: PTH123  # The import of pathlib takes longer than all the rest.
            file.write("-1")
        # The raylet must not read an empty file.
        os.replace(f"{path}.new", path)  # noqa: PTH105
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
