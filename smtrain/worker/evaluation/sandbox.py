"""Run one Python program of a model, without a network and without changes outside its empty
folder.

    python -I sandbox.py FOLDER WORD_FD < PROGRAM

Started by `generated_code`. The first line of stdin is a word; it is written to WORD_FD if the
program runs to its end. Before the program starts, this process gives up by the kernel's filters
(seccomp, and Landlock for files) what the program must not do; a filter holds for the rest of the
process's life, and needs no privilege. Imports only the standard library and nothing of smtrain, as
it starts for every program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from typing import Any

CPU_SECONDS = 3
"""As much as OpenAI's own evaluation of HumanEval gives a program, by the clock."""
MEMORY_BYTES = 4 << 30
"""Address space; numpy alone takes 1 GiB of it."""
FILE_BYTES = 16 << 20

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
# A BPF program's operations: load a word, jump, return (linux/bpf_common.h).
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; each argument has eight bytes, the low half first."""
CLONE_THREAD = 0x10000
X32 = 0x40000000

# Numbers of system calls: asm/unistd_64.h, and asm-generic/unistd.h for arm64.
_NUMBERS = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41,
            "socketpair": 53,
            "clone": 56,
            "fork": 57,
            "vfork": 58,
            "execve": 59,
            "kill": 62,
            "truncate": 76,
            "chmod": 90,
            "fchmod": 91,
            "chown": 92,
            "fchown": 93,
            "lchown": 94,
            "ptrace": 101,
            "setrlimit": 160,
            "chroot": 161,
            "mount": 165,
            "umount2": 166,
            "setxattr": 188,
            "lsetxattr": 189,
            "fsetxattr": 190,
            "removexattr": 197,
            "tkill": 200,
            "fchmodat": 268,
            "fchownat": 260,
            "utimensat": 280,
            "utime": 132,
            "utimes": 235,
            "futimesat": 261,
            "shmget": 29,
            "msgget": 68,
            "semget": 64,
            "mq_open": 240,
            "add_key": 248,
            "keyctl": 250,
            "rt_sigqueueinfo": 129,
            "tgkill": 234,
            "unshare": 272,
            "prlimit64": 302,
            "setns": 308,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "bpf": 321,
            "execveat": 322,
            "pidfd_send_signal": 424,
            "io_uring_setup": 425,
            "pidfd_open": 434,
            "clone3": 435,
            "fchmodat2": 452,
            "rt_tgsigqueueinfo": 297,
            "open": 2,
            "openat": 257,
            "openat2": 437,
            "creat": 85,
            "mkdir": 83,
            "rmdir": 84,
            "link": 86,
            "unlink": 87,
            "symlink": 88,
            "rename": 82,
            "mknod": 133,
            "mkdirat": 258,
            "mknodat": 259,
            "unlinkat": 263,
            "renameat": 264,
            "linkat": 265,
            "symlinkat": 266,
            "renameat2": 316,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198,
            "socketpair": 199,
            "clone": 220,
            "execve": 221,
            "kill": 129,
            "truncate": 45,
            "fchmod": 52,
            "fchmodat": 53,
            "fchownat": 54,
            "fchown": 55,
            "ptrace": 117,
            "setrlimit": 164,
            "chroot": 51,
            "mount": 40,
            "umount2": 39,
            "setxattr": 5,
            "lsetxattr": 6,
            "fsetxattr": 7,
            "removexattr": 14,
            "tkill": 130,
            "utimensat": 88,
            "shmget": 194,
            "msgget": 186,
            "semget": 190,
            "mq_open": 180,
            "add_key": 217,
            "keyctl": 219,
            "rt_sigqueueinfo": 138,
            "tgkill": 131,
            "unshare": 97,
            "prlimit64": 261,
            "setns": 268,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "bpf": 280,
            "execveat": 281,
            "pidfd_send_signal": 424,
            "io_uring_setup": 425,
            "pidfd_open": 434,
            "clone3": 435,
            "fchmodat2": 452,
            "rt_tgsigqueueinfo": 240,
            "openat": 56,
            "openat2": 437,
            "mkdirat": 34,
            "mknodat": 33,
            "unlinkat": 35,
            "renameat": 38,
            "linkat": 37,
            "symlinkat": 36,
            "renameat2": 276,
        },
    ),
}
_FILES = (
    "creat",
    "mkdir",
    "rmdir",
    "link",
    "unlink",
    "symlink",
    "rename",
    "mknod",
    "mkdirat",
    "mknodat",
    "unlinkat",
    "renameat",
    "linkat",
    "symlinkat",
    "renameat2",
)
"""Calls that change folders: Landlock allows them in the program's own folder; without Landlock all
are refused.
"""
_ABSENT = ("clone3", "openat2")
"""Calls whose arguments a filter cannot see: said to be missing, so that libraries make the older
call.
"""
_LANDLOCK = {"create_ruleset": 444, "add_rule": 445, "restrict_self": 446}
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 15))
"""Rights of linux/landlock.h that change files; version 3 (Linux 6.2) is the first that knows all,
truncation too.
"""


def _call(name: str, *arguments: Any) -> int:
    """Call a function of libc. Raises OSError with its errno."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def limit() -> None:
    """Bound the time, memory and files of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def keep_to(folder: str) -> bool:
    """Allow this process to change files below a folder only; False if the kernel has no
    Landlock.
    """
    try:
        version = _call("syscall", _LANDLOCK["create_ruleset"], None, 0, 1)
    except OSError:
        return False
    if version < 3:
        return False
    ruleset = ctypes.create_string_buffer(struct.pack("=Q", _WRITES), 8)
    rules = _call("syscall", _LANDLOCK["create_ruleset"], ruleset, ctypes.c_size_t(8), 0)
    folder_descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    beneath = ctypes.create_string_buffer(struct.pack("=Qi", _WRITES, folder_descriptor), 12)
    _call("syscall", _LANDLOCK["add_rule"], rules, 1, beneath, 0)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("syscall", _LANDLOCK["restrict_self"], rules, 0)
    os.close(folder_descriptor)
    os.close(rules)
    return True


def program_of(machine: str, files: bool) -> bytes:
    """The seccomp filter of a machine's kind, as BPF instructions; with `files`, calls that change
    files are allowed.

    Raises KeyError for a kind of machine whose system calls are not listed.
    """
    architecture, numbers = _NUMBERS[machine]
    instructions: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        instructions += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    open_flags = {"open": (1, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)}
    open_flags["openat"] = (2, open_flags["open"][1])
    for name, number in numbers.items():
        if name in _ABSENT:
            instructions += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
        elif name in open_flags:
            argument, bits = open_flags[name]
            if not files:
                instructions += [
                    (EQUAL, 0, 4, number),
                    (LOAD, 0, 0, ARGUMENTS + 8 * argument),
                    (HAS_BITS, 0, 1, bits),
                    (RETURN, 0, 0, REFUSE | errno.EACCES),
                    (RETURN, 0, 0, ALLOW),
                ]
        elif name == "clone":  # threads are allowed, processes are not
            instructions += [
                (EQUAL, 0, 4, number),
                (LOAD, 0, 0, ARGUMENTS),
                (HAS_BITS, 1, 0, CLONE_THREAD),
                (RETURN, 0, 0, REFUSE | errno.EPERM),
                (RETURN, 0, 0, ALLOW),
            ]
        elif name == "tgkill":  # a thread of this process, such as abort()
            instructions += [
                (EQUAL, 0, 4, number),
                (LOAD, 0, 0, ARGUMENTS),
                (EQUAL, 1, 0, os.getpid()),
                (RETURN, 0, 0, REFUSE | errno.EPERM),
                (RETURN, 0, 0, ALLOW),
            ]
        elif name == "prlimit64":  # reading limits is allowed, setting them is not
            instructions += [
                (EQUAL, 0, 6, number),
                (LOAD, 0, 0, ARGUMENTS + 16),
                (EQUAL, 0, 2, 0),
                (LOAD, 0, 0, ARGUMENTS + 20),
                (EQUAL, 1, 0, 0),
                (RETURN, 0, 0, REFUSE | errno.EPERM),
                (RETURN, 0, 0, ALLOW),
            ]
        elif not (files and name in _FILES):
            instructions += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    instructions.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def filter_calls(files: bool) -> None:
    """Refuse for good the calls for networks, processes, and if not `files` also changes of
    files.
    """
    code = program_of(platform.machine(), files)
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    program_buffer = ctypes.create_string_buffer(program, len(program))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program_buffer, 0, 0)


def drop_capabilities() -> None:
    """Give up root's privileges, such as raising limits; without any there is nothing to give
    up.
    """
    header = ctypes.create_string_buffer(
        struct.pack("=Ii", 0x20080522, 0), 8
    )  # linux/capability.h, version 3
    _call("capset", header, ctypes.create_string_buffer(24))


def confine(folder: str) -> None:
    """Confine this process for good. Raises OSError or KeyError if the system cannot."""
    if sys.platform != "linux":
        raise OSError("it needs Linux")
    os.chdir(folder)
    limit()
    drop_capabilities()
    filter_calls(keep_to(folder))


def main() -> None:
    folder, descriptor = sys.argv[1], int(sys.argv[2])
    word, _, program = sys.stdin.buffer.read().decode().partition("\n")
    null_device = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null_device, stream)
    try:
        confine(folder)
    except (OSError, KeyError) as error:
        os.write(descriptor, f"refused {error}".encode())
        return
    try:
        exec(program, {})  # noqa: S102 - what this process is for
    except BaseException:  # SystemExit too: a program that ends early has not run its tests
        os._exit(1)
    os.write(descriptor, word.encode())
    os._exit(0)  # without waiting for the program's threads


if __name__ == "__main__":
    main()
