//! How many, how long, how much: one bad peer harms only itself.

use std::time::{Duration, Instant};

use kvx_core::id::Incarnation;
use kvx_core::{ErrorKind, Retry};

use super::engines::Plan;
use super::world::{Engine, MS, SEC, Said, World, at, at_port};
use crate::protocol::peers::{
    GoneReason, Input, Message, Output, PeerState, Place, Remote, Role, SessionId,
};

fn pair() -> (World, Engine, Engine) {
    let mut world = World::new(1);
    let decode = world.start(&Plan::new("decode", 1, 1), 100);
    let prefill = world.start(&Plan::new("prefill", 1, 1), 200);
    (world, decode, prefill)
}

#[test]
fn a_hundred_callers_share_one_attempt() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    let wants: Vec<_> = (0..100).map(|_| world.want(rank, &prefill, Role::Consumer)).collect();
    world.run(SEC);
    wants.into_iter().for_each(|id| drop(world.ready(rank, id)));
    let stats = world.processes[rank].peers.stats();
    assert_eq!((stats.fetches, stats.meetings, stats.ready), (1, 1, 100));
    assert_eq!(world.sent(rank, |message| matches!(message, Message::Meet { .. })), 1);
    let dialled = world.processes[rank].said.iter();
    assert_eq!(dialled.filter(|(_, said)| matches!(said, Said::Dialled)).count(), 2);
}

#[test]
fn two_that_want_each_other_at_once_have_one_connection() {
    let (mut world, decode, prefill) = pair();
    let (one, other) = (decode.ranks[0], prefill.ranks[0]);
    let first = world.want(one, &prefill, Role::Consumer);
    let second = world.want(other, &decode, Role::Consumer);
    world.run(SEC);
    world.ready(one, first);
    world.ready(other, second);
    for process in [one, other] {
        assert_eq!(world.processes[process].fabric.given.len(), 1);
        assert!(world.gone(process).is_empty());
        assert_eq!(world.processes[process].peers.stats().answered, 1);
    }
}

/// What is dead, or does not answer, holds up nobody.
#[test]
fn dead_ones_do_not_hold_up_the_living() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    for n in 0..500 {
        let name = kvx_core::card::EngineName::new(format!("dead-{n}")).unwrap();
        let address = at(10_000 + n);
        world.silent.insert(address.clone());
        world.want_with(rank, &name, address, None, Role::Consumer, SEC * 20);
    }
    let began = world.now;
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC * 2);
    world.ready(rank, id);
    let (when, _) = *world.processes[rank]
        .said
        .iter()
        .find(|(_, said)| matches!(said, Said::Ready(..)))
        .unwrap();
    // 500 that are young for 100 ms each, 64 at a time.
    assert!(when - began < MS * 1100, "{:?}", when - began);
    // A second engine, while all of them are being tried again and again.
    world.run(SEC * 6);
    let other = world.start(&Plan::new("other", 1, 1), 300);
    let began = world.now;
    let id = world.want(rank, &other, Role::Consumer);
    world.run(SEC * 2);
    world.ready(rank, id);
    let last = world.processes[rank].said.iter().rev();
    let (when, _) = last.clone().find(|(_, said)| matches!(said, Said::Ready(..))).unwrap();
    assert!(*when - began < MS * 1100, "{:?}", *when - began);
    world.run(SEC * 20);
    let stats = world.processes[rank].peers.stats();
    assert_eq!(stats.failed, 500);
}

#[test]
fn a_refusal_is_remembered_for_a_while() {
    let (mut world, decode, _) = pair();
    let rank = decode.ranks[0];
    let mut plan = Plan::new("other", 1, 1);
    plan.facts = plan.facts.with("model", "large").unwrap();
    let other = world.start(&plan, 300);
    let ask = |world: &mut World, engine: &Engine| {
        let id = world.want(rank, engine, Role::Consumer);
        world.run(MS * 50);
        (world.outcome(rank, id).unwrap().is_ok(), world.processes[rank].peers.stats().fetches)
    };
    assert_eq!(ask(&mut world, &other), (false, 1));
    assert_eq!(ask(&mut world, &other), (false, 1));
    // It is asked anew once that time is over, and may have been put right.
    world.kill_engine(&other);
    let other = world.start(&Plan::new("other", 1, 1), 300);
    assert_eq!(ask(&mut world, &other), (false, 1));
    world.run(SEC * 10);
    assert_eq!(ask(&mut world, &other), (true, 2));
}

#[test]
fn pauses_grow_and_end_with_the_want() {
    let (mut world, decode, _) = pair();
    let rank = decode.ranks[0];
    let name = kvx_core::card::EngineName::new("nobody").unwrap();
    let id = world.want_with(rank, &name, at(999), None, Role::Consumer, SEC * 20);
    world.run(SEC * 21);
    let error = world.refused(rank, id);
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Backoff));
    assert!(error.to_string().contains("cannot be reached: refused"), "{error}");
    assert_eq!(error.to_string().matches("look who listens there").count(), 1, "{error}");
    let said = world.processes[rank].said.iter();
    let dialled: Vec<Duration> =
        said.filter(|(_, said)| matches!(said, Said::Dialled)).map(|(when, _)| *when).collect();
    assert!((8..16).contains(&dialled.len()), "{dialled:?}");
    let pauses: Vec<_> = dialled.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses[0] < MS * 60 && *pauses.last().unwrap() > SEC * 2, "{pauses:?}");
    assert_eq!(world.processes[rank].peers.entries(), 0);
}

/// Promise 6: a bad frame ends its session, and nothing else.
#[test]
fn a_bad_frame_ends_its_session_alone() {
    let (mut world, decode, prefill) = pair();
    let producer = prefill.ranks[0];
    let id = world.want(decode.ranks[0], &prefill, Role::Consumer);
    world.run(SEC);
    world.ready(decode.ranks[0], id);
    let mut out = Vec::new();
    let now = world.now;
    let peers = &mut world.processes[producer].peers;
    let remote = Remote {
        engine: kvx_core::card::EngineName::new("bad").unwrap(),
        incarnation: Incarnation::from_bytes([9; 16]),
        rank: Some(Place { replica: 0, rank: 0 }),
    };
    let session = SessionId(1 << 40);
    peers.step(now, Input::SessionUp { session, remote, dialled: None }, &mut out);
    peers.step(now, Input::Message { session, bytes: b"nonsense".to_vec() }, &mut out);
    assert!(
        matches!(out[..], [Output::Send { .. }, Output::CloseSession(closed)] if closed == session)
    );
    assert_eq!(peers.stats().malformed, 1);
    let states: Vec<_> = peers.status().into_iter().map(|status| status.state).collect();
    assert!(states.contains(&PeerState::Connected), "{states:?}");
}

/// Strangers fill no table: what is over its limit is turned away, and what was there goes on.
#[test]
fn tables_are_bounded() {
    let (mut world, decode, prefill) = pair();
    world.limits.peers = 50;
    world.limits.sites = 20;
    let victim = world.start(&Plan::new("victim", 1, 1), 300).ranks[0];
    let id = world.want(victim, &prefill, Role::Consumer);
    world.run(SEC);
    world.ready(victim, id);
    let now = world.now;
    let peers = &mut world.processes[victim].peers;
    let mut out = Vec::new();
    for n in 0..1000_u64 {
        let mut life = [7; 16];
        life[..8].copy_from_slice(&n.to_le_bytes());
        let remote = Remote {
            engine: kvx_core::card::EngineName::new(format!("stranger-{n}")).unwrap(),
            incarnation: Incarnation::from_bytes(life),
            rank: Some(Place { replica: 0, rank: 0 }),
        };
        let session = SessionId((1 << 40) + n);
        peers.step(now, Input::SessionUp { session, remote, dialled: None }, &mut out);
    }
    assert_eq!(peers.status().len(), 50);
    let closed = out.iter().filter(|output| matches!(output, Output::CloseSession(_))).count();
    assert_eq!(closed, 951);
    for n in 0..100 {
        let name = kvx_core::card::EngineName::new(format!("nobody-{n}")).unwrap();
        world.want_with(victim, &name, at(20_000 + n), None, Role::Consumer, SEC);
    }
    let failed = world.processes[victim].peers.stats().failed;
    assert_eq!(failed, 81, "one engine is known, and 19 are asked for");
    let id = world.want(victim, &prefill, Role::Consumer);
    world.run(SEC);
    world.ready(victim, id);
    drop(decode);
}

#[test]
fn long_cards_come_in_parts() {
    let mut world = World::new(1);
    let decode = world.start(&Plan::new("decode", 1, 1), 100);
    let mut long = Plan::new("long", 4, 1);
    long.key_bytes = 4000;
    let long = world.start(&long, 200);
    let id = world.want(decode.ranks[0], &long, Role::Consumer);
    world.run(SEC);
    let route = world.ready(decode.ranks[0], id);
    assert_eq!(route.links.len(), 4);
    let parts = world.sent(long.scheduler, |message| matches!(message, Message::Cards { .. }));
    assert!(parts > 2, "{parts} parts");
}

#[test]
fn who_only_serves_cards_meets_nobody() {
    let (mut world, decode, prefill) = pair();
    let id = world.want(decode.scheduler, &prefill, Role::Consumer);
    assert_eq!(world.refused(decode.scheduler, id).kind(), ErrorKind::Misuse);
}

#[test]
fn what_is_forgotten_leaves_nothing() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let connection = world.ready(rank, id).links[0].connection;
    let late =
        world.want_with(rank, &prefill.plan.name.clone(), at(777), None, Role::Consumer, SEC * 5);
    world.step(rank, Input::Forget(prefill.plan.name.clone()));
    assert_eq!(world.refused(rank, late).kind(), ErrorKind::Closed);
    assert_eq!(world.gone(rank), [GoneReason::Forgotten]);
    world.run(SEC);
    assert_eq!(world.processes[rank].peers.entries(), 0);
    let given = &world.processes[rank].fabric.given[&connection.peer];
    assert_eq!((given.disconnected, given.severed), (1, 0));
    // The other side was told, and has let go, too.
    assert_eq!(world.gone(prefill.ranks[0]), [GoneReason::Bye]);
    assert_eq!(world.processes[prefill.ranks[0]].peers.entries(), 0);
    drop(at_port(&prefill));
}

/// 1,000 peers under 64 KiB each, beyond their cards, and over 500 handshakes a second. In a build without optimisation only
/// that it works is checked; `--release -- --nocapture` gives the figures.
#[test]
fn a_thousand_peers() {
    let mut world = World::new(1);
    let mut plan = Plan::new("decode", 1, 1);
    plan.model = kvx_core::layout::ModelGeometry::preset("llama-3.1-8b").unwrap();
    plan.facts = plan.model.facts().unwrap();
    let decode = world.start(&plan, 1);
    let rank = decode.ranks[0];
    let count = if cfg!(debug_assertions) { 50 } else { 1000 };
    let engines: Vec<_> = (0..count)
        .map(|n| {
            plan.name = kvx_core::card::EngineName::new(format!("prefill-{n}")).unwrap();
            world.start(&plan, 100 + 2 * n)
        })
        .collect();
    world.checked = false;
    let began = Instant::now();
    let wants: Vec<_> =
        engines.iter().map(|engine| world.want(rank, engine, Role::Consumer)).collect();
    world.run(SEC * 5);
    let took = began.elapsed();
    world.processes.iter().for_each(|process| super::checks::check(&process.peers));
    wants.into_iter().for_each(|id| drop(world.ready(rank, id)));
    let status = world.processes[rank].peers.status();
    let most = status.iter().map(|status| status.bytes).max().unwrap();
    let rate = f64::from(count) / took.as_secs_f64();
    println!(
        "{count} peers: {rate:.0} handshakes a second, both sides and their rig; {most} bytes of each"
    );
    assert_eq!(status.len(), usize::from(count));
    assert!(most < 64 * 1024, "{most}");
    // Both sides together; the figure is a tenth of what was measured.
    assert!(cfg!(debug_assertions) || rate > 100.0, "{rate}");
}
