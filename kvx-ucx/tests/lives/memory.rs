//! What peers take of this process's memory is given back when they are gone, killed in the midst of transfers.

use std::collections::BTreeSet;

use kvx_core::backend::{Event, Events, TransferBackend as _};
use kvx_core::id::{PeerId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_ucx::UcxBackend;

use crate::count::Left;
use crate::pair::{Way, alone, block, is_long, open_with, transfer, wait};
use crate::peer::Process;

/// What an allocator may keep besides: less than 64 KiB, the least of UCX's buffers over TCP, for each peer of the later rounds.
const SLACK: u64 = 1 << 20;

/// Bytes of this process's own, without what it shares with others.
fn own_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn peers_come_and_go(way: Way) {
    let (count, options) = (if is_long() { 60 } else { 6 }, way.options());
    let one = open_with(&options).unwrap();
    let memory = Region::host(1 << 20).unwrap();
    let local = one.register(&memory).unwrap();
    let alone = own_bytes();
    let (mut most, mut next) = ((0, 0), 0);
    for round in 0..5 {
        let mut peers = Vec::new();
        for _ in 0..count {
            let mut process = Process::start(&options);
            let (peer, remote) = process.meet(&one).unwrap();
            block(one.connect(peer)).unwrap();
            let segment =
                PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
            transfer(&one, peer, TransferId(next), Mode::Read, &[segment]);
            transfer(&one, peer, TransferId(next + 1), Mode::Write, &[segment]);
            next += 2;
            peers.push((process, peer, segment));
        }
        let connected = own_bytes();
        for at in 0..count * 8 {
            let (_, peer, segment) = &peers[at % count];
            let mode = if at % 3 == 0 { Mode::Write } else { Mode::Read };
            assert!(
                one.submit(TransferId(next), *peer, mode, &[*segment], None).unwrap().is_posted()
            );
            next += 1;
        }
        let gone: BTreeSet<PeerId> = peers.iter().map(|(_, peer, _)| *peer).collect();
        peers.iter_mut().for_each(|(process, ..)| process.kill());
        are_down(&one, gone);
        Left::at_rest();
        let left = own_bytes();
        eprintln!(
            "{count} peers over {way}: {alone} bytes before, {connected} with them, {left} without",
        );
        // What UCX keeps for the next is there after two rounds.
        if round < 2 {
            most = (connected, left);
        }
        let (with, without) = most;
        assert!(
            connected <= with + SLACK && left <= without + SLACK,
            "round {round}: {connected} bytes with {count} peers and {left} without, before {with} and {without}"
        );
    }
}

fn are_down(one: &UcxBackend, mut peers: BTreeSet<PeerId>) {
    let mut events = Events::with_limit(64);
    wait("all peers to be down", || {
        one.poll(&mut events);
        for event in events.drain() {
            if let Event::PeerDown { peer, .. } = event {
                peers.remove(&peer);
            }
        }
        peers.is_empty()
    });
}

pub(crate) fn peers_give_back_what_they_took_over_tcp() {
    alone("peers_give_back_what_they_took_over_tcp", &[], || peers_come_and_go(Way::Tcp));
}

/// With 1.13 beside TCP, and of no use.
pub(crate) fn peers_give_back_what_they_took_over_cma() {
    let variables = Way::Cma.variables();
    alone("peers_give_back_what_they_took_over_cma", variables, || peers_come_and_go(Way::Cma));
}
