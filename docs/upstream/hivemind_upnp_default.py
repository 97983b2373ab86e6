"""hivemind 1.1.12: a DHT asks the router for UPnP port mappings unless told not to.

    python hivemind_upnp_default.py

`P2P.create(nat_port_map=True)` is the default, also of a DHT that listens on the loopback address alone. The verdict is the
command line that the daemon `p2pd` was started with (Linux: read from /proc).
"""

import pathlib

import hivemind


def port_mapping(dht: hivemind.DHT) -> str:
    """The flag that the DHT's process gave its daemon."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it ended
            continue
        if int(parent) == dht.pid and words[0].endswith("p2pd"):
            return next(word for word in words if "natPortMap" in word)
    raise AssertionError("no p2pd found: no verdict")


def main() -> None:
    default, asked = hivemind.DHT(start=True), hivemind.DHT(start=True, nat_port_map=False)
    flag = port_mapping(default)
    print(f"at {default.get_visible_maddrs()[0]}")
    print(f"p2pd got {flag}; with nat_port_map=False it got {port_mapping(asked)}")
    asked.shutdown()
    default.shutdown()
    print("fault: present" if flag == "-natPortMap=1" else "fault: gone")


if __name__ == "__main__":
    main()
