//! Severing a peer.

use kvx_core::ErrorKind;
use kvx_core::backend::SEVER_BOUND;
use kvx_core::transfer::Mode;

use super::Group;
use super::handshake::greet;
use crate::suite::clause::{Clause, Point, Verdict, ensure, notes, refused, writes};
use crate::suite::lane::Lane;
use crate::suite::world::{Pair, World};

pub(crate) const GROUP: Group = Group {
    title: "Severing",
    about: "Ends this side's transfers to a peer, and the connection, within a bound.",
    clauses: &[
        Clause::new(
            "sever.settles",
            Point::Severed,
            "All transfers to a severed peer settle within the bound, each once; then the peer is down, without an error.",
            &["sever_never_settles", "peer_down_missing"],
            settles,
        )
        .needs(&[writes]),
        Clause::new(
            "sever.peer_down_last",
            Point::PeerDown,
            "Peer down comes once, after the last of that peer's transfers settled, and nothing of the peer comes after it.",
            &["peer_down_before_a_settled", "peer_down_twice"],
            settles,
        )
        .needs(&[writes]),
        Clause::new(
            "sever.quiet",
            Point::Severed,
            "Once the transfers to a severed peer settled, this side's memory is quiet: no read writes it any more, and what is put \
             there afterwards is not sent.",
            &["severed_but_still_writing"],
            quiet,
        )
        .needs(&[writes]),
        Clause::new(
            "sever.idle",
            Point::PeerDown,
            "A peer with nothing in flight is down within the bound, too.",
            &["peer_down_missing"],
            idle,
        )
        .needs(&[notes]),
        Clause::new(
            "sever.stale",
            Point::Stale,
            "A severed peer is refused from that call on; once it is down its handle is stale: misuse, whatever is asked.",
            &["stale_peer_accepted"],
            stale,
        )
        .needs(&[writes]),
        Clause::new(
            "sever.others_unharmed",
            Point::Severed,
            "Transfers to and from other peers are done, and exact.",
            &["sever_takes_all"],
            others_unharmed,
        )
        .needs(&[writes, notes]),
    ],
};

/// Posts writes, each to a place of its own, as many as there is room for, up to `most`.
pub(super) fn volley(world: &World, lane: &Lane, most: u64) -> Verdict<Vec<u64>> {
    volley_of(world, lane, Mode::Write, most)
}

/// As [`volley`], in either mode.
pub(super) fn volley_of(world: &World, lane: &Lane, mode: Mode, most: u64) -> Verdict<Vec<u64>> {
    let pair = &lane.pair;
    let mut ids = Vec::new();
    for index in 0..most {
        let segments = [lane.segment(index * 48, index * 48, 40)];
        let id = world.id();
        if !pair.one.submit(id, pair.at_one, mode, &segments, None)? {
            break;
        }
        ids.push(id);
    }
    Ok(ids)
}

/// The initiator's memory is quiet, now that its transfers settled: what it is filled with stays, and is not sent.
pub(super) fn is_quiet(world: &World, lane: &mut Lane, when: &str) -> Verdict {
    lane.local.refill(world.dice().next())?;
    world.settle_down(&[&lane.pair.one, &lane.pair.other])?;
    is_unsent(lane, when)
}

/// The initiator's memory holds what it was filled with last, and nothing of that is in the peer's.
pub(super) fn is_unsent(lane: &Lane, when: &str) -> Verdict {
    lane.local.check(when)?;
    let bytes = lane.local.bytes;
    let (theirs, mine) = (lane.remote.read(0, bytes)?, lane.local.expected(0, bytes));
    let sent = theirs.chunks(8).zip(mine.chunks(8)).position(|(theirs, mine)| theirs == mine);
    ensure!(
        sent.is_none(),
        "{when}: what was put into this side's memory since was sent, at byte {}",
        sent.unwrap_or_default() * 8
    );
    Ok(())
}

/// Polls a few times, so that faults come at different moments.
pub(super) fn a_while(world: &World, pair: &Pair) -> Verdict {
    for _ in 0..world.dice().below(4) {
        pair.one.poll(4)?;
    }
    Ok(())
}

fn settles(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let other = world.open("other")?;
    for _ in 0..4 {
        let pair = world.meet(&one, &other)?;
        let lane = world.lane(&pair, 2048)?;
        let ids = volley(world, &lane, 40)?;
        a_while(world, &pair)?;
        one.sever(pair.at_one)?;
        world.severed(&one, pair.at_one)?;
        ensure!(ids.iter().all(|id| one.settled(*id).is_some()), "a transfer did not settle");
        let error = one.down(pair.at_one).flatten();
        ensure!(
            error.is_none(),
            "this side severed the peer, yet it is down with an error: {}",
            error.map(|error| error.text).unwrap_or_default()
        );
        world.settle_down(&[&one, &other])?;
        if other.down(pair.at_other).is_none() {
            other.sever(pair.at_other)?;
            world.severed(&other, pair.at_other)?;
        }
    }
    Ok(())
}

fn quiet(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let other = world.open("other")?;
    for round in 0..4 {
        let pair = world.meet(&one, &other)?;
        let mut lane = world.lane(&pair, 2048)?;
        let modes = super::shapes::modes(&lane)?;
        volley_of(world, &lane, modes[round % modes.len()], 40)?;
        a_while(world, &pair)?;
        one.sever(pair.at_one)?;
        let left = || Ok(one.in_flight_to(pair.at_one).is_empty());
        world.wait_within(SEVER_BOUND, &[&one], "all transfers to settle", left)?;
        is_quiet(world, &mut lane, "some time after all transfers to a severed peer settled")?;
        if other.down(pair.at_other).is_none() {
            other.sever(pair.at_other)?;
            world.severed(&other, pair.at_other)?;
        }
    }
    Ok(())
}

fn idle(world: &World) -> Verdict {
    let pair = world.pair()?;
    greet(world, &pair)?;
    pair.one.sever(pair.at_one)?;
    world.severed(&pair.one, pair.at_one)
}

fn stale(world: &World) -> Verdict {
    let pair = world.pair()?;
    let (one, peer) = (&pair.one, pair.at_one);
    let lane = world.lane(&pair, 2048)?;
    volley(world, &lane, 8)?;
    let blob = pair.other.key_blob(lane.remote.region)?;
    one.sever(peer)?;
    let post = || one.submit(world.id(), peer, Mode::Write, &[lane.segment(0, 0, 8)], None);
    refused("a write to a severed peer", post(), &[ErrorKind::Peer, ErrorKind::Misuse])?;
    world.severed(one, peer)?;
    let misuse = &[ErrorKind::Misuse];
    for _ in 0..2 {
        refused("a write to a peer that is down", post(), misuse)?;
        refused("severing a peer that is down", one.sever(peer), misuse)?;
        refused("asking about a peer that is down", one.peer_info(peer), misuse)?;
        refused("importing a key of a peer that is down", one.import_key(peer, &blob), misuse)?;
        refused("releasing a key of a peer that is down", one.release_key(peer, lane.key), misuse)?;
        refused("connecting to a peer that is down", one.connect(peer), misuse)?;
        // Once more, with the slot given out to another.
        world.meet(one, &world.open("third")?)?;
    }
    Ok(())
}

fn others_unharmed(world: &World) -> Verdict {
    let first = world.pair()?;
    let second = world.meet(&first.one, &world.open("third")?)?;
    let victim = world.lane(&first, 2048)?;
    let mut lane = world.lane(&second, 2048)?;
    let mut back = world.lane(&second.flipped(), 2048)?;
    volley(world, &victim, 20)?;
    let ids = volley(world, &lane, 20)?;
    let back_ids = volley(world, &back, 20)?;
    a_while(world, &first)?;
    first.one.sever(first.at_one)?;
    world.done(&second.one, &ids)?;
    world.done(&second.other, &back_ids)?;
    for (lane, count) in [(&mut lane, ids.len()), (&mut back, back_ids.len())] {
        let moved: Vec<_> = (0..count as u64).map(|i| lane.segment(i * 48, i * 48, 40)).collect();
        lane.apply(Mode::Write, &moved);
        lane.check("of a peer beside a severed one")?;
    }
    world.severed(&first.one, first.at_one)?;
    greet(world, &second)
}
