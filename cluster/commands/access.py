"""The options with which client commands authenticate, and `raypd token`, which creates a token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.command_line import run


def credentials(
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token that client commands send; default: the variable RAYPD_TOKEN."),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Connect to the ingress with TLS; --tls-ca and --tls-cert imply it.")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Root certificates that verify the ingress (PEM); default: the system's.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Client certificate (PEM), for an ingress with mutual TLS; needs --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the client certificate (PEM).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow sending the token in plain text to addresses beyond loopback.")
    ] = False,
) -> None:
    """Serve large language models on Ray, with prefill and decode on separate nodes.

    The options below apply to commands that call a running cluster. They come
    before the command: raypd --tls status.
    """
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
    name: Annotated[str, typer.Argument(help="Name of the token; logs and error messages show it.")],
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Tenant that the token belongs to; tenants share no cached prompts. Default: the token's name."
        ),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow the token to call AdminService: status, scale, drain and the like.")
    ] = False,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Limit on requests per second, at each ingress; default: no limit.")
    ] = None,
    tokens_per_s: Annotated[
        float | None,
        typer.Option(help="Limit on prompt and output tokens per second, at each ingress; default: no limit."),
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(help="Limit on concurrent requests, at each ingress; default: no limit.")
    ] = None,
) -> None:
    """Create a bearer token, and print it with its entry for the token file.

    The setting ingress.tokens names the token file, which holds only a hash of
    the token: keep the printed token.

    Example: raypd token alice --requests-per-s 10
    """
    from cluster.commands.new_token import print_new_token

    limits = {"requests_per_s": requests_per_s, "tokens_per_s": tokens_per_s, "concurrent": concurrent}
    run(lambda: print_new_token(Console(), name=name, tenant=tenant, admin=admin, **limits))
