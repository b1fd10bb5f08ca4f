//! Meeting again: after a connection ended, and after the peer was born again.

use kvx_core::ErrorKind;
use kvx_core::id::PeerId;
use kvx_core::transfer::Mode;

use super::Group;
use super::handshake::greet;
use super::shapes::modes;
use crate::suite::clause::{Clause, Point, Verdict, ensure, notes, refused};
use crate::suite::world::{Pair, World};

pub(crate) const GROUP: Group = Group {
    title: "Meeting again",
    about: "After a connection ended, and after the peer was born again.",
    clauses: &[
        Clause::new(
            "meet.reconnect",
            Point::Handshake,
            "After a connection ended, a new handshake gives a new one, with new handles; the old ones stay stale.",
            &["old_peer_handle_given_again"],
            reconnect,
        )
        .needs(&[notes]),
        Clause::new(
            "meet.new_incarnation",
            Point::Handshake,
            "A peer that is opened again is another incarnation and another peer: nothing of the old one is taken for its own.",
            &["incarnations_confused"],
            new_incarnation,
        )
        .needs(&[notes]),
        Clause::new(
            "meet.unknown",
            Point::Stale,
            "A peer that was never met is refused as misuse, whatever is asked of it.",
            &["unknown_peer_severed", "connect_to_nobody"],
            unknown,
        ),
    ],
};

/// Ends a connection from the one side, and at the other, too.
pub(super) fn part(world: &World, pair: &Pair) -> Verdict {
    pair.one.sever(pair.at_one)?;
    world.severed(&pair.one, pair.at_one)?;
    world.settle_down(&[&pair.other])?;
    if pair.other.down(pair.at_other).is_none() {
        pair.other.sever(pair.at_other)?;
        world.severed(&pair.other, pair.at_other)?;
    }
    Ok(())
}

fn reconnect(world: &World) -> Verdict {
    let mut pair = world.pair()?;
    for round in 0..3 {
        greet(world, &pair)?;
        part(world, &pair)?;
        let again = world.meet(&pair.one, &pair.other)?;
        ensure!(
            again.at_one != pair.at_one && again.at_other != pair.at_other,
            "round {round}: a handle of the connection before was given out again"
        );
        let stale = again.one.sever(pair.at_one);
        refused("severing the connection before", stale, &[ErrorKind::Misuse])?;
        greet(world, &again)?;
        let mut lane = world.lane(&again, 128)?;
        for mode in modes(&lane)? {
            let segment = lane.segment(1, 2, 60);
            world.transfer(&mut lane, mode, &[segment], None)?;
        }
        lane.check("over the new connection")?;
        pair = again;
    }
    Ok(())
}

fn new_incarnation(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let first = world.meet(&one, &world.open("other")?)?;
    let old = world.lane(&first, 128)?;
    let before = first.other.incarnation()?;
    greet(world, &first)?;
    first.other.close()?;
    first.other.drop_backend()?;
    let second = world.meet(&one, &world.open("other")?)?;
    ensure!(before != second.other.incarnation()?, "two lives have one incarnation");
    ensure!(
        second.at_one != first.at_one,
        "two lives of a peer have one handle, {}",
        second.at_one
    );
    greet(world, &second)?;
    let mut lane = world.lane(&second, 128)?;
    for mode in modes(&lane)? {
        let segment = lane.segment(1, 2, 60);
        world.transfer(&mut lane, mode, &[segment], None)?;
        // The old life's key names nothing of the new one.
        let mut stale = lane.segment(0, 0, 16);
        stale.remote = old.key;
        let post = one.submit(world.id(), second.at_one, mode, &[stale], None);
        refused(&format!("a {mode} by a key of the life before"), post, &[ErrorKind::Misuse])?;
    }
    if one.down(first.at_one).is_none() {
        one.sever(first.at_one)?;
        world.severed(&one, first.at_one)?;
    }
    greet(world, &second)?;
    lane.check("over the connection to the new life")
}

fn unknown(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    for peer in [PeerId::new(0, 0), PeerId::new(9, 9), PeerId::new(u32::MAX, u32::MAX)] {
        let misuse = &[ErrorKind::Misuse];
        refused("severing an unknown peer", one.sever(peer), misuse)?;
        refused("connecting to an unknown peer", one.connect(peer), misuse)?;
        refused("asking about an unknown peer", one.peer_info(peer), misuse)?;
        let post = one.submit(world.id(), peer, Mode::Write, &[], Some(&[]));
        refused("a notification to an unknown peer", post, misuse)?;
    }
    Ok(())
}
