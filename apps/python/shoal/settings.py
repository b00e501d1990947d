"""Where an option's value comes from: the command line, a variable SHOAL_<LONG_NAME>, a file, the default.

The file is TOML, by default ~/.config/shoal/config.toml: long option names for every command, or in a table for one.

    kv-dtype = "int8"
    [run]
    temp = 0.6
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from shoal.errors import InvalidArgument, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def option(*names: str, help: str, **settings: Any) -> Any:
    """A command-line option; its variable is its long name in capitals."""
    return typer.Option(*names, help=help, envvar=variable_of(names), show_envvar=False, **settings)


def variable_of(names: tuple[str, ...]) -> str:
    long = next(n for n in names if n.startswith("--")).split("/")[0]
    return "SHOAL_" + long.removeprefix("--").replace("-", "_").upper()


def config_path() -> Path:
    if own := os.environ.get("SHOAL_CONFIG"):
        return Path(own)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "shoal" / "config.toml"


def read_config() -> dict[str, Any]:
    """The file's contents; empty if there is none. A file that SHOAL_CONFIG names must exist."""
    path = config_path()
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if os.environ.get("SHOAL_CONFIG"):
            raise InvalidArgument(f'SHOAL_CONFIG names "{printable(path)}", which does not exist') from None
        return {}
    except OSError as error:
        raise InvalidArgument(f'cannot read "{printable(path)}": {error.strerror}') from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{path}: {error}") from None


def default_map(config: Mapping[str, Any], commands: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Click's defaults for each command. InvalidArgument for a name that no command has."""
    by_command = {name: _parameters(command) for name, command in commands.items()}
    known = set().union(*by_command.values())
    out: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key not in commands:
                raise InvalidArgument(f"{config_path()}: there is no command [{printable(key)}]")
            continue
        if key not in known:
            raise InvalidArgument(f"{config_path()}: there is no option {printable(key)}")
        for name, parameters in by_command.items():
            if key in parameters:
                out[name][parameters[key]] = value
    for name, parameters in by_command.items():
        for key, value in config.get(name, {}).items():
            if key not in parameters:
                raise InvalidArgument(f"{config_path()}: [{name}] has no option {printable(key)}")
            out[name][parameters[key]] = value
    return out


def _parameters(command: Any) -> dict[str, str]:
    """Long names (without dashes) to the names of a command's parameters."""
    out = {}
    for parameter in command.params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            if name.startswith("--") and parameter.name not in ("help", "print_config_"):
                out[name.removeprefix("--")] = parameter.name
    if any(p.name == "model" for p in command.params):
        out["model"] = "model"
    return out


_SECRET = frozenset(["api-key"])  # options whose values are not shown
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file", "DEFAULT": "default"}


def print_config(context: typer.Context) -> None:
    """Every option of the command with its value and where that came from, as a configuration file would have it."""
    print(f"# {config_path()}")
    print(f"[{context.info_name}]")
    for parameter in context.command.params:
        if parameter.name in ("help", "print_config_"):
            continue
        source = context.get_parameter_source(parameter.name)
        long = [n for n in parameter.opts if n.startswith("--")]
        name = long[0].removeprefix("--") if long else parameter.name
        value = context.params[parameter.name]
        if name in _SECRET and value:
            value = "(kept secret)"
        where = _SOURCES.get(getattr(source, "name", ""), "default")
        if where == "variable":
            where = f"variable {parameter.envvar}"
        print(f"{name} = {_toml(value)}  # {where}" if value is not None else f"# {name} is not set")
    raise typer.Exit()


def origin_of(error: Any) -> str:
    """For the message of a usage error: where a bad value came from if not from the command line."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return ""
    source = getattr(context.get_parameter_source(parameter.name), "name", "")
    if source == "ENVIRONMENT":
        return f" (from the variable {parameter.envvar})"
    return f" (from {config_path()})" if source == "DEFAULT_MAP" else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    text = str(getattr(value, "value", value))
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
