#!/usr/bin/env python3
"""Run one command in a guest with the memory nodes and disks that this machine lacks.

    tests/vm/launch.py [options] MODE -- COMMAND [ARGUMENT...]

    numa      nodes 0 (CPUs), 1 and 2 (memory only), with distances and HMAT figures
    cxl       nodes 0, 1, and a CXL device as node 2
    cxlperf   nodes 0, 1, and a CXL device with figures as node 3; node 2 is empty
    disks     one node, NVMe drives of two sector sizes, one of them with bad sectors

The guest sees this machine's files. Its writes are lost, except under --out. The command starts in
the caller's directory. Its standard output and error are merged and printed as they arrive.

Exit code: the command's; 125 if the guest returned none; 77 if the guest is not available on this
machine.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from topology import DRIVE_MIB, DRIVES, MODES, Guest, drive_args

HERE = Path(__file__).resolve().parent
VM_DIR = Path(os.environ.get("PENSTOCK_VM_DIR") or HERE.parents[1] / "build" / "vm").resolve()
TOOLS = VM_DIR / "tools" / "usr"
LIBRARIES = TOOLS / "lib" / "x86_64-linux-gnu"

NOT_AVAILABLE = 77
NO_EXIT_CODE = 125
BOOT_ATTEMPTS = 3
CONSOLE_LINES_SHOWN = 20
PASSED_VARIABLES = ("PATH", "VIRTUAL_ENV", "PYTHONPATH", "HOME")
DEADLY_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


class Interrupted(BaseException):
    """A signal asked the launcher to stop; its number is the only argument."""


def interrupt(signum: int, _frame: FrameType | None) -> None:
    for deadly in DEADLY_SIGNALS:  # a second Ctrl-C must not interrupt the cleanup
        signal.signal(deadly, signal.SIG_IGN)
    raise Interrupted(signum)


def mebibytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([MG])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(match[1]) * (1024 if match[2] == "G" else 1)


def environment_entry(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a valid variable name")
    if not given and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set; use {name}=VALUE")
    return name, value if given else os.environ[name]


def parse_command_line(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] MODE -- COMMAND [ARGUMENT...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="time limit (default: 300)"
    )
    parser.add_argument(
        "--smp", type=int, default=2, metavar="CPUS", help="number of CPUs (default: 2)"
    )
    for node, default in enumerate(("3G", "1G", "1G")):
        parser.add_argument(
            f"--mem{node}",
            type=mebibytes,
            default=default,
            metavar="SIZE",
            help=f"memory of node {node} (default: {default})",
        )
    parser.add_argument(
        "--env", type=environment_entry, action="append", default=[], metavar="NAME[=VALUE]",
        help="pass this variable to the command",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a directory that the guest can write to"
    )
    parser.add_argument(
        "--console", type=Path, metavar="FILE", help="write the kernel's messages to a file"
    )
    if "--" not in argv:
        parser.parse_args(argv)  # handles --help and reports more specific errors
        parser.error("pass the command to run after --")
    split = argv.index("--")
    command = argv[split + 1 :]
    if not command:
        parser.error("there is no command after --")
    return parser.parse_args(argv[:split]), command


def command_script(environment: dict[str, str], command: list[str]) -> str:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    change_directory = f"cd {shlex.quote(os.getcwd())} || exit {NO_EXIT_CODE}"
    return "\n".join([*exports, change_directory, f"exec {shlex.join(command)}", ""])


def guest_environment(mode: str, out: Path, variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
        "TERM": "dumb",  # the command writes to a terminal in the guest, but usually not here
        "PYTHONDONTWRITEBYTECODE": "1",  # bytecode would fill the guest's memory and then be lost
        **dict(variables),
        "PENSTOCK_VM_MODE": mode,
        "PENSTOCK_VM_OUT": str(out),
        "PENSTOCK_VM_TOOLS": str(TOOLS),
    }


def escaped(path: Path) -> str:
    return str(path).replace(",", ",,")  # QEMU ends the value of an option at a single comma


def shared_directory(tag: str, path: Path, options: str = "") -> list[str]:
    return [
        *("-fsdev", f"local,id={tag},path={escaped(path)},security_model=none{options}"),
        *("-device", f"virtio-9p-pci,bus=pcie.0,fsdev={tag},mount_tag={tag}"),
    ]


def drives(guest: Guest, scratch: Path) -> list[str]:
    """Create empty files for the drives of the guest with disks; return their QEMU arguments."""
    if guest.mode != "disks":
        return []
    images = [scratch / f"{serial}.img" for serial in DRIVES]
    for image in images:
        with image.open("wb") as file:
            file.truncate(DRIVE_MIB << 20)
    return drive_args(images)


def qemu_command(guest: Guest, control: Path, out: Path, console: Path) -> list[str]:
    return [
        # The kernel kills QEMU if this process is killed without a chance to clean up.
        *("setpriv", "--pdeathsig", "KILL", "--", str(TOOLS / "bin" / "qemu-system-x86_64")),
        *("-L", str(TOOLS / "share" / "qemu"), "-L", str(TOOLS / "share" / "seabios")),
        # Emulate even where KVM works, so that every machine has the same guest and results.
        *("-accel", "tcg,thread=multi,tb-size=1024"),
        *guest.qemu_args,
        *("-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"),
        *("-serial", f"file:{escaped(console)}"),
        *("-chardev", "stdio,id=output,signal=off"),
        *("-device", "virtio-serial-pci,bus=pcie.0", "-device", "virtconsole,chardev=output"),
        *("-device", "virtio-rng-pci,bus=pcie.0"),
        *shared_directory("hostroot", Path("/"), ",readonly=on,multidevs=remap"),
        *shared_directory("control", control),
        *shared_directory("output", out),
        *("-kernel", str(VM_DIR / "kernel" / "vmlinuz"), "-initrd", str(VM_DIR / "initramfs.gz")),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on"),
    ]


def run_qemu(command: list[str], seconds: float) -> int | None:
    """Print the guest's output until it stops; return QEMU's exit status, or None on a timeout."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "QEMU_MODULE_DIR": str(LIBRARIES / "qemu"),
    }
    # QEMU makes its stdout non-blocking, which would affect every process that shares it.
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as qemu:
        assert qemu.stdout is not None
        deadline = threading.Timer(seconds, qemu.kill)
        deadline.start()
        try:
            while output := os.read(qemu.stdout.fileno(), 65536):
                sys.stdout.buffer.write(output)
                sys.stdout.buffer.flush()
            status = qemu.wait()
            return status if deadline.is_alive() else None
        finally:
            deadline.cancel()
            qemu.kill()


def boot(command: list[str], seconds: float, control: Path) -> int | None:
    """Run the guest, and retry if QEMU crashes before the guest's command starts.

    With one thread per virtual CPU, QEMU 10 sometimes fails an assertion (in `iotlb_to_section`)
    while the guest initializes its devices. Once the command has started there is no retry: it
    could hide a failure, or repeat writes to the output directory.
    """
    for attempts_left in reversed(range(BOOT_ATTEMPTS)):
        status = run_qemu(command, seconds)
        crashed = status is not None and status < 0
        if not crashed or (control / "begun").exists():
            break
        print(f"vm: QEMU crashed during boot; {attempts_left} attempts left", file=sys.stderr)
    return status


def report_no_exit_code(reason: str, console: Path) -> None:
    lines = console.read_text(errors="replace").splitlines() if console.exists() else []
    shown = lines[-CONSOLE_LINES_SHOWN:] or ["(no output)"]
    print(
        f"vm: no exit code: {reason}; the last lines of its console:",
        *shown,
        sep="\n",
        file=sys.stderr,
    )


def run_in_guest(options: argparse.Namespace, guest: Guest, command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-vm-") as scratch_name:
        scratch = Path(scratch_name)
        control = scratch / "control"
        out = (options.out or scratch / "out").resolve()
        console = (options.console or scratch / "console.log").resolve()
        for directory in (control, out):
            directory.mkdir(parents=True, exist_ok=True)
        environment = guest_environment(guest.mode, out, options.env)
        (control / "command").write_text(command_script(environment, command))
        (control / "mode").write_text(guest.mode)
        (control / "output-dir").write_text(str(out))

        command_line = qemu_command(guest, control, out, console) + drives(guest, scratch)
        status = boot(command_line, options.timeout, control)

        answer = control / "exit-code"
        if answer.exists() and (exit_code := answer.read_text().strip()):
            return int(exit_code)
        reason = (
            f"not finished after {options.timeout:g} s" if status is None else "the guest crashed"
        )
        report_no_exit_code(reason, console)
        return NO_EXIT_CODE


def main() -> int:
    options, command = parse_command_line(sys.argv[1:])
    node_mib = (options.mem0, options.mem1, options.mem2)
    try:
        guest = Guest(mode=options.mode, num_cpus=options.smp, node_mib=node_mib)
    except ValueError as error:
        print(f"vm: {error}", file=sys.stderr)
        return 2
    setup = subprocess.run([HERE / "setup.sh"], check=False, stdout=sys.stderr)
    if setup.returncode:
        return NOT_AVAILABLE if setup.returncode == NOT_AVAILABLE else NO_EXIT_CODE
    return run_in_guest(options, guest, command)


if __name__ == "__main__":
    for deadly_signal in DEADLY_SIGNALS:
        signal.signal(deadly_signal, interrupt)
    try:
        sys.exit(main())
    except Interrupted as interrupted:
        # Exit by the same signal, so that a calling shell sees it and stops too.
        signal.signal(interrupted.args[0], signal.SIG_DFL)
        os.kill(os.getpid(), interrupted.args[0])
