//! The steps of the handshake, and bytes that are none.

use kvx_core::ErrorKind;
use kvx_core::transfer::Mode;

use super::Group;
use crate::suite::clause::{Clause, Point, Verdict, ensure, notes, refused};
use crate::suite::side::Side;
use crate::suite::world::{Pair, World};

pub(crate) const GROUP: Group = Group {
    title: "Handshake",
    about: "Its messages may be repeated, cross, come late or be garbled.",
    clauses: &[
        Clause::new(
            "handshake.steps",
            Point::Handshake,
            "The initiator may post after `complete`, the acceptor after `finish`; both know the other by one handle.",
            &["initiator_waits_for_finish", "finish_gives_another_peer"],
            steps,
        )
        .needs(&[notes]),
        Clause::new(
            "handshake.repeated",
            Point::Handshake,
            "A message that is repeated gives the same handle, and changes nothing.",
            &["repeated_offer_makes_another_peer"],
            repeated,
        )
        .needs(&[notes]),
        Clause::new(
            "handshake.crossing",
            Point::Handshake,
            "When both sides offer, both exchanges may run to their end, in any order, and give one connection.",
            &["crossing_makes_two_peers"],
            crossing,
        )
        .needs(&[notes]),
        Clause::new(
            "handshake.garbled",
            Point::Handshake,
            "A message that is cut short is refused as the peer's fault, or as unsupported; with a bit flipped it may be taken; \
             nothing breaks, and the good one still works.",
            &["accept_panics", "cut_offer_accepted", "handshake_blames_the_caller"],
            garbled,
        )
        .needs(&[notes]),
        Clause::new(
            "handshake.wrong_step",
            Point::Handshake,
            "A message of one step is refused by the others, and so are bytes that are no message.",
            &["steps_mixed_up"],
            wrong_step,
        ),
        Clause::new(
            "handshake.reply_to_another",
            Point::Handshake,
            "A reply that answers no offer of this incarnation is refused as the peer's fault.",
            &["reply_to_another_accepted"],
            reply_to_another,
        ),
    ],
};

/// The kinds of error that a peer's bytes may give.
const PEERS_FAULT: &[ErrorKind] = &[ErrorKind::Peer, ErrorKind::Unsupported];

/// A bare notification each way arrives, once: there is one connection, and it works.
pub(super) fn greet(world: &World, pair: &Pair) -> Verdict {
    for pair in [pair.clone(), pair.flipped()] {
        greet_one_way(world, &pair)?;
    }
    Ok(())
}

fn greet_one_way(world: &World, pair: &Pair) -> Verdict {
    let heard = pair.other.notes().len();
    let note = world.note(&pair.one.capabilities()?, world.dice().next());
    let id = world.post(&pair.one, pair.at_one, Mode::Write, &[], Some(&note))?;
    world.done(&pair.one, &[id])?;
    let both = [&pair.one, &pair.other];
    world.wait(&both, "a greeting", || Ok(pair.other.notes().len() > heard))?;
    world.settle_down(&both)?;
    let notes = pair.other.notes().split_off(heard);
    ensure!(
        notes == [(pair.at_other, note)],
        "{} was greeted by {}, and heard {notes:?}, must hear it once, from {}",
        pair.other.name(),
        pair.one.name(),
        pair.at_other
    );
    Ok(())
}

fn two(world: &World) -> Verdict<(Side, Side)> {
    Ok((world.open_here("one")?, world.open("other")?))
}

fn steps(world: &World) -> Verdict {
    let (one, other) = two(world)?;
    let (at_other, reply) = other.accept(&one.offer()?)?;
    let (at_one, completion) = one.complete(&reply)?;
    let pair = Pair { one, other, at_one, at_other };
    greet_one_way(world, &pair)?;
    let finished = pair.other.finish(&completion)?;
    ensure!(finished == at_other, "`finish` gave {finished}, `accept` had given {at_other}");
    greet(world, &pair)
}

fn repeated(world: &World) -> Verdict {
    let (one, other) = two(world)?;
    let offer = one.offer()?;
    let (at_other, reply) = other.accept(&offer)?;
    let (again, _) = other.accept(&offer)?;
    ensure!(again == at_other, "an offer gave {at_other}, and repeated {again}");
    let (at_one, completion) = one.complete(&reply)?;
    let (again, _) = one.complete(&reply)?;
    ensure!(again == at_one, "a reply gave {at_one}, and repeated {again}");
    let pair = Pair { one, other, at_one, at_other };
    for round in 0..3 {
        let finished = pair.other.finish(&completion)?;
        ensure!(finished == at_other, "completion {round} gave {finished}, must be {at_other}");
        greet(world, &pair)?;
        // The whole of it once more, late, in the middle of traffic.
        let (late, reply) = pair.other.accept(&offer)?;
        ensure!(late == at_other, "a late offer gave {late}, must be {at_other}");
        let (late, _) = pair.one.complete(&reply)?;
        ensure!(late == at_one, "a late reply gave {late}, must be {at_one}");
        let (other_offer, _) = pair.other.accept(&pair.one.offer()?)?;
        ensure!(other_offer == at_other, "another offer gave {other_offer}, must be {at_other}");
    }
    greet(world, &pair)
}

/// Both sides' exchanges, interleaved as the bits say.
fn crossing(world: &World) -> Verdict {
    for _ in 0..4 {
        let (one, other) = two(world)?;
        let sides = [(&one, &other), (&other, &one)];
        let offers = [one.offer()?, other.offer()?];
        let mut bits = world.dice().next();
        let mut next = [Vec::new(), Vec::new()];
        let mut steps = [0, 0];
        // What each side calls the other, each time that it is told.
        let mut handles = [Vec::new(), Vec::new()];
        while steps != [3, 3] {
            let mut exchange = usize::from(bits & 1 == 1);
            bits >>= 1;
            if steps[exchange] == 3 {
                exchange = 1 - exchange;
            }
            let (initiator, acceptor) = sides[exchange];
            match steps[exchange] {
                0 => {
                    let (peer, reply) = acceptor.accept(&offers[exchange])?;
                    handles[1 - exchange].push(peer);
                    next[exchange] = reply;
                }
                1 => {
                    let (peer, completion) = initiator.complete(&next[exchange])?;
                    handles[exchange].push(peer);
                    next[exchange] = completion;
                }
                _ => handles[1 - exchange].push(acceptor.finish(&next[exchange])?),
            }
            steps[exchange] += 1;
        }
        let [at_one, at_other] = [handles[0][0], handles[1][0]];
        for (name, handles) in ["one", "other"].iter().zip(&handles) {
            ensure!(
                handles.iter().all(|handle| *handle == handles[0]),
                "{name} has several handles for one peer: {handles:?}"
            );
        }
        let pair = Pair { one, other, at_one, at_other };
        greet(world, &pair)?;
    }
    Ok(())
}

fn garbled(world: &World) -> Verdict {
    let (one, other) = two(world)?;
    let offer = one.offer()?;
    let cuts = |length: usize| {
        let mut cuts: Vec<usize> = (0..length.min(48)).collect();
        cuts.extend(
            (0..32).map(|_| usize::try_from(world.dice().below(length as u64)).unwrap_or(0)),
        );
        cuts
    };
    for cut in cuts(offer.len()) {
        let what = format!("an offer of {} bytes cut to {cut}", offer.len());
        refused(&what, other.accept(&offer[..cut]), PEERS_FAULT)?;
    }
    for _ in 0..64 {
        let mut flipped = offer.clone();
        let bit = usize::try_from(world.dice().below(offer.len() as u64 * 8)).unwrap_or(0);
        flipped[bit / 8] ^= 1 << (bit % 8);
        // It may have named another peer: one that never comes.
        if let Err(breach) = other.accept(&flipped) {
            refused::<()>("an offer with a bit flipped", Err(breach), PEERS_FAULT)?;
        }
    }
    let (at_other, reply) = other.accept(&offer)?;
    for cut in cuts(reply.len()) {
        let what = format!("a reply of {} bytes cut to {cut}", reply.len());
        refused(&what, one.complete(&reply[..cut]), PEERS_FAULT)?;
    }
    let (at_one, completion) = one.complete(&reply)?;
    for cut in cuts(completion.len()) {
        let what = format!("a completion of {} bytes cut to {cut}", completion.len());
        refused(&what, other.finish(&completion[..cut]), PEERS_FAULT)?;
    }
    other.finish(&completion)?;
    greet(world, &Pair { one, other, at_one, at_other })
}

fn wrong_step(world: &World) -> Verdict {
    let (one, other) = two(world)?;
    let offer = one.offer()?;
    let most = kvx_core::handshake::HandshakeBytes::MAX_BYTES;
    let strangers = [vec![], vec![0; 64], world.dice().bytes(64), world.dice().bytes(most)];
    for stranger in &strangers {
        let what = format!("{} bytes that are no handshake", stranger.len());
        refused(&what, other.accept(stranger), PEERS_FAULT)?;
        refused(&what, one.complete(stranger), PEERS_FAULT)?;
        refused(&what, other.finish(stranger), PEERS_FAULT)?;
    }
    refused("an offer, taken for a reply", other.complete(&offer), PEERS_FAULT)?;
    refused("an offer, taken for a completion", other.finish(&offer), PEERS_FAULT)?;
    let (_, reply) = other.accept(&offer)?;
    refused("a reply, taken for an offer", one.accept(&reply), PEERS_FAULT)?;
    refused("a reply, taken for a completion", one.finish(&reply), PEERS_FAULT)?;
    let (_, completion) = one.complete(&reply)?;
    refused("a completion, taken for an offer", other.accept(&completion), PEERS_FAULT)?;
    refused("a completion, taken for a reply", other.complete(&completion), PEERS_FAULT)?;
    Ok(())
}

fn reply_to_another(world: &World) -> Verdict {
    let (one, other) = two(world)?;
    let third = world.open_here("third")?;
    let (_, reply) = other.accept(&one.offer()?)?;
    refused("a reply to another's offer", third.complete(&reply), PEERS_FAULT)?;
    third.offer()?;
    refused("a reply to another's offer", third.complete(&reply), PEERS_FAULT)?;
    let (_, completion) = one.complete(&reply)?;
    refused("a completion for another", third.finish(&completion), PEERS_FAULT)?;
    other.finish(&completion)?;
    Ok(())
}
