"""Call the user's own ssh, and explain its failures.

One connection is kept open for all calls (ControlMaster), with the user's agent, config and jump hosts. A dead
connection is noticed within a minute, so that nothing hangs.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

from smtrain.core.files import home

LOST = 255
"""Exit status of ssh itself, as opposed to the command's."""
_LONGEST_SOCKET = 90  # characters: the kernel takes 107, and ssh adds some
# ssh's message, its meaning and the remedy; waiting does not help against these.
_LASTING = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another one than your ssh knows",
     "if the head node was reinstalled, forget the old key with `ssh-keygen -R` and connect once by hand: `ssh {host}`"),
    ("Host key verification failed", "your ssh does not know its host key yet",
     "connect once by hand and confirm it: `ssh {host}`"),
    ("Permission denied", "it refused your key",
     "make `ssh {host} true` work by hand: ssh-add your key, or name it in ~/.ssh/config"),
    ("Too many authentication failures", "it refused your keys",
     "name the right one in ~/.ssh/config (IdentityFile, IdentitiesOnly yes)"),
    ("Name or service not known", "there is no host of this name",
     "correct cluster.host, or add it to ~/.ssh/config"),
    ("Bad configuration option", "your ssh cannot read its config", "correct ~/.ssh/config"),
    ("Bad owner or permissions", "your ssh refuses its config", "run `chmod 600 ~/.ssh/config`"),
)  # fmt: skip


def options() -> list[str]:
    """ssh's options: one connection for all calls, kept for a minute, and closed when it is dead."""
    folder = home() / "ssh"
    if len(str(folder)) > _LONGEST_SOCKET - 42:  # %C has 40 characters
        folder = Path(tempfile.gettempdir()) / f"smtrain-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {
        "ControlMaster": "auto", "ControlPath": f"{folder}/%C", "ControlPersist": "60",
        "ConnectTimeout": "20", "ServerAliveInterval": "15", "ServerAliveCountMax": "3",
    }  # fmt: skip
    return [word for name, value in kept.items() for word in ("-o", f"{name}={value}")]


def command(host: str, words: list[str]) -> list[str]:
    """The local command that runs a command on the head node."""
    return ["ssh", *options(), host, shlex.join(words)]


def meaning(host: str, said: str) -> tuple[str, bool]:
    """Explain the last message of ssh, and say whether the failure is permanent."""
    for words, what, remedy in _LASTING:
        if words in said:
            return f"{host}: {what}; {remedy.format(host=host)}", True
    last = said.strip().splitlines()[-1].strip() if said.strip() else "the connection broke"
    return f"{host} cannot be reached by ssh ({last}); check the network, and cluster.host", False
