"""The credentials of client commands, and `raypd token`, which makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.command_line import (
    run,
)


def credentials(
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that client commands send; or set RAYPD_TOKEN.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect to the ingress with TLS.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Root certificates that verify the ingress (PEM); default: the system's.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Client certificate for mutual TLS (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the client certificate (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Send the token without TLS, too.")] = False,
) -> None:
    """Serve large language models on Ray, with prefill and decode on separate nodes."""
    from cluster.commands.new_token import use_credentials

    use_credentials(
        {
            "TOKEN_FILE": token_file,
            "TLS": tls,
            "TLS_CA": tls_ca,
            "TLS_CERT": tls_cert,
            "TLS_KEY": tls_key,
            "INSECURE": insecure,
        }
    )


def token(
    name: Annotated[str, typer.Argument(help="Name of the token in logs and errors.")],
    tenant: Annotated[
        str | None, typer.Option(help="Tenant that the token belongs to; default: the token's name.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow the token to change the cluster.")] = False,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Requests per second, at each ingress; default: no limit.")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Tokens of prompts and outputs per second, at each ingress; default: no limit.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(help="Requests at once, at each ingress; default: no limit.")
    ] = None,
) -> None:
    """Create a bearer token, and print its entry for the token file (ingress.tokens)."""
    from cluster.commands.new_token import print_new_token

    limits = {"requests_per_s": requests_per_s, "tokens_per_s": tokens_per_s, "concurrent": concurrent}
    run(lambda: print_new_token(Console(), name=name, tenant=tenant, admin=admin, **limits))
