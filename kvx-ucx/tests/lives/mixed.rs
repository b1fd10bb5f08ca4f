//! Two processes with different versions of UCX.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, SEVER_BOUND, Submit, TransferBackend as _};
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};

use crate::pair::{
    CMA_1_13, Way, alone, block, lasting_interface, open_with, skip, transfer, wait,
};
use crate::peer::Process;

const LIBRARY: &str = "KVX_UCX_LIB";
const SIZE: u64 = 1 << 20;

/// Libraries in the folders beside that of this process's.
fn others() -> Vec<PathBuf> {
    let Some(own) = std::env::var_os(LIBRARY).map(PathBuf::from) else { return Vec::new() };
    let own = if own.is_dir() { own } else { own.parent().unwrap().to_owned() };
    let beside = std::fs::read_dir(own.parent().unwrap()).unwrap().flatten();
    let beside = beside.map(|entry| entry.path());
    beside.filter(|path| *path != own && path.join("libucp.so.0").exists()).collect()
}

pub(crate) fn versions_that_differ_over_tcp() {
    differ("versions_that_differ_over_tcp", Way::Tcp);
}

pub(crate) fn versions_that_differ_over_cma() {
    differ("versions_that_differ_over_cma", Way::Cma);
}

fn differ(test: &str, way: Way) {
    let others = others();
    if others.is_empty() {
        return skip(format!("no other UCX lies beside the one that {LIBRARY} names"));
    }
    // Each version takes this from the environment.
    alone(test, &[CMA_1_13], || {
        for other in &others {
            meets(way, other.to_str().unwrap());
        }
    });
}

/// Two versions understand each other, or one refuses, and says which two they are.
fn meets(way: Way, other: &str) {
    let options = match way {
        Way::Cma => format!("tls=tcp+sm,devices={},require=cma", lasting_interface()),
        _ => way.options(),
    };
    let one = open_with(&options).unwrap();
    let memory = Region::host(SIZE).unwrap();
    let local = one.register(&memory).unwrap();
    let mut process = Process::start_with(&[(LIBRARY, other)], &options);
    let begin = Instant::now();
    let met = process.meet(&one).and_then(|met| block(one.connect(met.0)).map(|()| met));
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}: {met:?}");
    let (peer, remote) = match met {
        Ok(met) => met,
        Err(error) => {
            let text = error.to_string();
            let named = |whose: &str| {
                text.contains(&format!("{whose} has 1."))
                    || text.contains(&format!("{whose}'s UCX=1."))
            };
            assert!(named("this side") && named("the peer"), "{text}");
            assert!(error.remedy().is_some(), "{text}");
            return eprintln!("{way}, {other}: refused: {text}");
        }
    };
    eprintln!("{way}, {other}: {:?}", one.peer_info(peer).unwrap());
    let bytes: Vec<u8> = (0..SIZE).map(|at| (at % 251) as u8).collect();
    memory.write_at(0, &bytes).unwrap();
    let segment = |local_offset, remote_offset, bytes| PostedSegment {
        local,
        remote,
        local_offset,
        remote_offset,
        bytes,
    };
    // There, in two parts, and back from elsewhere.
    transfer(
        &one,
        peer,
        TransferId(1),
        Mode::Write,
        &[segment(0, 100, 1), segment(1, 101, SIZE / 2)],
    );
    memory.write_at(0, &vec![0; bytes.len()]).unwrap();
    transfer(
        &one,
        peer,
        TransferId(2),
        Mode::Read,
        &[segment(0, 107, 1), segment(1, 108, SIZE / 2 - 9)],
    );
    let mut seen = vec![0; bytes.len() / 2 - 8];
    memory.read_at(0, &mut seen).unwrap();
    assert!(seen[..] == bytes[7..][..seen.len()], "{other}: what came back is not what was sent");
    // A notification, which the peer acknowledges.
    let posted =
        one.submit(TransferId(3), peer, Mode::Write, &[segment(0, 0, 64)], Some(&[7; 1000]));
    assert_eq!(posted.unwrap(), Submit::Submitted);
    let mut events = Events::with_limit(8);
    wait("the notification to be taken", || {
        one.poll(&mut events);
        events.drain().any(|event| match event {
            Event::Settled { outcome: Outcome::Done { .. }, .. } => true,
            other => panic!("{other:?}"),
        })
    });
    // And its death.
    let begin = Instant::now();
    process.kill();
    wait("the peer to be down", || {
        one.poll(&mut events);
        events.drain().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    assert!(begin.elapsed() < SEVER_BOUND, "{other}: {:?}", begin.elapsed());
}
