//! Peers that die and peers that stand still.

use kvx_core::ErrorKind;
use kvx_core::backend::SEVER_BOUND;
use kvx_core::transfer::Mode;

use super::Group;
use super::handshake::greet;
use super::sever::{a_while, is_unsent, volley};
use crate::suite::clause::{Clause, Point, Verdict, ensure, notes, refused, writes};
use crate::suite::subject::Fault;
use crate::suite::world::{Pair, World};

pub(crate) const GROUP: Group = Group {
    title: "Peers that die or stand still",
    about: "Across processes the kit kills and stops the peer's process; in one, the backend's crate says how.",
    clauses: &[
        Clause::new(
            "failure.kinds",
            Point::Settled,
            "What was accepted and fails is the fault of the peer or of the fabric, never misuse; it is cancelled only where this \
             side cancelled it, or severed the peer.",
            &["failures_called_misuse", "failures_called_cancelled"],
            kinds,
        )
        .needs(&[writes]),
        Clause::new(
            "failure.killed",
            Point::Severed,
            "When a peer was killed, severing it ends within the bound: all settles, then it is down.",
            &["sever_never_settles", "peer_down_missing"],
            killed,
        )
        .needs(&[writes])
        .faults(&[Fault::Kill]),
        Clause::new(
            "failure.stopped",
            Point::Severed,
            "When a peer stands still, severing it ends within the bound; what it finds when it goes on is quiet.",
            &["sever_never_settles", "severed_but_still_writing"],
            stopped,
        )
        .needs(&[writes])
        .faults(&[Fault::Stop, Fault::Resume]),
        Clause::new(
            "failure.resumed",
            Point::Settled,
            "When a peer stood still and goes on, transfers are done or failed, each once, and those done are exact.",
            &["settled_twice", "last_byte_missing"],
            resumed,
        )
        .needs(&[writes])
        .faults(&[Fault::Stop, Fault::Resume]),
        Clause::new(
            "failure.others_unharmed",
            Point::Severed,
            "Transfers of other peers are done while one was killed, and after it was severed.",
            &["sever_takes_all"],
            others_unharmed,
        )
        .needs(&[writes, notes])
        .faults(&[Fault::Kill]),
        Clause::new(
            "failure.born_again",
            Point::Handshake,
            "A peer that was killed and opened again is another peer, and can be met at once.",
            &["incarnations_confused"],
            born_again,
        )
        .needs(&[writes, notes])
        .faults(&[Fault::Kill]),
    ],
};

/// Severs a peer, unless the backend has found out by itself that it is gone.
fn sever(world: &World, pair: &Pair) -> Verdict {
    if pair.one.down(pair.at_one).is_none()
        && let Err(breach) = pair.one.sever(pair.at_one)
    {
        // It may have been found out just now: the event waits to be polled.
        refused::<()>("severing a peer that is gone", Err(breach), &[ErrorKind::Misuse])?;
    }
    world.severed(&pair.one, pair.at_one)
}

/// Transfers that the peer makes fail. The kit looks at every outcome, here and everywhere.
fn kinds(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    for gone in ["closed", "severed", "region deregistered"] {
        let pair = world.meet(&one, &world.open("other")?)?;
        let lane = world.lane(&pair, 2048)?;
        let mut ids = volley(world, &lane, 20)?;
        match gone {
            "closed" => pair.other.close()?,
            "severed" => pair.other.sever(pair.at_other)?,
            _ => {
                pair.other.deregister(lane.remote.region)?;
                // To memory that is no more: some fabrics find that out when it is posted, some later, some never.
                let id = world.id();
                match one.submit(id, pair.at_one, Mode::Write, &[lane.segment(0, 0, 8)], None) {
                    Ok(true) => ids.push(id),
                    Ok(false) => {}
                    Err(breach) => {
                        let what = "a write to a region that is gone";
                        refused::<()>(what, Err(breach), &[ErrorKind::Peer])?;
                    }
                }
            }
        }
        // Without a bound of the contract's, for this side has not severed: what has not settled by then is severed.
        world.settle_down(&[&one, &pair.other])?;
        if one.down(pair.at_one).is_none() {
            sever(world, &pair)?;
        }
        ensure!(
            ids.iter().all(|id| one.settled(*id).is_some()),
            "a transfer to a peer that is down did not settle (the peer: {gone})"
        );
    }
    Ok(())
}

fn killed(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    for _ in 0..2 {
        let pair = world.meet(&one, &world.open("other")?)?;
        let lane = world.lane(&pair, 2048)?;
        volley(world, &lane, 40)?;
        a_while(world, &pair)?;
        world.inflict(Fault::Kill, &pair.other)?;
        // More, to a peer that is gone: posted, full or refused, but not for ever.
        for _ in 0..3 {
            let segments = [lane.segment(0, 0, 8)];
            if let Err(breach) = one.submit(world.id(), pair.at_one, Mode::Write, &segments, None) {
                let kinds = &[ErrorKind::Peer, ErrorKind::Misuse];
                refused::<()>("a write to a peer that was killed", Err(breach), kinds)?;
            }
        }
        sever(world, &pair)?;
        let post = one.submit(world.id(), pair.at_one, Mode::Write, &[], Some(&[]));
        refused("a notification to a peer that is down", post, &[ErrorKind::Misuse])?;
    }
    Ok(())
}

fn stopped(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    // Short writes find the peer between two of them, as a rule; long ones find it in the midst of one.
    for bytes in [40, 4 << 20] {
        let pair = world.meet(&one, &world.open("other")?)?;
        stopped_while_written_to(world, &pair, bytes)?;
    }
    Ok(())
}

/// The writes have so many bytes, or as many as one may have.
fn stopped_while_written_to(world: &World, pair: &Pair, bytes: u64) -> Verdict {
    const WRITES: u64 = 20;
    let bytes = bytes.min(pair.one.capabilities()?.limits.max_segment_bytes);
    let mut lane = world.lane(pair, (bytes + 8) * 2)?;
    let post = || {
        for index in 0..WRITES {
            let at = index * bytes / WRITES;
            let segments = [lane.segment(at, at, bytes)];
            if !pair.one.submit(world.id(), pair.at_one, Mode::Write, &segments, None)? {
                break;
            }
        }
        Verdict::Ok(())
    };
    post()?;
    a_while(world, pair)?;
    world.inflict(Fault::Stop, &pair.other)?;
    post()?;
    pair.one.sever(pair.at_one)?;
    let left = || Ok(pair.one.in_flight_to(pair.at_one).is_empty());
    world.wait_within(
        SEVER_BOUND,
        &[&pair.one],
        "all transfers to a stopped peer to settle",
        left,
    )?;
    // They settled, so this side's memory is its own again, and nothing of it may be sent any more.
    lane.local.refill(world.dice().next())?;
    world.severed(&pair.one, pair.at_one)?;
    world.inflict(Fault::Resume, &pair.other)?;
    // Some fabrics tell it, and then nothing is under way there; some never do.
    for _ in 0..40 {
        world.settle_down(&[&pair.one, &pair.other])?;
        if pair.other.down(pair.at_other).is_some() {
            break;
        }
    }
    is_unsent(&lane, "after a severed peer went on")
}

fn resumed(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 2048)?;
    let mut ids = volley(world, &lane, 10)?;
    world.inflict(Fault::Stop, &pair.other)?;
    for _ in 0..20 {
        pair.one.poll(4)?;
    }
    world.inflict(Fault::Resume, &pair.other)?;
    let settled = || Ok(ids.iter().all(|id| pair.one.settled(*id).is_some()));
    let both = [&pair.one, &pair.other];
    world.wait(&both, "transfers to a peer that stood still to settle", settled)?;
    world.settle_down(&both)?;
    for (index, id) in ids.drain(..).enumerate() {
        if matches!(pair.one.settled(id), Some(crate::suite::command::End::Done)) {
            let at = index as u64 * 48;
            let must = lane.local.expected(at, 40);
            ensure!(lane.remote.read(at, 40)? == must, "write {index} is done, but not exact");
        }
    }
    Ok(())
}

fn others_unharmed(world: &World) -> Verdict {
    let first = world.pair()?;
    let second = world.meet(&first.one, &world.open("third")?)?;
    let victim = world.lane(&first, 2048)?;
    let mut lane = world.lane(&second, 2048)?;
    volley(world, &victim, 20)?;
    world.inflict(Fault::Kill, &first.other)?;
    for round in 0..2 {
        let ids = volley(world, &lane, 20)?;
        let moved: Vec<_> =
            (0..ids.len() as u64).map(|i| lane.segment(i * 48, i * 48, 40)).collect();
        if round == 1 {
            sever(world, &first)?;
        }
        world.done(&second.one, &ids)?;
        lane.apply(Mode::Write, &moved);
        lane.check("of a peer beside one that was killed")?;
        lane.local.refill(world.dice().next())?;
    }
    greet(world, &second)
}

fn born_again(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let first = world.meet(&one, &world.open("other")?)?;
    let before = first.other.incarnation()?;
    let lane = world.lane(&first, 2048)?;
    volley(world, &lane, 10)?;
    world.inflict(Fault::Kill, &first.other)?;
    let second = world.meet(&one, &world.open("other")?)?;
    ensure!(before != second.other.incarnation()?, "two lives have one incarnation");
    ensure!(second.at_one != first.at_one, "two lives of a peer have one handle");
    greet(world, &second)?;
    let mut fresh = world.lane(&second, 128)?;
    let segment = fresh.segment(3, 4, 50);
    world.transfer(&mut fresh, Mode::Write, &[segment], None)?;
    fresh.check("of a peer that was born again")?;
    sever(world, &first)?;
    greet(world, &second)
}
