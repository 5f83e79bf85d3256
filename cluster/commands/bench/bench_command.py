"""The command line of `raypd bench`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.command_line import fail, run
from cluster.errors import InvalidConfig

_LOAD, _PROMPTS, _FIGURES = "Load", "Prompts and answers", "Figures"


def bench(
    url: Annotated[
        str, typer.Option("--url", "--base-url", help="URL of a server with an OpenAI-compatible API.")
    ] = "http://127.0.0.1:8000",
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Measure two servers in turns and compare them: --pair URL_A URL_B, instead of --url."),
    ] = None,
    pairs: Annotated[int, typer.Option(help="Number of runs on each server with --pair; at least 5.")] = 5,
    model: Annotated[
        str | None, typer.Option(help="Model to request; default: the first one that /v1/models lists.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Call /v1/chat/completions instead of /v1/completions, with words as prompts."),
    ] = False,
    num_prompts: Annotated[
        int,
        typer.Option(
            min=1, help="Number of requests; with --trace, the first requests of the trace.", rich_help_panel=_LOAD
        ),
    ] = 100,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests per second, sent without waiting for answers; inf: all at once.", rich_help_panel=_LOAD
        ),
    ] = float("inf"),
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of the times between requests: 1 is a Poisson process; below 1 "
            "requests come in bursts; above 1 they are more regular; inf: all times are equal.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Limit on concurrent requests; default: no limit.", rich_help_panel=_LOAD),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace to replay: what `raypd serve --request-trace` has written; JSON lines with timestamp (ms), "
            "input_length, output_length and optionally hash_ids (Mooncake); or Azure's CSV. With --request-rate, only "
            "the lengths of the trace are used.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    trace_speed: Annotated[
        float,
        typer.Option(
            help="Speed at which the trace is replayed: 2 is twice as fast as recorded.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    num_warmups: Annotated[
        int,
        typer.Option(
            min=0, help="Number of warm-up requests before the run; they are not measured.", rich_help_panel=_LOAD
        ),
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of arrivals, lengths and prompts; default: random, since a server may have cached the prompts "
            "of an earlier run.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.1,
            help="Timeout of each request in seconds; a later answer counts as failed.",
            rich_help_panel=_LOAD,
        ),
    ] = 600.0,
    input_len: Annotated[
        int,
        typer.Option(
            min=1, help="Length of each prompt in tokens, without the prefix of --prefix-len.", rich_help_panel=_PROMPTS
        ),
    ] = 512,
    output_len: Annotated[
        int, typer.Option(min=1, help="Length of each answer in tokens.", rich_help_panel=_PROMPTS)
    ] = 128,
    range_ratio: Annotated[
        float,
        typer.Option(
            help="Lengths are uniform between (1 - ratio) and (1 + ratio) times the given ones.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 0.0,
    prefix_len: Annotated[
        int,
        typer.Option(
            min=0,
            help="Length in tokens of a common prefix, which is put before the prompts.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 0,
    num_prefixes: Annotated[
        int,
        typer.Option(
            min=1, help="Number of different prefixes, which the prompts use in turn.", rich_help_panel=_PROMPTS
        ),
    ] = 1,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the model's tokenizer, or its tokenizer.json; default: use the server's /tokenize.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(help="Generate answers of exactly --output-len tokens (ignore_eos).", rich_help_panel=_PROMPTS),
    ] = True,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature; default: the server's.", rich_help_panel=_PROMPTS),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(help="JSON object with further fields for the body of every request.", rich_help_panel=_PROMPTS),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="Header to send with every request, as NAME=VALUE; repeat the option for several.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            "--goodput",
            help="Latency objectives of goodput, for ttft, tpot, itl or e2el: such as ttft=500ms,itl=50ms, or ttft:500 "
            "as in vLLM.",
            rich_help_panel=_FIGURES,
        ),
    ] = None,
    send_slo: Annotated[
        bool,
        typer.Option(
            "--send-slo",
            help="Send the objectives for ttft and tpot (or itl) with every request, as its aims; raypd's routing "
            "considers them (slo in the body).",
            rich_help_panel=_PROMPTS,
        ),
    ] = False,
    percentile_metrics: Annotated[
        str,
        typer.Option(
            help="Metrics to show, separated by commas: ttft, tpot, itl, e2el, client_queue_time.",
            rich_help_panel=_FIGURES,
        ),
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles, separated by commas.", rich_help_panel=_FIGURES)
    ] = "50,90,99",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write all figures and the times of every request to this JSON file.",
            rich_help_panel=_FIGURES,
        ),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Write the figures with plots to this HTML file, one page that needs no other file; with --pair, both "
            "servers side by side.",
            rich_help_panel=_FIGURES,
        ),
    ] = None,
) -> None:
    """Measure a server with an OpenAI-compatible API under load: raypd or any other.

    The command sends the token of the other commands (RAYPD_TOKEN, or
    --token-file before the command), or else OPENAI_API_KEY.

    Example: raypd bench --request-rate 4 --num-prompts 200 --slo ttft=500ms
    """
    from rich.console import Console

    from cluster.client.client_credentials import Credentials
    from cluster.commands.bench.bench_options import BenchOptions, check
    from cluster.commands.bench.bench_run import run_benchmark

    options = BenchOptions(
        urls=[url] if pair is None else list(pair),
        num_pairs=pairs,
        chat=chat,
        model=model,
        tokenizer=tokenizer,
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        trace=trace,
        trace_speed=trace_speed,
        num_warmups=num_warmups,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra_body=extra_body,
        headers=header or (),
        slo=slo or (),
        sends_slo=send_slo,
        percentile_metrics=percentile_metrics,
        metric_percentiles=metric_percentiles,
        timeout_s=timeout_s,
        seed=seed,
        json_file=json_file,
        html_file=html_file,
    )
    try:
        benchmark, credentials = check(options), Credentials.from_environment()
    except InvalidConfig as error:
        fail(error, exit_code=2)
    token = os.environ.get("OPENAI_API_KEY", "")
    run(lambda: asyncio.run(run_benchmark(benchmark, credentials, token, Console())))
