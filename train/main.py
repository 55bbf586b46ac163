"""The command line: ``python -m train.main COMMAND ...``.

A command is a module with a docstring and two functions, ``configure(parser)`` and ``run(args)``,
and one line in ``COMMANDS``. It imports slow modules, such as jax, in ``run``, so that errors in
the arguments are reported first. A command that calls ``parser.set_defaults(overrides=())`` also
takes ``--config.a.b=value`` options, which it finds in ``args.overrides``.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Nothing here is slow to load: slow imports wait until the arguments are checked.
from train.checks import nearest
from train.process import keep_freed_memory, keep_programs
from train.training.signals import Stopped

COMMANDS = {
    "train": ("train.commands.train", "train a model, or continue training it"),
    "eval": ("train.commands.eval", "evaluate a trained model"),
    "ask": ("train.commands.ask", "ask a trained model a question"),
    "generate": ("train.commands.generate", "continue prompts"),
    "export": ("train.commands.export", "write a model as a Hugging Face Llama folder"),
    "inspect": ("train.commands.inspect", "draw what goes on inside a trained model"),
    "compare": ("train.commands.compare", "train and evaluate several encodings alike"),
    "plan": ("train.commands.plan", "say what a step would take on a machine that is not here"),
    "score": ("train.commands.score", "judge a file of SCROLLS predictions"),
}

USER_ERROR = 2

# Fields of a config that users often look for as options.
FIELDS = {
    "--encoding": "--config.model.position.kind",
    "--position": "--config.model.position.kind",
    "--steps": "--config.train.steps",
}


def main(
    argv: Sequence[str] | None = None,
    commands: Mapping[str, tuple[str, str]] = COMMANDS,
    program: str = "train.main",
) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; None: those of this process.
      commands: module and summary of each command, by name.
      program: the module that was called.

    Returns:
      The exit code: 0, 2 for a wrong call, 3 for a loss that is not finite, 4 if another process
      of the same training has died, 130 and 143 for a run that was interrupted and saved.
    """
    keep_freed_memory()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _exit_code(argv, commands, program)
    except Exception:
        # A bug of ours. The other processes must not wait for this one, which waits for them.
        if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
            traceback.print_exc()
            _leave(1)
        raise
    _leave(code)
    return code


def _leave(code: int) -> None:
    """Ends a failed process at once if it is one of several, which would wait for it."""
    if code and "jax" in sys.modules:
        from train.training import distributed

        if distributed.is_one_of_several():
            distributed.leave(code)


def _exit_code(argv: list[str], commands: Mapping[str, tuple[str, str]], program: str) -> int:
    debug = "--debug" in argv
    try:
        return _run(argv, commands, program)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        _report(without_environment(error), debug)
        return USER_ERROR
    except OverflowError as error:
        _report(f"a number that was given is too large ({error}); --debug shows where", debug)
        return USER_ERROR
    except MemoryError as error:
        _report(_too_large(error), debug)
        return USER_ERROR
    except (ValueError, OSError, RuntimeError) as error:
        # An OSError with this text means a full disk.
        if "RESOURCE_EXHAUSTED" in _first_line(error) and not isinstance(error, OSError):
            _report(_too_large(error), debug)
            return USER_ERROR
        if (code := _peer_lost(error)) is not None:
            return code
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise
        _report(error, debug)
        return USER_ERROR


def _peer_lost(error: Exception) -> int | None:
    """Reports and returns the exit code if an error means that another process is gone."""
    if "jax" not in sys.modules:
        return None
    from train.training import distributed

    if not distributed.is_peer_lost(error):
        return None
    print(
        f"error: another process has died or cannot be reached ({_first_line(error)}). "
        "What was saved is intact: start all processes again with --resume",
        file=sys.stderr,
        flush=True,
    )
    return distributed.PEER_LOST


def _too_large(error: Exception) -> str:
    """Returns the message for an out-of-memory error."""
    return (
        "what is asked for does not fit into this machine: give fewer or smaller numbers "
        f"({type(error).__name__}: {_first_line(error)}); --debug shows where"
    )


def _report(error: Exception | str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    else:
        print(f"error: {error}", file=sys.stderr)


def without_environment(error: ModuleNotFoundError) -> str:
    """Returns one line of advice for a missing module."""
    made = ".venv/.ready"
    if not Path(made).exists():
        advice = f"`make {made}` sets up an environment that has it; then call .venv/bin/python"
    elif Path(sys.prefix).resolve() != Path(".venv").resolve():
        advice = "call .venv/bin/python, or first `source .venv/bin/activate`"
    else:
        advice = f"`make -B {made}` installs what requirements.txt lists"
    return f"{error} in this Python, {sys.executable}: {advice}"


def _run(
    argv: list[str],
    commands: Mapping[str, tuple[str, str]],
    program: str = "train.main",
) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(commands, program))
        return 0 if argv else USER_ERROR
    if argv[0] not in commands:
        raise ValueError(
            f"unknown command {argv[0]!r}: expected one of {', '.join(map(repr, commands))}"
            f"{nearest(argv[0], commands)}"
        )
    module = importlib.import_module(commands[argv[0]][0])
    parser = argparse.ArgumentParser(
        prog=f"python -m {program} {argv[0]}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    takes_config = parser.get_default("overrides") is not None
    if takes_config:
        parser.add_argument("--help-config", action="store_true", help="list the config's fields")
        if "--help-config" in argv:
            print(_help_config(argv))
            return 0
    _check_options(argv[0], parser, argv[1:], takes_config=takes_config)
    args, rest = parser.parse_known_args(argv[1:])
    if rest and not takes_config:
        raise ValueError(f"{argv[0]} does not take {' '.join(rest)}; see --help")
    args.overrides = rest
    keep_programs()
    return module.run(args) or 0


def _check_options(
    command: str, parser: argparse.ArgumentParser, argv: Sequence[str], *, takes_config: bool
) -> None:
    """Raises ValueError for an option that a command does not have, naming the nearest one."""
    known = re.findall(r"--[a-z][a-z-]*", parser.format_help())
    for argument in argv:
        name = argument.partition("=")[0]
        if not re.match("--.", name) or name in known:
            continue
        if not (takes_config and name.startswith("--config.")):
            meant = nearest(name, known)
            if takes_config and name in FIELDS and f"{name}s" not in known:
                meant = f" (did you mean {FIELDS[name]!r}?)"
            raise ValueError(f"{command} has no option {name!r}{meant}; see --help")


def _help_config(argv: Sequence[str]) -> str:
    """Lists the fields that ``--config.a.b=value`` can change for a call's config or run."""
    from train import experiment

    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--config", type=Path)
    given.add_argument("--run", type=Path)
    args, rest = given.parse_known_args(argv)
    return experiment.help_config(args.config, args.run, rest)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Removes the traceback from a library's log record: the error is reported later."""
    record.exc_info = record.exc_text = None
    return True


def _one_line(failure: Any) -> None:
    """Prints an error in a library's thread, or during exit, as one line."""
    print(f"error beside another: {failure.exc_value}", file=sys.stderr)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def _overview(commands: Mapping[str, tuple[str, str]], program: str) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in commands.items()]
    usage = f"usage: python -m {program} COMMAND ... (COMMAND --help says more)"
    return "\n".join([usage, "", *lines])


def quiet() -> None:
    """Shortens each library error to one line, unless ``--debug`` is given."""
    if "--debug" not in sys.argv:
        logging.getLogger("absl").addFilter(_without_traceback)
        threading.excepthook = sys.unraisablehook = _one_line


if __name__ == "__main__":
    quiet()
    sys.exit(main())
