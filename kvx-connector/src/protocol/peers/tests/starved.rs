//! A limit that leaves nothing for a connection: it may pass, so it is tried again, and whoever waits is not left in the dark.

use kvx_core::ErrorKind;

use super::engines::Plan;
use super::world::{Engine, MS, SEC, Said, Starved, World, at_port};
use crate::protocol::peers::{Message, Role, WantId};

fn pair() -> (World, Engine, Engine) {
    let mut world = World::new(1);
    let decode = world.start(&Plan::new("decode", 1, 1), 100);
    let prefill = world.start(&Plan::new("prefill", 1, 1), 200);
    (world, decode, prefill)
}

/// For a minute, as a program's.
fn want(world: &mut World, rank: usize, engine: &Engine) -> WantId {
    let (name, address) = (engine.plan.name.clone(), at_port(engine));
    world.want_with(rank, &name, address, Some(engine.life), Role::Consumer, SEC * 60)
}

/// Whoever waits is told of it after two seconds or somewhat more, by what it was and how it is lifted; who comes then waits as long,
/// and another attempt is made for it.
#[test]
fn a_limit_is_told_to_those_who_have_waited_for_a_while() {
    for (what, of_the_peer) in
        [(Starved::Fabric, false), (Starved::Fabric, true), (Starved::Dialling, false)]
    {
        let (mut world, decode, prefill) = pair();
        let rank = decode.ranks[0];
        let who = if of_the_peer { prefill.ranks[0] } else { rank };
        world.starved.insert(who, what);
        for round in 0..3 {
            let id = want(&mut world, rank, &prefill);
            world.run(MS * 1990);
            assert!(world.outcome(rank, id).is_none(), "{what:?} {of_the_peer} {round}: too early");
            world.run(SEC * 8);
            let error = world.refused(rank, id);
            assert_eq!(error.kind(), ErrorKind::Resources, "{error}");
            assert!(error.to_string().contains("no descriptor"), "{error}");
            assert!(error.remedy().is_some_and(|it| it.contains("ulimit -n")), "{error}");
        }
        // Between attempts there are pauses.
        let said = world.processes[rank].said.iter();
        let tried = |said: &Said| matches!(said, Said::Dialled | Said::Sent(Message::Meet { .. }));
        let tried = said.filter(|(_, said)| tried(said)).count();
        assert!((6..50).contains(&tried), "{what:?} {of_the_peer}: {tried} attempts");
    }
}

/// What was a matter of load costs nobody more than the wait.
#[test]
fn a_limit_that_passes_is_told_to_nobody() {
    for what in [Starved::Fabric, Starved::Dialling] {
        let (mut world, decode, prefill) = pair();
        let rank = decode.ranks[0];
        world.starved.insert(rank, what);
        let ids: Vec<_> = (0..10).map(|_| want(&mut world, rank, &prefill)).collect();
        world.run(MS * 1500);
        world.starved.clear();
        world.run(SEC * 3);
        ids.into_iter().for_each(|id| drop(world.ready(rank, id)));
        // And what was before is not told later: not even to who waits for something else.
        let id = want(&mut world, rank, &prefill);
        world.run(SEC);
        world.ready(rank, id);
    }
}
