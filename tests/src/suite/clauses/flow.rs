//! Settling, progress, full queues, refusals, identifiers.

use kvx_core::ErrorKind;
use kvx_core::capability::Revoke;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::transfer::{Mode, PostedSegment};

use super::Group;
use super::sever::volley;
use super::shapes::modes;
use crate::suite::clause::{
    Breach, Clause, Point, Verdict, bounded_in_flight, ensure, event_descriptor, notes, refused,
    several_in_flight, writes,
};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Settling, progress and full queues",
    about: "What is posted settles once, without help from the peer's program; what is not posted leaves no trace.",
    clauses: &[
        Clause::new(
            "settled.once",
            Point::Settled,
            "Every transfer that was posted settles, exactly once, under its own id.",
            &["settled_twice", "settled_never", "done_and_settled"],
            settled_once,
        ),
        Clause::new(
            "settled.ids",
            Point::Settled,
            "An id may be any number, and may be used again once it settled.",
            &["ids_cut_to_32_bits"],
            ids,
        ),
        Clause::new(
            "progress.initiator_alone",
            Point::Progress,
            "Transfers settle though the peer's program never polls.",
            &["needs_the_target_to_poll"],
            initiator_alone,
        ),
        Clause::new(
            "progress.target_alone",
            Point::Progress,
            "Notifications arrive though the program that posted them does not poll again (known failure 92: nixl#2214).",
            &["needs_the_initiator_to_poll"],
            target_alone,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "progress.calls_return",
            Point::Progress,
            "The calls that only ask for something return at once, and do not wait until it has happened.",
            &[
                "submit_blocks",
                "poll_blocks",
                "cancel_blocks",
                "sever_blocks",
                "revoke_blocks",
                "deregister_blocks",
            ],
            calls_return,
        )
        .needs(&[writes]),
        Clause::new(
            "full.bounded",
            Point::NothingPosted,
            "No more batches are in flight to a peer than the limit says: the next is full.",
            &["in_flight_limit_ignored"],
            full_bounded,
        )
        .needs(&[writes, bounded_in_flight]),
        Clause::new(
            "full.nothing_posted",
            Point::NothingPosted,
            "Of a batch for which there was no room nothing is moved, notified or settled.",
            &["full_but_posted"],
            full_nothing_posted,
        )
        .needs(&[writes, notes, bounded_in_flight]),
        Clause::new(
            "full.resumes",
            Point::NothingPosted,
            "Once a transfer has settled there is room again.",
            &["full_for_ever"],
            full_resumes,
        )
        .needs(&[writes, bounded_in_flight]),
        Clause::new(
            "submit.error_posts_nothing",
            Point::NothingPosted,
            "A batch that is refused with an error is not posted, not even in part; its id is free.",
            &["error_but_posted"],
            error_posts_nothing,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "poll.room",
            Point::Settled,
            "A poll gives no more events than the caller has room for.",
            &["overfills_the_buffer"],
            room,
        )
        .needs(&[several_in_flight]),
        Clause::new(
            "poll.descriptor",
            Point::Claims,
            "The descriptor becomes readable when there are events to give.",
            &["descriptor_stays_silent"],
            descriptor,
        )
        .needs(&[event_descriptor, notes])
        .here_only(),
    ],
};

/// The kit times these calls wherever they are made; here each is made while transfers are in flight.
fn calls_return(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let other = world.open("other")?;
    for revokes in [false, true] {
        if revokes && one.capabilities()?.revoke != Revoke::PerPeer {
            continue;
        }
        let pair = world.meet(&one, &other)?;
        let (lane, spare) = (world.lane(&pair, 2048)?, world.memory(&one, 64)?);
        let ids = volley(world, &lane, 20)?;
        if let Some(id) = ids.last()
            && let Err(breach) = one.cancel(*id)
        {
            refused::<()>("cancelling what was in flight", Err(breach), &[ErrorKind::Misuse])?;
        }
        one.poll(4)?;
        one.deregister(lane.local.region)?;
        one.deregister(spare.region)?;
        if revokes {
            one.revoke(pair.at_one)?;
        } else {
            one.sever(pair.at_one)?;
        }
        world.severed(&one, pair.at_one)?;
        if other.down(pair.at_other).is_none() {
            other.sever(pair.at_other)?;
            world.severed(&other, pair.at_other)?;
        }
    }
    Ok(())
}

fn settled_once(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 4096)?;
    let modes = modes(&lane)?;
    let mut ids = Vec::new();
    for round in 0..120 {
        let mode = modes[round % modes.len()];
        let offset = world.dice().below(4000);
        let segments = [lane.segment(offset, offset, 1)];
        ids.push(world.post(&pair.one, pair.at_one, mode, &segments, None)?);
    }
    world.done(&pair.one, &ids)?;
    world.settle_down(&[&pair.one, &pair.other])?;
    ensure!(pair.one.in_flight() == 0, "{} transfers did not settle", pair.one.in_flight());
    Ok(())
}

fn ids(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 64)?;
    let mode = modes(&lane)?[0];
    let segments = [lane.segment(0, 0, 8)];
    for round in 0..3 {
        for id in [0, 1, u64::from(u32::MAX), 1 << 32, u64::MAX] {
            let posted = || pair.one.submit(id, pair.at_one, mode, &segments, None);
            world.wait(&[&pair.one], "room to post", posted)?;
            let what = format!("transfer {id} to settle, round {round}");
            world.wait(&[&pair.one], &what, || Ok(pair.one.settled(id).is_some()))?;
        }
    }
    Ok(())
}

fn initiator_alone(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 4096)?;
    for mode in modes(&lane)? {
        for round in 0..8 {
            let segments = [lane.segment(round * 512, round * 512, 300)];
            // `transfer` polls the initiator only.
            world.transfer(&mut lane, mode, &segments, None)?;
        }
        lane.check(&format!("{mode} to a peer that does not poll"))?;
    }
    Ok(())
}

fn target_alone(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 1024)?;
    for round in 0..6_usize {
        let bytes = pair.one.capabilities()?.limits.max_segment_bytes.min(64);
        let at = round as u64 * 100;
        let segments = [lane.segment(at, at, bytes)];
        let note = world.note(&pair.one.capabilities()?, round as u64);
        let id = world.id();
        let posted = pair.one.submit(id, pair.at_one, Mode::Write, &segments, Some(&note))?;
        ensure!(posted, "an empty queue is full");
        lane.apply(Mode::Write, &segments);
        let heard = || Ok(pair.other.notes().len() > round);
        world.wait(&[&pair.other], "the notification, with only its receiver polling", heard)?;
        lane.check("after the notification")?;
        world.done(&pair.one, &[id])?;
    }
    Ok(())
}

/// Batches beyond the limit for which a [`wide_lane`] has room.
const BEYOND: u64 = 64;

/// Posts one-byte writes with notifications until there is no room, or, where they are done within the call, until each place was
/// written. Each has a place of its own.
fn fill(world: &World, lane: &mut crate::suite::lane::Lane) -> Verdict<Vec<u64>> {
    let pair = lane.pair.clone();
    let limit = u64::from(pair.one.capabilities()?.limits.max_in_flight);
    let mut ids = Vec::new();
    while (ids.len() as u64) < limit + BEYOND {
        let (id, at) = (world.id(), ids.len() as u64);
        let segments = [lane.segment(at, at, 1)];
        let note = world.note(&pair.one.capabilities()?, at);
        if !pair.one.submit(id, pair.at_one, Mode::Write, &segments, Some(&note))? {
            break;
        }
        lane.apply(Mode::Write, &segments);
        ids.push(id);
        // What was done within the call is not in flight.
        let count = pair.one.in_flight();
        ensure!(
            count as u64 <= limit,
            "{count} batches are in flight to one peer, the limit is {limit}"
        );
    }
    ensure!(!ids.is_empty(), "an empty queue is full");
    Ok(ids)
}

/// Room for as many one-byte writes as may be in flight, and a few more.
fn wide_lane(world: &World) -> Verdict<crate::suite::lane::Lane> {
    let pair = world.pair()?;
    let limit = u64::from(pair.one.capabilities()?.limits.max_in_flight);
    world.lane(&pair, limit + BEYOND)
}

fn full_bounded(world: &World) -> Verdict {
    let mut lane = wide_lane(world)?;
    let ids = fill(world, &mut lane)?;
    world.done(&lane.pair.one, &ids)?;
    lane.check("after the queue was full")
}

fn full_nothing_posted(world: &World) -> Verdict {
    let mut lane = wide_lane(world)?;
    let ids = fill(world, &mut lane)?;
    let (pair, count) = (lane.pair.clone(), ids.len());
    world.done(&pair.one, &ids)?;
    let both = [&pair.one, &pair.other];
    let what = format!("{count} notifications");
    world.wait(&both, &what, || Ok(pair.other.notes().len() >= count))?;
    world.settle_down(&both)?;
    ensure!(
        pair.other.notes().len() == count,
        "{} notifications, but {count} batches were posted",
        pair.other.notes().len()
    );
    lane.check("after a batch found no room")
}

fn full_resumes(world: &World) -> Verdict {
    let mut lane = wide_lane(world)?;
    let pair = lane.pair.clone();
    for _ in 0..3 {
        let ids = fill(world, &mut lane)?;
        let some = || Ok(ids.iter().any(|id| pair.one.settled(*id).is_some()));
        world.wait(&[&pair.one], "a transfer to settle", some)?;
        let segments = [lane.segment(0, 0, 1)];
        let id = world.post(&pair.one, pair.at_one, Mode::Write, &segments, None)?;
        world.done(&pair.one, &ids)?;
        world.done(&pair.one, &[id])?;
    }
    lane.check("after the queue was full three times")
}

fn error_posts_nothing(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 256)?;
    let batch = pair.one.capabilities()?.limits.max_batch_segments;
    let good = lane.segment(0, 0, 32);
    let bad = [
        PostedSegment { local: RegionId::new(7, 7), ..good },
        PostedSegment { remote: RemoteRegionId::new(7, 7), ..good },
    ];
    let note = world.note(&pair.one.capabilities()?, 1);
    let id = world.id();
    for bad in bad {
        let segments = if batch > 1 { vec![good, bad] } else { vec![bad] };
        let post = pair.one.submit(id, pair.at_one, Mode::Write, &segments, Some(&note));
        refused("a batch with an unknown handle", post, &[ErrorKind::Misuse])?;
    }
    let post = pair.one.submit(id, PeerId::new(7, 7), Mode::Write, &[good], Some(&note));
    refused("a batch to an unknown peer", post, &[ErrorKind::Misuse])?;
    world.settle_down(&[&pair.one, &pair.other])?;
    ensure!(pair.other.notes().is_empty(), "a refused batch was notified");
    lane.check("after refused batches")?;
    let free = pair.one.submit(id, pair.at_one, Mode::Write, &[good], None)?;
    ensure!(free, "an empty queue is full after refused batches");
    world.done(&pair.one, &[id])
}

fn room(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 64)?;
    let mode = modes(&lane)?[0];
    for room in [1, 2, 3] {
        let mut ids = Vec::new();
        for _ in 0..4 {
            let id = world.id();
            let posted = pair.one.submit(id, pair.at_one, mode, &[lane.segment(0, 0, 1)], None)?;
            ensure!(posted, "there is no room for four batches");
            ids.push(id);
        }
        // Several events wait by the time that the side polls.
        world.settle_down(&[&pair.other])?;
        world.wait(&[], "four transfers to settle", || {
            // The side itself checks that there are no more than it has room for.
            pair.one.poll(room)?;
            Ok(ids.iter().all(|id| pair.one.settled(*id).is_some()))
        })?;
    }
    Ok(())
}

fn descriptor(world: &World) -> Verdict {
    use std::os::fd::AsRawFd as _;

    use rustix::event::{PollFd, PollFlags, Timespec};

    let pair = world.pair()?;
    let (backend, sender) = (pair.other.backend()?, &pair.one);
    let Some(fd) = backend.event_fd() else {
        return Err(Breach::new("a descriptor is claimed, and there is none"));
    };
    for round in 0..5_usize {
        world.settle_down(&[&pair.one, &pair.other])?;
        let note = world.note(&sender.capabilities()?, round as u64);
        let id = world.post(sender, pair.at_one, Mode::Write, &[], Some(&note))?;
        let mut ready = [PollFd::new(&fd, PollFlags::IN)];
        let limit = Timespec { tv_sec: 5, tv_nsec: 0 };
        let count = rustix::event::poll(&mut ready, Some(&limit))
            .map_err(|error| Breach::new(format!("the kit cannot poll: {error}")))?;
        ensure!(
            count == 1,
            "descriptor {} is not readable, though a notification was sent 5 s ago",
            fd.as_raw_fd()
        );
        let heard = || Ok(pair.other.notes().len() > round);
        world.wait(&[&pair.other], "the notification", heard)?;
        world.done(sender, &[id])?;
    }
    Ok(())
}
