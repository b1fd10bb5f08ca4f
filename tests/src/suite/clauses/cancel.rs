//! Cancelling.

use kvx_core::ErrorKind;
use kvx_core::transfer::Mode;

use super::Group;
use super::sever::is_quiet;
use crate::suite::clause::{
    Clause, Point, Verdict, ensure, notes, refused, several_in_flight, writes,
};
use crate::suite::command::End;
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Cancelling",
    about: "Best effort; only *settled* proves that the memory is quiet.",
    clauses: &[
        Clause::new(
            "cancel.settles",
            Point::Cancelled,
            "A transfer that was cancelled settles: as cancelled, or as done with all of its data.",
            &["cancelled_never_settles", "cancelled_called_done"],
            settles,
        )
        .needs(&[writes]),
        Clause::new(
            "cancel.quiet",
            Point::Cancelled,
            "Once a cancelled transfer settled, this side's memory is quiet: a read writes it no more, and what is put there \
             afterwards is not sent.",
            &["cancelled_then_written"],
            quiet,
        )
        .needs(&[writes]),
        Clause::new(
            "cancel.not_notified",
            Point::Notified,
            "A transfer that did not bring all of its data is not notified.",
            &["notified_though_cancelled"],
            not_notified,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "cancel.unknown",
            Point::Stale,
            "Cancelling what is not in flight, or settled already, is misuse.",
            &["cancelling_nothing_accepted"],
            unknown,
        ),
        Clause::new(
            "cancel.others_unharmed",
            Point::Cancelled,
            "Other transfers to the same peer are done.",
            &["cancel_takes_all"],
            others_unharmed,
        )
        .needs(&[writes, several_in_flight]),
        Clause::new(
            "cancel.id_again",
            Point::Settled,
            "A transfer under the id of a cancelled one that has settled is another: nothing that is still heard of the first \
             settles it.",
            &["late_answer_settles_the_next"],
            id_again,
        )
        .needs(&[writes]),
    ],
};

/// Posts a transfer, cancels it, and brings it to its end. What it was, and how it ended.
fn cancelled(
    world: &World,
    lane: &mut crate::suite::lane::Lane,
    mode: Mode,
    notify: Option<&[u8]>,
) -> Verdict<(Vec<kvx_core::transfer::PostedSegment>, End)> {
    let pair = lane.pair.clone();
    lane.local.refill(world.dice().next())?;
    let segments: Vec<_> = (0..8).map(|i| lane.segment(i * 256, i * 256, 250)).collect();
    let batch = world.batches(&pair.one, &segments)?.swap_remove(0);
    let id = world.post(&pair.one, pair.at_one, mode, &batch, notify)?;
    for _ in 0..world.dice().below(3) {
        pair.one.poll(8)?;
    }
    if let Err(breach) = pair.one.cancel(id) {
        // It may have settled just before.
        refused::<()>("cancelling what was in flight", Err(breach), &[ErrorKind::Misuse])?;
    }
    let settled = || Ok(pair.one.settled(id).is_some());
    world.wait(&[&pair.one], "a cancelled transfer to settle", settled)?;
    let end = pair.one.settled(id);
    end.map(|end| (batch, end))
        .ok_or_else(|| crate::suite::clause::Breach::new("the transfer did not settle"))
}

fn settles(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 2048)?;
    for round in 0..20 {
        lane.remote.refill(world.dice().next())?;
        let (batch, end) = cancelled(world, &mut lane, Mode::Write, None)?;
        match end {
            End::Done => {
                lane.apply(Mode::Write, &batch);
                lane.check(&format!("round {round}, cancelled but done"))?;
            }
            End::Cancelled => {}
            End::Failed(error) => {
                return Err(crate::suite::clause::Breach::new(format!(
                    "a cancelled transfer failed instead: {}",
                    error.text
                )));
            }
        }
    }
    Ok(())
}

fn quiet(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 2048)?;
    let modes = super::shapes::modes(&lane)?;
    for round in 0..10 {
        cancelled(world, &mut lane, modes[round % modes.len()], None)?;
        is_quiet(world, &mut lane, "some time after a cancelled transfer settled")?;
    }
    Ok(())
}

fn not_notified(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 2048)?;
    for round in 0..20_u64 {
        lane.remote.refill(world.dice().next())?;
        let heard = pair.other.notes().len();
        let note = world.note(&pair.one.capabilities()?, round);
        let (batch, end) = cancelled(world, &mut lane, Mode::Write, Some(&note))?;
        world.settle_down(&[&pair.one, &pair.other])?;
        let count = pair.other.notes().len() - heard;
        let whole = {
            let mut whole = true;
            for segment in &batch {
                let must = lane.local.expected(segment.local_offset, segment.bytes);
                whole &= lane.remote.read(segment.remote_offset, segment.bytes)? == must;
            }
            whole
        };
        ensure!(count <= 1, "round {round}: notified {count} times");
        ensure!(count == 0 || whole, "round {round}: notified, but the data is not all there");
        let done = matches!(end, End::Done);
        ensure!(!done || count == 1, "round {round}: done, but notified {count} times");
        ensure!(!done || whole, "round {round}: done, but the data is not all there");
    }
    Ok(())
}

fn id_again(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 4096)?;
    let (id, to) = (world.id(), (&pair.one, pair.at_one));
    let bytes = pair.one.capabilities()?.limits.max_segment_bytes.min(1500);
    for round in 0..12 {
        lane.local.refill(world.dice().next())?;
        world.post_as(id, to, Mode::Write, &[lane.segment(0, 0, 40)])?;
        for _ in 0..world.dice().below(3) {
            pair.one.poll(8)?;
        }
        if let Err(breach) = pair.one.cancel(id) {
            refused::<()>("cancelling what was in flight", Err(breach), &[ErrorKind::Misuse])?;
        }
        let settled = || Ok(pair.one.settled(id).is_some());
        world.wait(&[&pair.one], "a cancelled transfer to settle", settled)?;
        let again = [lane.segment(2000, 2000, bytes)];
        world.post_as(id, to, Mode::Write, &again)?;
        world.done(&pair.one, &[id])?;
        lane.apply(Mode::Write, &again);
        ensure!(
            lane.remote.holds(2000, bytes)?,
            "round {round}: under the id of a cancelled transfer another settled as done, and its data is not there"
        );
        world.settle_down(&[&pair.one, &pair.other])?;
    }
    Ok(())
}

fn unknown(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 64)?;
    let mode = super::shapes::modes(&lane)?[0];
    refused("cancelling what was never posted", pair.one.cancel(999), &[ErrorKind::Misuse])?;
    let id = world.post(&pair.one, pair.at_one, mode, &[lane.segment(0, 0, 8)], None)?;
    world.done(&pair.one, &[id])?;
    refused("cancelling what has settled", pair.one.cancel(id), &[ErrorKind::Misuse])?;
    Ok(())
}

fn others_unharmed(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 4096)?;
    for _ in 0..5 {
        lane.local.refill(world.dice().next())?;
        let mut others = Vec::new();
        let mut victims = Vec::new();
        for index in 0..4 {
            let segments = [lane.segment(index * 64, index * 64, 40)];
            let id = world.id();
            let posted = pair.one.submit(id, pair.at_one, Mode::Write, &segments, None)?;
            ensure!(posted, "there is no room for {} batches", index + 1);
            if index % 2 == 0 {
                others.push(id);
            } else {
                victims.push(id);
            }
            lane.apply(Mode::Write, &segments);
        }
        for id in &victims {
            if let Err(breach) = pair.one.cancel(*id) {
                refused::<()>("cancelling what was in flight", Err(breach), &[ErrorKind::Misuse])?;
            }
        }
        world.done(&pair.one, &others)?;
        let settled = || Ok(victims.iter().all(|id| pair.one.settled(*id).is_some()));
        world.wait(&[&pair.one], "cancelled transfers to settle", settled)?;
        for index in [0, 2] {
            ensure!(
                lane.remote.holds(index * 64, 40)?,
                "a transfer beside cancelled ones is done, but its data is not there"
            );
        }
    }
    Ok(())
}
