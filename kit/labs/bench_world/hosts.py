"""A second host on this machine: a network namespace behind a cable that can be cut. It needs root."""

from __future__ import annotations

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


class SecondHost:
    """`near` and `far` are the ends of the cable, here and there."""

    def __init__(self) -> None:
        if os.getuid() or IP is None:
            raise KitError("network namespaces need root and the command ip")
        self.name = f"kit{os.getpid()}"
        self.near, self.far = f"{self.name}a", f"{self.name}b"
        network = f"10.99.{os.getpid() % 256}"
        self.address, self.far_address = f"{network}.1", f"{network}.2"
        run_ip("netns", "add", self.name)
        run_ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
        for device, address, inside in (
            (self.near, self.address, ()),
            (self.far, self.far_address, ("-n", self.name)),
        ):
            run_ip(*inside, "address", "add", f"{address}/30", "dev", device)
            run_ip(*inside, "link", "set", device, "up")
        run_ip("-n", self.name, "link", "set", "lo", "up")
        self.prefix = ["ip", "netns", "exec", self.name]

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
        run_ip("link", "delete", self.near)  # a namespace ends only after its last process
        run_ip("netns", "delete", self.name)
