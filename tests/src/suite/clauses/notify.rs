//! Notifications.

use std::collections::BTreeMap;

use kvx_core::ErrorKind;
use kvx_core::capability::Limits;
use kvx_core::transfer::{Mode, PostedSegment};

use super::Group;
use super::shapes::modes;
use crate::suite::clause::{
    Clause, Point, Verdict, bounded_notes, ensure, notes, reads, refused, several_in_flight, writes,
};
use crate::suite::lane::Lane;
use crate::suite::world::{Pair, World};

pub(crate) const GROUP: Group = Group {
    title: "Notifications",
    about: "The peer is told after the data, once, in full; and who polls makes no difference.",
    clauses: &[
        Clause::new(
            "notify.after_data",
            Point::Notified,
            "Whoever is notified of a write has all of its data, also of data that took another way (known failure 90: nixl#252).",
            &["notified_before_data", "notified_before_many_segments", "notified_before_much_data"],
            after_data,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "notify.after_read",
            Point::Notified,
            "Whoever is notified of a read may overwrite what was read.",
            &["notified_before_data", "notified_before_many_segments", "notified_before_much_data"],
            after_read,
        )
        .needs(&[reads, notes]),
        Clause::new(
            "notify.once",
            Point::Notified,
            "Every notification of a transfer that is done arrives: once, with its own bytes, from the right peer.",
            &["notified_twice", "notified_never", "notification_altered"],
            once,
        )
        .needs(&[notes]),
        Clause::new(
            "notify.right_peer",
            Point::Notified,
            "A notification reaches the peer that was named, as coming from the one who sent it.",
            &["notified_to_wrong_peer"],
            right_peer,
        )
        .needs(&[notes]),
        Clause::new(
            "notify.bare",
            Point::Notified,
            "A notification without segments arrives, once, and touches no memory.",
            &["bare_refused", "bare_not_delivered"],
            bare,
        )
        .needs(&[notes]),
        Clause::new(
            "notify.lengths",
            Point::Claims,
            "A notification may have any length from no bytes to the limit, alone or beside data in either mode.",
            &[
                "longest_notification_cut",
                "empty_beside_data_lost",
                "longest_beside_data_cut",
                "long_beside_a_read_cut",
            ],
            lengths,
        )
        .needs(&[bounded_notes]),
        Clause::new(
            "notify.oversize",
            Point::NothingPosted,
            "A notification over the limit is refused when it is posted, as misuse, and nothing of it happens.",
            &["oversize_cut"],
            oversize,
        )
        .needs(&[bounded_notes, writes]),
        Clause::new(
            "notify.inline",
            Point::Notified,
            "A transfer so small that it completes within the call is still notified, once (known failure 91: nixl#349).",
            &["inline_not_notified", "notified_twice"],
            inline,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "notify.of_what_is_done",
            Point::Notified,
            "Where a batch is done within the call its data is there by then, and its notification on its way: it arrives, once, \
             though the program that posted it does not poll again.",
            &["done_and_never_notified", "done_and_notified_at_the_next_poll", "done_and_notified_twice"],
            of_what_is_done,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "notify.small_buffer",
            Point::Notified,
            "Events that a poll has no room for are given to the next: none is lost.",
            &["events_lost_in_small_buffer"],
            small_buffer,
        )
        .needs(&[notes, several_in_flight]),
    ],
};

/// Batches within the limits of a side, and the bytes of a lane in which they have room: a few small segments, and one
/// batch of as many, and as much, as is quickly moved.
fn sizes(limits: &Limits) -> [(u64, u64, u64); 2] {
    let count = u64::from(limits.max_batch_segments).min(512);
    [(12, 8, 200), (2, count, limits.max_segment_bytes.min(6000))]
}

/// Segments side by side, in the opposite order at the peer.
fn crossed(lane: &Lane, count: u64, bytes: u64) -> Vec<PostedSegment> {
    let step = bytes + 56;
    (0..count).map(|i| lane.segment(i * step, (count - 1 - i) * step, bytes)).collect()
}

fn after_data(world: &World) -> Verdict {
    let pair = world.pair()?;
    for size in sizes(&pair.one.capabilities()?.limits) {
        after_data_of(world, &pair, size)?;
    }
    Ok(())
}

fn after_data_of(world: &World, pair: &Pair, (rounds, count, bytes): (u64, u64, u64)) -> Verdict {
    let mut lane = world.lane(pair, count * (bytes + 56))?;
    for round in 0..rounds {
        lane.local.refill(world.dice().next())?;
        let segments = crossed(&lane, count, bytes);
        let batches = world.batches(&pair.one, &segments)?;
        for batch in batches {
            lane.apply(Mode::Write, &batch);
            let note = world.note(&pair.one.capabilities()?, round);
            let heard = pair.other.notes().len();
            let id = world.post(&pair.one, pair.at_one, Mode::Write, &batch, Some(&note))?;
            // The receiver polls for one event at a time, and looks at its memory in the moment in which it has it.
            world.wait(&[], "the notification", || {
                pair.other.poll(1)?;
                if pair.other.notes().len() > heard {
                    return Ok(true);
                }
                pair.one.poll(1)?;
                Ok(false)
            })?;
            lane.remote.check(&format!("round {round}, when the notification was received"))?;
            world.done(&pair.one, &[id])?;
        }
    }
    Ok(())
}

fn after_read(world: &World) -> Verdict {
    let pair = world.pair()?;
    for size in sizes(&pair.one.capabilities()?.limits) {
        after_read_of(world, &pair, size)?;
    }
    Ok(())
}

fn after_read_of(world: &World, pair: &Pair, (rounds, count, bytes): (u64, u64, u64)) -> Verdict {
    let mut lane = world.lane(pair, count * (bytes + 56))?;
    for round in 0..rounds {
        let segments = crossed(&lane, count, bytes);
        for batch in world.batches(&pair.one, &segments)? {
            lane.apply(Mode::Read, &batch);
            let note = world.note(&pair.one.capabilities()?, round);
            let heard = pair.other.notes().len();
            let id = world.post(&pair.one, pair.at_one, Mode::Read, &batch, Some(&note))?;
            world.wait(&[], "the notification", || {
                pair.other.poll(1)?;
                if pair.other.notes().len() > heard {
                    return Ok(true);
                }
                pair.one.poll(1)?;
                Ok(false)
            })?;
            // The owner was told that its bytes were read, so they are its own again.
            lane.remote.refill(world.dice().next())?;
            world.done(&pair.one, &[id])?;
            lane.check(&format!(
                "round {round}, whose source was overwritten once it was notified"
            ))?;
        }
    }
    Ok(())
}

fn once(world: &World) -> Verdict {
    let pair = world.pair()?;
    for (pair, seat) in [(pair.clone(), 0), (pair.flipped(), 1)] {
        let lane = world.lane(&pair, 1024)?;
        let modes = modes(&lane)?;
        let mut expected = BTreeMap::new();
        let mut ids = Vec::new();
        for round in 0..30_u64 {
            let mode = modes[usize::try_from(round).unwrap_or(0) % modes.len()];
            let note = world.note(&pair.one.capabilities()?, 2 * round + seat + 1000);
            let segments = [lane.segment(round * 32, round * 32, 32)];
            ids.push(world.post(&pair.one, pair.at_one, mode, &segments, Some(&note))?);
            *expected.entry(note).or_insert(0) += 1;
        }
        world.done(&pair.one, &ids)?;
        let both = [&pair.one, &pair.other];
        let what = "30 notifications";
        world.wait(&both, what, || Ok(pair.other.notes().len() >= 30))?;
        world.settle_down(&both)?;
        let mut found = BTreeMap::new();
        for (peer, payload) in pair.other.notes() {
            ensure!(
                peer == pair.at_other,
                "a notification came from peer {peer}, must be from {}",
                pair.at_other
            );
            *found.entry(payload).or_insert(0) += 1;
        }
        ensure!(found == expected, "notifications by number: {found:?}, must be {expected:?}");
    }
    Ok(())
}

fn right_peer(world: &World) -> Verdict {
    let first = world.pair()?;
    let second = world.meet(&first.one, &world.open("third")?)?;
    let limits = first.one.capabilities()?;
    for round in 0..10 {
        for (pair, add) in [(&first, 0), (&second, 1)] {
            let note = world.note(&limits, 2 * round + add);
            let id = world.post(&pair.one, pair.at_one, Mode::Write, &[], Some(&note))?;
            world.done(&pair.one, &[id])?;
        }
    }
    let all = [&first.one, &first.other, &second.other];
    let arrived = || Ok(first.other.notes().len() + second.other.notes().len() >= 20);
    world.wait(&all, "20 notifications", arrived)?;
    world.settle_down(&all)?;
    for (pair, add) in [(&first, 0), (&second, 1)] {
        let mut notes = pair.other.notes();
        notes.sort();
        let mut expected: Vec<_> =
            (0..10).map(|round| (pair.at_other, world.note(&limits, 2 * round + add))).collect();
        expected.sort();
        ensure!(
            notes == expected,
            "{} was notified of {notes:?}, must be {expected:?}",
            pair.other.name()
        );
    }
    Ok(())
}

fn bare(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 256)?;
    for round in 0..10_usize {
        let note = world.note(&pair.one.capabilities()?, round as u64);
        for mode in modes(&lane)? {
            let heard = pair.other.notes().len();
            let id = world.post(&pair.one, pair.at_one, mode, &[], Some(&note))?;
            world.done(&pair.one, &[id])?;
            let both = [&pair.one, &pair.other];
            world.wait(&both, "a bare notification", || Ok(pair.other.notes().len() > heard))?;
            let last = pair.other.notes().pop();
            ensure!(
                last == Some((pair.at_other, note.clone())),
                "the bare notification is {last:?}, must be {note:?} from {}",
                pair.at_other
            );
        }
    }
    let (count, modes) = (pair.other.notes().len(), modes(&lane)?.len());
    world.settle_down(&[&pair.one, &pair.other])?;
    ensure!(
        count == 10 * modes && pair.other.notes().len() == count,
        "{} bare notifications of {}",
        pair.other.notes().len(),
        10 * modes
    );
    lane.check("after bare notifications")
}

fn lengths(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 64)?;
    let limit = pair.one.capabilities()?.limits.max_notification_bytes as usize;
    let beside = modes(&lane)?.into_iter().map(|mode| (mode, true));
    for (mode, data) in [(Mode::Write, false)].into_iter().chain(beside) {
        for length in [0, 1, limit / 2, limit.saturating_sub(1), limit] {
            let note = world.dice().bytes(length);
            let heard = pair.other.notes().len();
            let segments = if data { vec![lane.segment(3, 5, 40)] } else { Vec::new() };
            let id = world.post(&pair.one, pair.at_one, mode, &segments, Some(&note))?;
            lane.apply(mode, &segments);
            world.done(&pair.one, &[id])?;
            let both = [&pair.one, &pair.other];
            let with = if data { format!("beside a {mode}") } else { "alone".into() };
            let what = format!("a notification of {length} bytes {with}");
            world.wait(&both, &what, || Ok(pair.other.notes().len() > heard))?;
            let bytes = pair.other.notes().pop().map(|(_, bytes)| bytes).unwrap_or_default();
            ensure!(
                bytes == note,
                "a notification of {length} bytes {with} (the limit is {limit}) arrived as other {} bytes",
                bytes.len()
            );
        }
    }
    lane.check("after notifications of every length")
}

fn oversize(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 256)?;
    let limit = pair.one.capabilities()?.limits.max_notification_bytes as usize;
    for segments in [vec![], vec![lane.segment(0, 0, 32)]] {
        for excess in [1, 4096] {
            let note = world.dice().bytes(limit + excess);
            let post =
                pair.one.submit(world.id(), pair.at_one, Mode::Write, &segments, Some(&note));
            let what =
                format!("a notification of {} bytes, over the limit of {limit},", limit + excess);
            refused(&what, post, &[ErrorKind::Misuse])?;
        }
    }
    world.settle_down(&[&pair.one, &pair.other])?;
    ensure!(pair.other.notes().is_empty(), "a notification that was refused arrived");
    lane.check("after a batch was refused for its notification")
}

fn inline(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 64)?;
    let mut expected = Vec::new();
    for round in 0..40 {
        let segments = [lane.segment(round, 63 - round, 1)];
        let note = world.note(&pair.one.capabilities()?, 500 + round);
        let id = world.post(&pair.one, pair.at_one, Mode::Write, &segments, Some(&note))?;
        lane.apply(Mode::Write, &segments);
        expected.push(note);
        world.done(&pair.one, &[id])?;
    }
    let both = [&pair.one, &pair.other];
    world.wait(&both, "40 notifications", || Ok(pair.other.notes().len() >= expected.len()))?;
    world.settle_down(&both)?;
    let mut found: Vec<_> = pair.other.notes().into_iter().map(|(_, note)| note).collect();
    found.sort();
    expected.sort();
    ensure!(found == expected, "{} notifications of 40 that were sent", found.len());
    lane.check("after 40 transfers of one byte")
}

/// What is not done within the call is waited for, and says nothing here.
fn of_what_is_done(world: &World) -> Verdict {
    let pair = world.pair()?;
    let claims = pair.one.capabilities()?;
    let mut lane = world.lane(&pair, 5000)?;
    let (mut posted, mut done) = (0_usize, 0_u64);
    for mode in modes(&lane)? {
        for bytes in [0, 1, 64, 4096] {
            for round in 0..4 {
                let bytes = claims.limits.max_segment_bytes.min(bytes);
                let segments = [lane.segment(round, 7 - round, bytes)];
                let segments = &segments[..usize::from(bytes > 0)];
                let (id, note) = (world.id(), world.note(&claims, posted as u64));
                let heard = pair.other.notes().len();
                ensure!(
                    pair.one.submit(id, pair.at_one, mode, segments, Some(&note))?,
                    "an empty queue is full"
                );
                posted += 1;
                lane.apply(mode, segments);
                if pair.one.settled(id).is_none() {
                    world.done(&pair.one, &[id])?;
                } else {
                    done += 1;
                    lane.check(&format!(
                        "when a {mode} of {bytes} bytes was done within the call"
                    ))?;
                }
                let what = format!("the notification of a {mode} of {bytes} bytes");
                world.wait(&[&pair.other], &what, || Ok(pair.other.notes().len() > heard))?;
                let last = pair.other.notes().pop();
                ensure!(
                    last == Some((pair.at_other, note.clone())),
                    "{what} is {last:?}, must be {note:?} from {}",
                    pair.at_other
                );
            }
        }
    }
    world.settle_down(&[&pair.one, &pair.other])?;
    let heard = pair.other.notes().len();
    ensure!(
        heard == posted,
        "{heard} notifications of {posted} batches, {done} done within the call"
    );
    lane.check("after batches that were done within the call")
}

fn small_buffer(world: &World) -> Verdict {
    let pair = world.pair()?;
    let count = u64::from(pair.one.capabilities()?.limits.max_in_flight).min(24);
    let mut ids = Vec::new();
    for round in 0..count {
        let note = world.note(&pair.one.capabilities()?, round);
        ids.push(world.post(&pair.one, pair.at_one, Mode::Write, &[], Some(&note))?);
    }
    world.wait(&[], "all events, one at a time", || {
        pair.one.poll(1)?;
        pair.other.poll(1)?;
        let settled = ids.iter().all(|id| pair.one.settled(*id).is_some());
        Ok(settled && pair.other.notes().len() as u64 >= count)
    })
}
