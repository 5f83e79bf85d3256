"""The program `raypd`: the list of its commands."""

from __future__ import annotations

import typer

from cluster.commands import access, ask, deploy, install, operate, serve
from cluster.commands.bench.bench_command import bench
from cluster.commands.plan.plan_command import plan
from cluster.commands.simulate.replay_command import replay
from cluster.commands.simulate.simulate_command import simulate
from cluster.commands.top.top_command import top

app = typer.Typer(
    name="raypd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(access.credentials)
# The order in which `raypd --help` lists them.
for command in (
    serve.serve,
    serve.stop,
    serve.demo,
    ask.generate,
    ask.chat,
    ask.embed,
    bench,
    plan,
    simulate,
    replay,
    operate.status,
    top,
    operate.explain,
    operate.scale,
    operate.drain,
    operate.update,
    operate.set_role,
    operate.load_adapter,
    operate.unload_adapter,
    operate.reset_prefix_cache,
    operate.profile,
    operate.rotate_secret,
    access.token,
    deploy.config,
    deploy.doctor,
    deploy.manifests,
    install.install,
):
    app.command()(command)


def main() -> None:
    """Run the command line: the entry point of `raypd` and of `python -m cluster`."""
    app()
