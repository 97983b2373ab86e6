"""A network that can be cut: each peer in a network namespace of its own, and a router between them that drops packets.

Both directions are dropped in the middle, silently, so that neither side is told: no connection is reset, as when a cable
is pulled somewhere on the way. Needs root and Linux; nothing outside of the namespaces changes, and they go with `close`.
"""

import subprocess

__all__ = ["Network"]


class Network:
    """Namespaces `{name}-0` to `{name}-{size - 1}`, connected through a router.

    Raises:
        RuntimeError: the system does not let us.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._namespaces = [f"{name}-r"]
        try:
            self._run(f"netns add {name}-r")
            self._within("r", "sysctl -qw net.ipv4.ip_forward=1")
            for place in range(size):
                self._connect(place)
        except BaseException:
            self.close()
            raise

    def namespace(self, place: int) -> str:
        """Name of a peer's namespace."""
        return f"{self._name}-{place}"

    @staticmethod
    def host(place: int) -> str:
        """A peer's address."""
        return f"10.98.{place}.2"

    def cut(self, place: int) -> None:
        """Drops what comes from this peer and what goes to it."""
        host = self.host(place)
        # In one go: 30 ms with one direction open is enough to lose half of a conversation.
        rules = f"rule add to {host} blackhole pref 10\nrule add from {host} blackhole pref 11\n"
        self._within("r", "ip -batch -", rules)

    def heal(self) -> None:
        """Lets all packets through again."""
        self._within("r", "ip -batch -", "rule del pref 10\nrule del pref 11\n")

    def close(self) -> None:
        """Removes the namespaces; what lives in them keeps them until it ends."""
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    def _connect(self, place: int) -> None:
        peer, router = self.namespace(place), f"{self._name}-r"
        self._run(f"netns add {peer}")
        self._namespaces.append(peer)
        self._run(f"link add port{place} netns {router} type veth peer name eth0 netns {peer}")
        self._within("r", f"ip addr add 10.98.{place}.1/24 dev port{place}")
        self._within("r", f"ip link set port{place} up")
        for command in (
            f"ip addr add {self.host(place)}/24 dev eth0",
            "ip link set eth0 up",
            "ip link set lo up",
            f"ip route add default via 10.98.{place}.1",
        ):
            self._within(str(place), command)

    def _within(self, place: str, command: str, lines: str = "") -> None:
        self._run(f"netns exec {self._name}-{place} {command}", lines)

    def _run(self, command: str, lines: str = "") -> None:
        done = subprocess.run(["ip", *command.split()], input=lines, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {command}: {done.stderr.strip()} (a partition needs root)")
