"""The commands that prepare a cluster: `raypd config`, `raypd doctor` and `raypd manifests`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.commands.command_line import ConfigFile, RayAddress, load, run


def config(
    default: Annotated[
        bool, typer.Option("--default", help="Print all settings with their defaults and descriptions, as YAML.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the settings.")] = False,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Say what is wrong with a settings file; `raypd doctor` looks at its model."),
    ] = None,
) -> None:
    """Print the settings of a cluster, or check a settings file. Nothing is started."""
    if default + schema + (check is not None) != 1:
        raise typer.BadParameter("give one of --default, --schema and --check FILE")

    from cluster.settings_reference import to_schema, to_yaml

    if check is not None:
        load(check, {}, looks_at_model=False)
        typer.echo(f"{check} is valid")
    else:
        typer.echo(to_schema() if schema else to_yaml(), nl=schema)


def doctor(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Directory of the checkpoint, in Hugging Face format.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of each engine.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Only say whether the model fits on GPUs of this kind: a100, h100, h200, b200 or l40s."),
    ] = None,
    ray_address: RayAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this node, or every node of a Ray cluster, for what would go wrong, and say what to change."""
    overrides: dict[str, Any] = {
        "model": {"model": model},
        "parallel": {"tensor_parallel_size": tp},
        "ray": {"address": ray_address},
    }
    cluster_config = load(config, overrides, looks_at_model=False)

    from cluster.commands.doctor.examination import examine

    def look() -> None:
        if not examine(cluster_config, Console(), gpu=gpu, as_json=as_json):
            sys.exit(1)

    run(look)


def manifests(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="With --check: YAML files to check instead of the rendered ones; - reads standard input."),
    ] = None,
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Directory of the checkpoint in the pods.")] = None,
    models_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim with the checkpoint, mounted at /models.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode engines.")] = None,
    both: Annotated[int | None, typer.Option(help="Number of engines that prefill and decode.")] = None,
    encode: Annotated[int | None, typer.Option(help="Number of engines that encode images.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of each engine.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Kind of GPU, one for each rank: a100, h100, h200, b200, l40s, or any.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image of all pods, as repository/raypd:tag.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Render a RayJob that runs `raypd demo` on such a cluster.")
    ] = False,
    kustomize: Annotated[
        Path | None, typer.Option(help="Write a base and overlays from the raypd.yaml files in this directory.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the objects for what would not work instead of printing them.")
    ] = False,
) -> None:
    """Print a cluster as Kubernetes objects for KubeRay: `raypd manifests … | kubectl apply -f -`.

    Tokens, certificates' keys and the cluster's secrets are not in them: the pods mount Secrets, which the settings
    kubernetes.tls, tokens, internal_tls, cluster_secret and block_hash_key name. Standard error has the commands that
    make them; cert-manager makes the certificates inside with kubernetes.internal_tls.cert_manager.
    """
    from cluster.commands import manifests as manifests_command

    options = manifests_command.Options(prefill, decode, both, encode, tp, gpu, model, models_claim, image, namespace)
    if kustomize is not None:
        run(lambda: manifests_command.write_kustomization(kustomize, Console(), only_checks=check))
    elif files:
        run(lambda: manifests_command.check_files(files, Console()))
    else:
        run(lambda: manifests_command.print_manifests(config, options, Console(), is_trial=trial, only_checks=check))
