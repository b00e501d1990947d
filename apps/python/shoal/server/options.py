"""What the operator of a server decides: one place for every limit and its default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    name: str  # of the model, as clients say it
    keys: tuple[str, ...] = ()  # none: everybody may ask
    any_host: bool = True  # else only by a name of this machine
    access_log: bool = True
    request_log: Path | None = None  # a folder for requests that failed by a fault of ours, with their prompts
    reasoning: str = "auto"  # auto, think, none
    tool_parser: str = "auto"  # auto, hermes, llama_json, none

    # What a client may ask for; above it 400 with the parameter's name, 413, 429 or 503.
    max_body: int = 8 * MIB
    max_header: int = 64 << 10
    max_connections: int = 1024
    max_messages: int = 4096
    max_tools: int = 128
    max_stops: int = 16
    max_stop_length: int = 1024  # characters; each token is compared with every beginning of each
    max_n: int = 128
    max_json_depth: int = 64
    max_queue: int = 512  # requests that the engine has not begun
    max_queue_age: float = 300.0  # seconds

    receive_timeout: float = 30.0  # seconds for a request to come in whole
    stall_timeout: float = 30.0  # seconds that a reader may take nothing
    keep_alive: float = 10.0  # seconds of silence after which a stream says that it lives
    ready_window: float = 10.0  # seconds within which a token shows that the engine works
    health_interval: float = 2.0  # seconds between questions to a replica whether it lives
    health_timeout: float = 30.0  # seconds that it has to answer, else it is started anew
    drain_timeout: float = 30.0  # seconds that running answers have after SIGTERM
