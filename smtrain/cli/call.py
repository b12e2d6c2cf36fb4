"""Run one command's module: errors a user can mend become sentences on stderr and status 2, never a traceback."""

from __future__ import annotations

import sys
from importlib import import_module

from smtrain.errors import ConfigError, SmtrainError


def call(name: str, module: str, argv: list[str]) -> int:
    """Call a command's typer app with its arguments; returns the exit status."""
    app = import_module(module).app
    try:
        status = app(args=argv, prog_name=f"smtrain {name}", standalone_mode=True)
    except ConfigError as error:
        for fault in error.faults:
            print(f"smtrain: {fault}", file=sys.stderr)
        return 2
    except SmtrainError as error:
        print(f"smtrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        sentence = _of_aws(error)
        if sentence is None:
            raise
        print(f"smtrain: {sentence}", file=sys.stderr)
        return 2
    return int(status or 0)


def _of_aws(error: Exception) -> str | None:
    """One sentence for what AWS or the way to it refuses; None for anything else."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    except ImportError:
        return None
    if isinstance(error, NoCredentialsError):
        return "no AWS credentials were found; log in (`aws configure` or `aws sso login`), or use --target local"
    if isinstance(error, ClientError):
        told = error.response.get("Error", {})
        return f"AWS refused {error.operation_name} ({told.get('Code')}): {told.get('Message')}"
    return f"AWS could not be reached: {error}" if isinstance(error, BotoCoreError) else None
