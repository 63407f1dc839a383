"""A second host on this machine: a network namespace behind a cable that can be cut. It needs root."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess

from kit.errors import KitError

IP = shutil.which("ip")


def run_ip(*words: str) -> str:
    try:
        return subprocess.run([str(IP), *words], check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise KitError(f"this container cannot make network namespaces: {error.stderr.strip()}") from error


def delete(kind: str, name: str) -> None:
    """`ip` itself says what it could not delete: an error here would hide the one that led here, and leave out what is deleted next."""
    subprocess.run([str(IP), kind, "delete", name], check=False)


def free_network() -> str:
    """The first three numbers of a network to which this machine has no route."""
    for number in range(os.getpid(), os.getpid() + 256):
        network = f"10.99.{number % 256}"
        if not run_ip("-4", "route", "show", "to", "root", f"{network}.0/24").strip():
            return network
    raise KitError("this machine has routes to each of the networks 10.99.0 to 10.99.255")


class SecondHost:
    """`near` and `far` are the ends of the cable, here and there."""

    def __init__(self) -> None:
        if os.getuid() or IP is None:
            raise KitError("network namespaces need root and the command ip")
        self.name = f"kit{os.getpid()}"
        self.near, self.far = f"{self.name}a", f"{self.name}b"
        network = free_network()
        self.address, self.far_address = f"{network}.1", f"{network}.2"
        self.prefix = ["ip", "netns", "exec", self.name]
        with contextlib.ExitStack() as added:
            run_ip("netns", "add", self.name)
            added.callback(delete, "netns", self.name)
            run_ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
            added.callback(delete, "link", self.near)  # before its namespace, which ends only after its last process
            for device, address, inside in (
                (self.near, self.address, ()),
                (self.far, self.far_address, ("-n", self.name)),
            ):
                run_ip(*inside, "address", "add", f"{address}/30", "dev", device)
                run_ip(*inside, "link", "set", device, "up")
            run_ip("-n", self.name, "link", "set", "lo", "up")
            self._added = added.pop_all()

    def free_endpoint(self) -> str:
        with socket.socket() as sock:
            sock.bind((self.address, 0))
            return f"{self.address}:{sock.getsockname()[1]}"

    @property
    def launch(self) -> str:
        return f"{shlex.join(self.prefix)} env GLOO_SOCKET_IFNAME={self.far} sh -c {{command}}"

    def pids(self) -> list[int]:
        """Of the processes over there."""
        return [int(pid) for pid in run_ip("netns", "pids", self.name).split()]

    def cut(self) -> None:
        run_ip("link", "set", self.near, "down")

    def mend(self) -> None:
        run_ip("link", "set", self.near, "up")

    def remove(self) -> None:
        self._added.close()
