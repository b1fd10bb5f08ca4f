//! Connections that fail, end, or meet another life of a peer, and the next one that does not.

use std::time::{Duration, Instant};

use kvx_core::ErrorKind;
use kvx_core::backend::{Event, Events, SEVER_BOUND, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_ucx::UcxBackend;

use crate::pair::{alone, block, is_1_13, lasting_interface, open_with, times, transfer, wait};
use crate::peer::Process;

/// Waits until a peer is down.
fn is_down(one: &UcxBackend, peer: PeerId) {
    let mut events = Events::with_limit(8);
    wait("a peer to be down", || {
        one.poll(&mut events);
        events
            .drain()
            .any(|event| matches!(event, Event::PeerDown { peer: whose, .. } if whose == peer))
    });
}

/// Known failure 71: one failure while two connected for the first time, and they never did again.
pub(crate) fn a_first_connection_that_fails_is_not_the_last() {
    alone("a_first_connection_that_fails_is_not_the_last", &[], || {
        let options = format!("tls=tcp,devices={},connect_ms=300", lasting_interface());
        let one = open_with(&options).unwrap();
        let memory = Region::host(4096).unwrap();
        let local = one.register(&memory).unwrap();
        let mut process = Process::start(&options);
        // It stands still before it can answer.
        let reply = process.ask(&one).unwrap();
        process.stop();
        let begin = Instant::now();
        let (peer, completion) = one.complete(&reply).unwrap();
        let error = block(one.connect(peer)).unwrap_err();
        let took = begin.elapsed();
        assert_eq!(error.kind(), ErrorKind::Peer, "{error}");
        assert!(error.to_string().contains("in time"), "{error}");
        assert!((300..1500).contains(&took.as_millis()), "{took:?}: {error}");
        is_down(&one, peer);
        process.resume();
        process.tell(&completion);
        // Whether it finds out that this one is over, or thinks that it is not, is its own business.
        let _ = process.finished();
        let mut pause = Duration::from_millis(10);
        let begin = Instant::now();
        let (peer, remote) = loop {
            let met = process.meet(&one).and_then(|met| block(one.connect(met.0)).map(|()| met));
            match met {
                Ok(met) => break met,
                Err(error) => assert!(begin.elapsed() < Duration::from_secs(5), "{error}"),
            }
            std::thread::sleep(pause);
            pause *= 2;
        };
        // Attempts that failed are over.
        let mut events = Events::with_limit(8);
        one.poll(&mut events);
        for event in events.drain() {
            assert!(
                matches!(event, Event::PeerDown { peer: whose, .. } if whose != peer),
                "{event:?}"
            );
        }
        let segment =
            PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 4096 };
        for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
            transfer(&one, peer, TransferId(id), mode, &[segment]);
        }
    });
}

/// Known failure 69: a peer that is killed and started again at the same address, and what is kept of its first life.
pub(crate) fn a_peer_that_starts_again_at_its_address_is_met() {
    // Of a range that is handed out to nobody, mostly.
    let port = 20_000 + std::process::id() % 10_000;
    // UCX 1.13 takes it from the environment only. It listens at the first that is free, and looks for that without pause: the system keeps
    // ports of those that were killed for a minute.
    let range = format!("{port}-{}", u64::from(port) + 8 + times(10));
    alone("a_peer_that_starts_again_at_its_address_is_met", &[], || {
        let options = format!("tls=tcp,devices={}", lasting_interface());
        let one = open_with(&options).unwrap();
        let memory = Region::host(4096).unwrap();
        let local = one.register(&memory).unwrap();
        let count = times(10);
        for round in 0..count {
            let mut process = Process::start_with(&[("UCX_TCP_PORT_RANGE", &range)], &options);
            // The first life may be found to be over a little later.
            let (peer, remote) = process.meet(&one).unwrap();
            block(one.connect(peer)).unwrap();
            if is_1_13() {
                std::thread::sleep(Duration::from_millis(5));
            }
            let segment =
                PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 4096 };
            for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
                transfer(&one, peer, TransferId(round * 4 + id), mode, &[segment]);
            }
            let begin = Instant::now();
            process.kill();
            is_down(&one, peer);
            assert!(begin.elapsed() < SEVER_BOUND, "round {round}: {:?}", begin.elapsed());
        }
    });
}
