"""``concord agent``: starts and watches ranks on this host, for a session of tests on another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cluster import agent as agents
from harness.cluster import credentials, interfaces, torchrun
from harness.commands.refusing import bad, refusing


def agent(
    key: Annotated[
        Path | None, typer.Option(help="File with the session's key, which only you can read; - is standard input.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(help="Address of this host to listen on. Default: loopback, or as torchrun's node 0 needs it."),
    ] = "",
    towards: Annotated[
        str, typer.Option(help="Listen on the address of this host from which the kernel routes to this host.")
    ] = "",
    port: Annotated[int, typer.Option(help="Port; 0: the kernel chooses.", min=0, max=65535)] = 0,
    silence: Annotated[
        float, typer.Option(help="Seconds after which a controller is given up whose host does not answer.", min=1)
    ] = 30.0,
    new_key: Annotated[Path | None, typer.Option(help="Write a new key to this file, and end.")] = None,
    session: Annotated[
        list[str] | None,
        typer.Argument(
            help="Command of a session on all nodes of a torchrun job, which node 0 runs, such as: pytest ..."
        ),
    ] = None,
) -> None:
    """Start ranks on this host for sessions of tests that have the same key.

    Prints one line of JSON with the address once it listens. Ends at SIGTERM, SIGINT or SIGHUP, and all ranks with it.
    With a command, ends when the command has ended on node 0, there with its exit code.
    """
    if new_key is not None:
        with refusing(credentials.KeyProblem, OSError):
            credentials.write(new_key, credentials.made())
        return
    if key is None:
        raise bad("give --key FILE with the session's key; --new-key FILE makes one")
    with refusing(credentials.KeyProblem):
        if str(key) == "-":
            text = credentials.checked(sys.stdin.read(65536), "standard input")
        else:
            text = credentials.read(key)
    with refusing(torchrun.NoTorchrun, OSError):
        node = torchrun.Node() if session else None
        if towards and not listen:
            listen = interfaces.towards(interfaces.looked_up(towards))
        listen = listen or (node.address if node is not None else "127.0.0.1")
    try:
        serving = agents.Agent(text, listen, port, silence=silence)
    except OSError as e:
        raise bad(f"an agent can't listen on {listen} port {port}: {e.strerror or e}") from None
    host, number = serving.address
    address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    print(json.dumps({"agent": address}), flush=True)
    if node is None or not session:
        serving.serve()
        return
    with refusing(torchrun.NoTorchrun):
        together = node.meet(address)
    serving.serve(node.begin(session, together, str(key.absolute())))
    raise typer.Exit(node.end())


if __name__ == "__main__":
    typer.run(agent)
