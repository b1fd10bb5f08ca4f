#!/usr/bin/env python3
"""NIXL's notifications there and back between two processes, to hold beside what `kvx bench` says of its own.

    nixl/bin/python benches/peers/nixl_notify.py --busy 2

NIXL has no descriptor to sleep on, so both sides look for notifications: every `--nap` microseconds, or, with 0, without pause.
`--busy N` has so many processes copy memory meanwhile. `--progress-thread no` is NIXL without its progress thread. Prints the median
and the 99th of a hundred, in microseconds. UCX_TLS and the like work as usual.
"""
import argparse
import os
import time
from multiprocessing import Pipe, Process


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10, help="at most")
    parser.add_argument("--nap", type=float, default=50)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--progress-thread", choices=["yes", "no"], default="yes")
    return parser.parse_args()


def copy():
    import numpy as np

    one, other = np.ones(8 << 20), np.zeros(8 << 20)
    while True:
        np.copyto(other, one)


class Agent:
    def __init__(self, name, options):
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl._api import nixl_agent, nixl_agent_config

        self.nap = options.nap * 1e-6
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=options.progress_thread == "yes"))

    def meet(self, metadata):
        peer = self.agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        self.agent.make_connection(self.peer)

    def heard(self, until):
        while time.perf_counter() < until:
            if any(self.agent.get_new_notifs().values()):
                return True
            if self.nap:
                time.sleep(self.nap)
        return False


def echo(pipe, options):
    own = Agent("echo", options)
    pipe.send(own.agent.get_agent_metadata())
    own.meet(pipe.recv())
    pipe.send("ready")
    while own.heard(time.perf_counter() + 30):
        own.agent.send_notif(own.peer, b"pong")


def main():
    options = arguments()
    here, there = Pipe()
    other = Process(target=echo, args=(there, options), daemon=True)
    other.start()
    own = Agent("ping", options)
    own.meet(here.recv())
    here.send(own.agent.get_agent_metadata())
    here.recv()
    load = [Process(target=copy, daemon=True) for _ in range(options.busy)]
    for process in load:
        process.start()
    time.sleep(1 if load else 0)
    times, end = [], time.perf_counter() + options.seconds
    while len(times) < options.times and time.perf_counter() < end:
        begun = time.perf_counter()
        own.agent.send_notif(own.peer, b"ping")
        if not own.heard(begun + 20):
            raise SystemExit("a notification was lost")
        times.append((time.perf_counter() - begun) * 1e6)
    times.sort()
    print(f"{times[len(times) // 2]:.0f} us (p99 {times[len(times) * 99 // 100]:.0f} us), {len(times)} times")
    for process in [*load, other]:
        process.kill()


if __name__ == "__main__":
    main()
