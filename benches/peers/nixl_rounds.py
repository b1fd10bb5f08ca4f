#!/usr/bin/env python3
"""NIXL on the same work as `kvx bench`, one round per line of input: for `kvx bench --peer-command`.

    python3 -m venv nixl && nixl/bin/pip install nixl numpy
    kvx bench --tokens 2048 --peer-command 'nixl/bin/python benches/peers/nixl_rounds.py --tokens 2048 --blocks permuted'

Two processes, as of two engines on one host. Each has `--regions` regions; a request moves `--tokens` tokens,
which are `--block-bytes` bytes per `--block-tokens` tokens and region. With `--run-bytes` and `--heads` each block is moved in
runs, from one order of heads and tokens to the other, as between two layouts of attention. Each round makes a prepared
transfer over descriptor lists that were made before, posts it, waits, and lets go of it, which is what a connector does per
request. The first and the last word of every run are checked in every round.

`--progress-thread no` is NIXL without its progress thread; `--threads` its number of workers. With `--cpu FILE` the processor
time of both processes, in seconds, and the number of rounds are kept in that file. UCX_TLS and the like work as usual.
"""
import argparse
import mmap
import os
import sys
import time
from multiprocessing import Pipe, Process

import numpy as np


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["read", "write"], default="read")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", choices=["contiguous", "permuted"], default="permuted")
    parser.add_argument("--regions", type=int, default=64, help="default: Llama-3.1-8B, keys and values of 32 layers")
    parser.add_argument("--block-bytes", type=int, default=32768)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--memory", choices=["shared", "heap"], default="shared", help="which pages back the caches")
    parser.add_argument("--run-bytes", type=int, default=0, help="0: whole blocks")
    parser.add_argument("--heads", type=int, default=8, help="with --run-bytes: runs per token")
    parser.add_argument("--progress-thread", choices=["yes", "no"], default="yes")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu", metavar="FILE")
    return parser.parse_args()


class Cache:
    """The regions of one engine, side by side, and its NIXL agent."""

    def __init__(self, name, options):
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl._api import nixl_agent, nixl_agent_config

        self.options = options
        self.blocks = options.tokens // options.block_tokens
        self.region_bytes = self.blocks * options.block_bytes
        size = options.regions * self.region_bytes
        if options.memory == "shared":
            pages = os.memfd_create(name)
            os.ftruncate(pages, size)
            self.map = mmap.mmap(pages, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self.map = mmap.mmap(-1, size, flags)
        self.words = np.frombuffer(self.map, dtype=np.uint64)
        self.base = self.words.ctypes.data
        config = nixl_agent_config(
            enable_prog_thread=options.progress_thread == "yes", num_threads=options.threads
        )
        self.agent = nixl_agent(name, config)
        bases = range(self.base, self.base + size, self.region_bytes)
        self.registered = self.agent.register_memory([(b, self.region_bytes, 0, "") for b in bases], "DRAM")

    def runs(self, side):
        """Offsets of all runs, in the order in which they are moved, and their length."""
        o = self.options
        order = np.arange(self.blocks, dtype=np.uint64)
        if o.blocks == "permuted":
            order = np.random.default_rng(side + 1).permutation(order)
        starts = np.arange(o.regions, dtype=np.uint64)[:, None] * np.uint64(self.region_bytes)
        starts = (starts + order[None, :] * np.uint64(o.block_bytes)).reshape(-1)
        if not o.run_bytes:
            return starts, o.block_bytes
        inside = np.arange(o.block_bytes // o.run_bytes, dtype=np.uint64).reshape(-1, o.heads)
        inside = (inside if side else inside.reshape(o.heads, -1).T).reshape(-1) * np.uint64(o.run_bytes)
        return (starts[:, None] + inside[None, :]).reshape(-1), o.run_bytes

    def descriptors(self, base, side):
        starts, length = self.runs(side)
        table = np.zeros((len(starts), 3), dtype=np.uint64)
        table[:, 0] = starts + np.uint64(base)
        table[:, 1] = length
        return table


def target(pipe, options):
    cache = Cache("target", options)
    cache.words[:] = np.arange(len(cache.words), dtype=np.uint64)
    pipe.send((cache.agent.get_agent_metadata(), cache.base))
    while True:
        # Without a progress thread a target makes progress only here, and some transfers need it.
        while options.progress_thread == "no" and not pipe.poll(0.001):
            cache.agent.get_new_notifs()
        if pipe.recv() != "time":
            return
        cache.agent.get_new_notifs()
        pipe.send(time.process_time())


def main():
    options = arguments()
    here, there = Pipe()
    other = Process(target=target, args=(there, options), daemon=True)
    other.start()
    cache = Cache("initiator", options)
    metadata, base = here.recv()
    peer = cache.agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    producer, consumer = (1, 0) if options.mode == "read" else (0, 1)
    remote_side, local_side = producer, consumer
    local = cache.agent.prep_xfer_dlist("NIXL_INIT_AGENT", cache.descriptors(cache.base, local_side), "DRAM")
    remote = cache.agent.prep_xfer_dlist(peer, cache.descriptors(base, remote_side), "DRAM")
    cache.agent.make_connection(peer)
    starts, length = cache.runs(local_side)
    from_starts, _ = cache.runs(remote_side)
    indices = np.arange(len(starts), dtype=np.int32)
    total = len(starts) * length
    rounds, spent = 0, 0.0
    here.send("time")
    before = here.recv()
    for _ in sys.stdin:
        cpu = time.process_time()
        begun = time.perf_counter()
        handle = cache.agent.make_prepped_xfer(options.mode.upper(), local, indices, remote, indices, b"done")
        state = cache.agent.transfer(handle)
        while state == "PROC":
            time.sleep(50e-6)
            state = cache.agent.check_xfer_state(handle)
        took = time.perf_counter() - begun
        cache.agent.release_xfer_handle(handle)
        spent += time.process_time() - cpu
        if state != "DONE":
            sys.exit(f"the transfer ended as {state}")
        rounds += 1
        if options.mode == "read":
            for word in (0, length - 8):
                at, came = (starts + np.uint64(word)) // 8, (from_starts + np.uint64(word)) // 8
                if not np.array_equal(cache.words[at], came):
                    sys.exit("bytes are wrong")
                cache.words[at] = 0
        if options.cpu:
            here.send("time")
            with open(options.cpu, "w") as file:
                print(spent, here.recv() - before, rounds, total, file=file)
        print(total / took / 1e9, flush=True)
    here.send("end")


if __name__ == "__main__":
    main()
