//! Ending a peer's access to this side's memory.

use kvx_core::ErrorKind;
use kvx_core::transfer::Mode;

use super::Group;
use super::handshake::greet;
use super::sever::{a_while, volley};
use super::shapes::modes;
use crate::suite::clause::{
    Clause, Point, Verdict, ensure, notes, reads, refused, revokes_no_peers, revokes_peers,
    revokes_regions, writes,
};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Revoking",
    about: "What is claimed is enforced; where nothing is claimed, nothing is pretended.",
    clauses: &[
        Clause::new(
            "revoke.writes",
            Point::Revoked,
            "Once `revoke` returned, the peer writes not one more byte of this side's memory.",
            &["revokes_in_name_only"],
            writes_end,
        )
        .needs(&[revokes_peers, writes]),
        Clause::new(
            "revoke.reads",
            Point::Revoked,
            "Once `revoke` returned, the peer reads not one more byte of this side's memory.",
            &["revokes_in_name_only"],
            reads_end,
        )
        .needs(&[revokes_peers, reads]),
        Clause::new(
            "revoke.severs",
            Point::Revoked,
            "Revoking severs, too: this side's transfers to the peer settle within the bound, then it is down.",
            &["revoking_does_not_sever"],
            severs,
        )
        .needs(&[revokes_peers, writes]),
        Clause::new(
            "revoke.others_unharmed",
            Point::Revoked,
            "Other peers keep their access.",
            &["revoking_takes_all"],
            others_unharmed,
        )
        .needs(&[revokes_peers, writes, notes]),
        Clause::new(
            "revoke.not_claimed",
            Point::Revoked,
            "Where it is not claimed for a peer, it is refused as unsupported, and the connection goes on.",
            &["pretends_to_revoke"],
            not_claimed,
        )
        .needs(&[revokes_no_peers, notes]),
        Clause::new(
            "revoke.region",
            Point::Revoked,
            "Where it is claimed for regions, once `deregister` returned no peer reads or writes the region.",
            &["deregistered_key_still_works"],
            region,
        )
        .needs(&[revokes_regions, writes]),
    ],
};

fn writes_end(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let other = world.open("other")?;
    for round in 0..5 {
        let pair = world.meet(&one, &other)?;
        // The peer writes into memory of `one`, who revokes.
        let mut lane = world.lane(&pair.flipped(), 2048)?;
        volley(world, &lane, 30)?;
        a_while(world, &pair)?;
        one.revoke(pair.at_one)?;
        lane.remote.refill(world.dice().next())?;
        // The peer tries on, until it is told.
        for _ in 0..5 {
            if other
                .submit(world.id(), pair.at_other, Mode::Write, &[lane.segment(0, 0, 8)], None)
                .is_err()
            {
                break;
            }
        }
        world.settle_down(&[&one, &other])?;
        lane.remote.check(&format!("round {round}, after a peer's access was revoked"))?;
        world.severed(&one, pair.at_one)?;
        if other.down(pair.at_other).is_none() {
            other.sever(pair.at_other)?;
        }
        world.severed(&other, pair.at_other)?;
    }
    Ok(())
}

fn reads_end(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let other = world.open("other")?;
    for round in 0..5 {
        let pair = world.meet(&one, &other)?;
        let mut lane = world.lane(&pair.flipped(), 2048)?;
        let ids: Vec<_> = (0..30).map(|_| world.id()).collect();
        for (index, id) in ids.iter().enumerate() {
            let at = index as u64 * 48;
            if !other.submit(*id, pair.at_other, Mode::Read, &[lane.segment(at, at, 40)], None)? {
                break;
            }
        }
        a_while(world, &pair)?;
        one.revoke(pair.at_one)?;
        let secret = world.dice().next();
        lane.remote.refill(secret)?;
        world.settle_down(&[&one, &other])?;
        for index in 0..30 {
            let at = index * 48;
            let stolen = lane.local.read(at, 40)? == lane.remote.expected(at, 40);
            ensure!(
                !stolen,
                "round {round}: a peer read what was written after its access was revoked"
            );
        }
        world.severed(&one, pair.at_one)?;
        if other.down(pair.at_other).is_none() {
            other.sever(pair.at_other)?;
        }
        world.severed(&other, pair.at_other)?;
    }
    Ok(())
}

fn severs(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 2048)?;
    volley(world, &lane, 30)?;
    a_while(world, &pair)?;
    pair.one.revoke(pair.at_one)?;
    world.severed(&pair.one, pair.at_one)?;
    let again = pair.one.revoke(pair.at_one);
    refused("revoking a peer that is down", again, &[ErrorKind::Misuse])?;
    Ok(())
}

fn others_unharmed(world: &World) -> Verdict {
    let first = world.pair()?;
    let second = world.meet(&first.one, &world.open("third")?)?;
    let mut back = world.lane(&second.flipped(), 2048)?;
    let ids = volley(world, &back, 20)?;
    first.one.revoke(first.at_one)?;
    world.done(&second.other, &ids)?;
    let moved: Vec<_> = (0..ids.len() as u64).map(|i| back.segment(i * 48, i * 48, 40)).collect();
    back.apply(Mode::Write, &moved);
    back.check("written by a peer beside a revoked one")?;
    greet(world, &second)
}

fn not_claimed(world: &World) -> Verdict {
    let pair = world.pair()?;
    let revoked = pair.one.revoke(pair.at_one);
    refused("revoking, which is not claimed,", revoked, &[ErrorKind::Unsupported])?;
    greet(world, &pair)
}

fn region(world: &World) -> Verdict {
    let pair = world.pair()?;
    for mode in modes(&world.lane(&pair, 16)?)? {
        let mut lane = world.lane(&pair.flipped(), 2048)?;
        let mut ids = Vec::new();
        let mut post = |lane: &crate::suite::lane::Lane, index: u64| {
            let id = world.id();
            let segments = [lane.segment(index * 48, index * 48, 40)];
            let posted = pair.other.submit(id, pair.at_other, mode, &segments, None)?;
            if posted {
                ids.push(id);
            }
            Verdict::Ok(posted)
        };
        for index in 0..20 {
            if !post(&lane, index)? {
                break;
            }
        }
        a_while(world, &pair)?;
        pair.one.deregister(lane.remote.region)?;
        lane.remote.refill(world.dice().next())?;
        if let Err(breach) = post(&lane, 20) {
            refused::<()>("using a key that was revoked", Err(breach), &[ErrorKind::Peer])?;
        }
        let settled = || Ok(ids.iter().all(|id| pair.other.settled(*id).is_some()));
        world.wait(
            &[&pair.one, &pair.other],
            "transfers to a revoked region to settle",
            settled,
        )?;
        world.settle_down(&[&pair.one, &pair.other])?;
        lane.remote.check("after the region was deregistered")?;
        if mode == Mode::Read {
            for index in 0..21 {
                let stolen =
                    lane.local.read(index * 48, 40)? == lane.remote.expected(index * 48, 40);
                ensure!(!stolen, "a peer read what was written after the region was deregistered");
            }
        }
        if pair.other.down(pair.at_other).is_some() {
            return Ok(());
        }
    }
    Ok(())
}
