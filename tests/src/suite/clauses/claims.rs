//! What a backend says of itself.

use kvx_core::ErrorKind;
use kvx_core::id::PeerId;

use super::Group;
use crate::suite::clause::{Breach, Clause, Point, Verdict, ensure, refused};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Claims",
    about: "What a backend says of itself is consistent, and does not change while it is open.",
    clauses: &[
        Clause::new(
            "claims.consistent",
            Point::Claims,
            "Capabilities agree with each other, and do not change while the backend is open.",
            &["capabilities_change", "capabilities_contradict"],
            consistent,
        ),
        Clause::new(
            "claims.descriptor",
            Point::Claims,
            "There is a descriptor to sleep on where one is claimed, and none where none is.",
            &["descriptor_without_claim"],
            descriptor,
        )
        .here_only(),
        Clause::new(
            "claims.transport",
            Point::Claims,
            "Both sides can say what their connection uses; of an unknown peer nothing is said.",
            &["transport_unknown"],
            transport,
        ),
        Clause::new(
            "claims.incarnation",
            Point::Handshake,
            "Every backend that is opened has an incarnation of its own, which stays the same.",
            &["incarnation_always_the_same"],
            incarnation,
        ),
    ],
};

fn consistent(world: &World) -> Verdict {
    let pair = world.pair()?;
    let before = pair.one.capabilities()?;
    before.check().map_err(|error| Breach::new(format!("{error}")))?;
    let name = pair.one.backend_name()?;
    ensure!(!name.is_empty(), "the backend has no name");
    ensure!(name == pair.other.backend_name()?, "the two sides have different names");
    let lane = world.lane(&pair, 64)?;
    let mode = super::shapes::modes(&lane)?[0];
    let id = world.post(&pair.one, pair.at_one, mode, &[lane.segment(0, 0, 8)], None)?;
    world.done(&pair.one, &[id])?;
    let after = pair.one.capabilities()?;
    ensure!(after == before, "capabilities were {before:?} and are {after:?}");
    Ok(())
}

fn descriptor(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let (claimed, there) = (one.capabilities()?.event_fd, one.backend()?.event_fd().is_some());
    ensure!(claimed == there, "claimed: {claimed}, there: {there}");
    Ok(())
}

fn transport(world: &World) -> Verdict {
    let pair = world.pair()?;
    for pair in [pair.clone(), pair.flipped()] {
        let transport = pair.one.peer_info(pair.at_one)?;
        ensure!(!transport.trim().is_empty(), "{} does not say its transport", pair.one.name());
        let unknown = pair.one.peer_info(PeerId::new(77, 7));
        refused("asking for the transport to an unknown peer", unknown, &[ErrorKind::Misuse])?;
    }
    Ok(())
}

fn incarnation(world: &World) -> Verdict {
    let sides = [world.open_here("one")?, world.open("other")?, world.open_here("third")?];
    let mut all = Vec::new();
    for side in &sides {
        all.push(side.incarnation()?);
    }
    for (side, first) in sides.iter().zip(&all) {
        ensure!(side.incarnation()? == *first, "the incarnation of {} changed", side.name());
        let same = all.iter().filter(|incarnation| *incarnation == first).count();
        ensure!(same == 1, "{same} backends of three have the same incarnation");
    }
    Ok(())
}
