"""The commands that prepare a cluster: `raypd config`, `raypd doctor` and `raypd manifests`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.commands.command_line import (
    DEFAULTS,
    ConfigFile,
    NumBoth,
    NumDecode,
    NumEncode,
    NumPrefill,
    NumRanks,
    RayAddress,
    load,
    run,
)


def config(
    default: Annotated[
        bool,
        typer.Option("--default", help="Print a settings file (YAML) with every setting, its default and description."),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the settings file, for editors.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Check this settings file. The model is not checked; `raypd doctor` checks it."),
    ] = None,
) -> None:
    """Print all settings, or check a settings file.

    Give exactly one of the options. The exit status is 2 if the settings file
    has a mistake.

    Example: raypd config --default > raypd.yaml
    """
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
    model: Annotated[
        str | None,
        typer.Option(help="Directory of the checkpoint, in Hugging Face format; default: the demo model."),
    ] = None,
    tp: NumRanks = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Check only whether the model fits on GPUs of this kind: a100, h100, h200, b200 or l40s; no machine "
            "with such GPUs is needed."
        ),
    ] = None,
    ray_address: RayAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check whether the model and the nodes are ready to serve, and print what to change.

    It checks the checkpoint, memory, GPUs, ports and files of this node, or of
    every node of the Ray cluster at --ray-address. The exit status is 1 if a
    check fails. Options override the settings file.

    Example: raypd doctor --model /models/Llama-3.1-8B --gpu h100
    """
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
        typer.Argument(help="YAML files to check instead of printing manifests; - reads standard input."),
    ] = None,
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(help="Directory of the checkpoint in the pods; default: the image's demo model.")
    ] = None,
    models_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim with the checkpoint; the pods mount it at /models.")
    ] = None,
    prefill: NumPrefill = None,
    decode: NumDecode = None,
    both: NumBoth = None,
    encode: NumEncode = None,
    tp: NumRanks = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Give each rank one GPU of this kind: a100, h100, h200, b200, l40s, or any. Default: engines run on "
            "CPUs."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Image of all pods, as repository/raypd:tag; default: raypd:VERSION-cpu or -cuda."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help=f"Kubernetes namespace of all objects; default: {DEFAULTS.kubernetes.namespace}.")
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Print a RayJob that runs `raypd demo` on such a cluster instead.")
    ] = False,
    kustomize: Annotated[
        Path | None,
        typer.Option(
            help="Write kustomize files in this directory: base/ and overlays/*/, each from its settings in raypd.yaml."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Only check the objects for mistakes; with --kustomize, check that its files are up to date.",
        ),
    ] = False,
) -> None:
    """Print the Kubernetes manifests of a cluster, for KubeRay.

    Options override the settings file, and the defaults below hold where the
    file has no such setting.

    The manifests contain no tokens, private keys or secrets: the pods mount
    Secrets, whose names are in the settings kubernetes.tls, tokens,
    internal_tls, cluster_secret and block_hash_key. The command prints to
    standard error how to create these Secrets. With
    kubernetes.internal_tls.cert_manager, cert-manager creates the internal
    certificates.

    Example: raypd manifests --gpu h100 --model /models/Llama-3.1-8B --models-claim models | kubectl apply -f -
    """
    from cluster.commands import manifests as manifests_command

    options = manifests_command.Options(prefill, decode, both, encode, tp, gpu, model, models_claim, image, namespace)
    if kustomize is not None:
        run(lambda: manifests_command.write_kustomization(kustomize, Console(), only_checks=check))
    elif files:
        run(lambda: manifests_command.check_files(files, Console()))
    else:
        run(lambda: manifests_command.print_manifests(config, options, Console(), is_trial=trial, only_checks=check))
