//! Whoever reads or writes dies, stands still or is cut off in the midst of it: whoever's memory it is lives on, and serves others.
//!
//! UCX by itself carries out such reads and writes over TCP in the owner's process, and ends that process where it cannot send an
//! answer.

use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, SEVER_BOUND, TransferBackend as _};
use kvx_core::id::{PeerId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_ucx::UcxBackend;

use crate::count::Left;
use crate::network::{Family, Namespace, ip};
use crate::pair::{Dice, Way, alone, is_long, open_with, skip, times, transfer};
use crate::peer::Process;

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Killed while the owner goes on.
    Killed,
    /// Killed while the owner stands still: it finds all that was asked of it once nobody is there to be answered.
    KilledUnseen,
}

fn many_ends(way: Way, mode: Mode, end: End) {
    let count = times(10);
    let mut dice = Dice::new(&format!("{mode:?} over {way}, {end:?}"));
    let options = way.options();
    let mut owner = Process::start(&options);
    let one = open_with(&options).unwrap();
    let memory = Region::host(1 << 20).unwrap();
    let local = one.register(&memory).unwrap();
    let (peer, remote) = owner.meet(&one).unwrap();
    let segment =
        PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
    for round in 0..count {
        let mut actor = Process::start_at(&mut owner, mode, &options);
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
        if end == End::KilledUnseen {
            owner.stop();
            std::thread::sleep(Duration::from_millis(5));
        }
        actor.kill();
        if end == End::KilledUnseen {
            std::thread::sleep(Duration::from_millis(5));
            owner.resume();
        }
        std::thread::sleep(Duration::from_millis(20));
        lives(&mut owner, &format!("round {round}"));
        for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
            transfer(&one, peer, TransferId(round << 2 | id), mode, &[segment]);
        }
    }
}

fn lives(owner: &mut Process, when: &str) {
    let ended = owner.ended();
    assert!(ended.is_none(), "{when}: the owner has ended, too: {ended:?}");
}

/// This process is the owner, and ends the connection to one that stands still, or was killed.
fn severed(way: Way, mode: Mode) {
    let count = times(10);
    let options = way.options();
    let one = open_with(&options).unwrap();
    let memory = Region::host(1 << 20).unwrap();
    let blob = one.key_blob(one.register(&memory).unwrap()).unwrap();
    let mut dice = Dice::new(&format!("{mode:?} over {way}, severed"));
    let mut before = None;
    for round in 0..count {
        // What UCX keeps is there after some.
        if round == count / 2 {
            before = Some(Left::at_rest());
        }
        let (mut actor, peer) = Process::start_at_this(&one, &blob, mode, &options);
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
        actor.stop();
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
        let begin = Instant::now();
        one.sever(peer).unwrap();
        is_down(&one, peer);
        assert!(begin.elapsed() < SEVER_BOUND, "round {round}: {:?}", begin.elapsed());
        let bytes: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        memory.write_at(0, &bytes).unwrap();
        // Whatever it still sends, or asks for, is of no connection any more.
        actor.resume();
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
        one.poll(&mut Events::with_limit(8));
        if mode == Mode::Write && is_answerable(way) {
            let mut seen = vec![0; 1 << 20];
            memory.read_at(0, &mut seen).unwrap();
            assert!(seen == bytes, "round {round}: it still writes");
        }
        actor.kill();
    }
    before.unwrap().is_all_that_is_left(&format!("{count} peers that were severed"));
}

/// Whether nothing is written without this side's backend: so it is where UCX has no writes of TCP.
fn is_answerable(way: Way) -> bool {
    way == Way::Tcp && crate::pair::is_1_13()
}

fn is_down(one: &UcxBackend, peer: PeerId) {
    let mut events = Events::with_limit(8);
    crate::pair::wait("a peer to be down", || {
        one.poll(&mut events);
        let is_down = |event| matches!(event, Event::PeerDown { peer: whose, .. } if whose == peer);
        events.drain().any(is_down)
    });
}

/// The link between the two is cut in the midst of it: for so long that TCP gives up, with `KVX_LONG=1`; or else the other dies
/// meanwhile.
fn cut(mode: Mode) {
    // UCX 1.20 and later may find no route over a new link, and do not look again.
    for _ in 0..8 {
        let namespace = match Namespace::new(Family::Four, 1) {
            Ok(namespace) => namespace,
            Err(reason) => return skip(format!("network namespaces cannot be had: {reason}")),
        };
        if cut_in(&namespace, mode) {
            return;
        }
    }
    panic!("the two do not connect");
}

/// Whether the two connected in the first place.
fn cut_in(namespace: &Namespace, mode: Mode) -> bool {
    let link = &namespace.links[0];
    let options = |device: &str| format!("tls=tcp,devices={device}");
    let mut owner = Process::start(&options(&link.outside));
    let mut start = || {
        let inside = options(&link.inside);
        Process::start_at_from(&namespace.name, &mut owner, mode, &inside)
    };
    let Some(mut actor) = start() else { return false };
    std::thread::sleep(Duration::from_millis(20));
    ip(&format!("link set {} down", link.outside)).unwrap();
    if is_long() {
        std::thread::sleep(Duration::from_secs(40));
    } else {
        std::thread::sleep(Duration::from_millis(500));
        actor.kill();
    }
    ip(&format!("link set {} up", link.outside)).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(start().is_some(), "another is served after the link was cut");
    std::thread::sleep(Duration::from_millis(20));
    lives(&mut owner, "after the link was cut");
    true
}

macro_rules! ends {
    ($($name:ident: $act:expr,)*) => {$(
        pub(crate) fn $name() {
            // UCX 1.13 takes it from the environment only.
            alone(stringify!($name), &[("UCX_TCP_AF_PRIO", "inet")], || $act);
        }
    )*};
}

ends! {
    owners_outlive_readers: many_ends(Way::Tcp, Mode::Read, End::Killed),
    owners_outlive_writers: many_ends(Way::Tcp, Mode::Write, End::Killed),
    stopped_owners_outlive_readers: many_ends(Way::Tcp, Mode::Read, End::KilledUnseen),
    stopped_owners_outlive_writers: many_ends(Way::Tcp, Mode::Write, End::KilledUnseen),
    owners_outlive_a_cut_from_readers: cut(Mode::Read),
    owners_outlive_a_cut_from_writers: cut(Mode::Write),
    owners_sever_readers: severed(Way::Tcp, Mode::Read),
    owners_sever_writers: severed(Way::Tcp, Mode::Write),
}
