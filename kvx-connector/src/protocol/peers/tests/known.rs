//! Known failures of connectors, as far as they are of this layer, each with the right result.

use std::sync::Arc;

use kvx_core::ErrorKind;
use kvx_core::card::EngineName;
use kvx_core::facts::Facts;
use kvx_core::layout::{Dtype, ModelGeometry};

use super::engines::{FAB, Plan};
use super::world::{Engine, MS, SEC, Said, World, at, at_port};
use crate::protocol::peers::{
    Connection, GoneReason, Input, Message, PeerState, Role, Route, WantId,
};

impl World {
    /// What became of a want.
    pub(super) fn outcome(
        &self,
        process: usize,
        id: WantId,
    ) -> Option<Result<Arc<Route>, Arc<kvx_core::Error>>> {
        self.processes[process].said.iter().find_map(|(_, said)| match said {
            Said::Ready(ready, route) if *ready == id => Some(Ok(Arc::clone(route))),
            Said::Failed(failed, error) if *failed == id => Some(Err(Arc::clone(error))),
            _ => None,
        })
    }

    pub(super) fn ready(&self, process: usize, id: WantId) -> Arc<Route> {
        self.outcome(process, id).expect("it has ended").unwrap_or_else(|error| panic!("{error}"))
    }

    pub(super) fn refused(&self, process: usize, id: WantId) -> Arc<kvx_core::Error> {
        self.outcome(process, id).expect("it has ended").expect_err("it was refused")
    }

    pub(super) fn gone(&self, process: usize) -> Vec<GoneReason> {
        let said = self.processes[process].said.iter();
        said.filter_map(|(_, said)| match said {
            Said::Gone(_, reason) => Some(*reason),
            _ => None,
        })
        .collect()
    }

    /// How many messages of a kind a process has sent.
    pub(super) fn sent(&self, process: usize, kind: impl Fn(&Message) -> bool) -> usize {
        let said = self.processes[process].said.iter();
        said.filter(|(_, said)| matches!(said, Said::Sent(message) if kind(message))).count()
    }
}

fn meets(message: &Message) -> bool {
    matches!(message, Message::Meet { .. })
}

fn asks(message: &Message) -> bool {
    matches!(message, Message::GetCards { .. })
}

/// A consumer and a producer with one rank each, and another producer.
fn pair() -> (World, Engine, Engine) {
    let mut world = World::new(1);
    let decode = world.start(&Plan::new("decode", 1, 1), 100);
    let prefill = world.start(&Plan::new("prefill", 1, 1), 200);
    (world, decode, prefill)
}

/// Known failure 15 (vllm#23587): a layout that does not fit is refused by name, and the next engine is served.
#[test]
fn a_layout_that_does_not_fit_refuses_one_engine() {
    let (mut world, decode, prefill) = pair();
    let mut other = Plan::new("other", 1, 1);
    other.model = ModelGeometry::llama_like(2, 4, 8, Dtype::F16).unwrap();
    let other = world.start(&other, 300);
    let rank = decode.ranks[0];
    let bad = world.want(rank, &other, Role::Consumer);
    let good = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let error = world.refused(rank, bad);
    let mismatch = error.as_mismatch().unwrap().to_string();
    assert!(mismatch.contains("dtype") && mismatch.contains("f16"), "{mismatch}");
    assert!(error.to_string().contains("engine=other"), "{error}");
    assert_eq!(world.ready(rank, good).links.len(), 1);
}

/// Known failure 17 (vllm PR#29503; llm-d#499): each fact that differs has an error of its own.
#[test]
fn each_fact_that_differs_is_named() {
    let (mut world, decode, _) = pair();
    let facts = [
        (Facts::MODEL, "other"),
        (Facts::KV_DTYPE, "fp8"),
        (Facts::LAYERS, "3"),
        (Facts::KV_HEADS, "5"),
        (Facts::ENGINE_VERSION, "7"),
    ];
    for (n, (fact, value)) in facts.into_iter().enumerate() {
        let mut plan = Plan::new(&format!("other-{n}"), 1, 1);
        plan.facts = plan.facts.with(fact, value).unwrap();
        let port = 300 + 10 * u16::try_from(n).unwrap();
        let other = world.start(&plan, port);
        let id = world.want(decode.ranks[0], &other, Role::Consumer);
        world.run(SEC);
        let error = world.refused(decode.ranks[0], id);
        assert_eq!(error.kind(), ErrorKind::Config);
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!((&*mismatch.field, mismatch.left.1.as_str()), (fact, value));
        // It was refused by the card: not one rank was dialled.
        assert_eq!(world.sent(decode.ranks[0], meets), 0);
    }
}

/// Known failure 18 (vllm PR#49230): what only one side has, and does not declare as its own, is refused.
#[test]
fn layers_of_one_side_only_are_refused() {
    let (mut world, decode, _) = pair();
    let mut plan = Plan::new("other", 1, 1);
    plan.model = ModelGeometry::llama_like(3, 4, 8, Dtype::Bf16).unwrap();
    let other = world.start(&plan, 300);
    let mut draft = Plan::new("draft", 1, 1);
    draft.draft = true;
    let draft = world.start(&draft, 400);
    let rank = decode.ranks[0];
    let bad = world.want(rank, &other, Role::Consumer);
    let good = world.want(rank, &draft, Role::Consumer);
    world.run(SEC);
    let error = world.refused(rank, bad).to_string();
    assert!(error.contains("no such tensor"), "{error}");
    world.ready(rank, good);
}

/// Known failure 25 (vllm PR#22976, vllm#52913, vllm#40674): with stages, each rank meets those that have its layers.
#[test]
fn stages_meet_whom_they_need() {
    let mut world = World::new(1);
    let prefill = world.start(&Plan::new("prefill", 2, 2), 100);
    let one = world.start(&Plan::new("one", 1, 1), 200);
    let two = world.start(&Plan::new("two", 2, 2), 300);
    let all = world.want(one.ranks[0], &prefill, Role::Consumer);
    let mine: Vec<_> =
        two.ranks.iter().map(|rank| world.want(*rank, &prefill, Role::Consumer)).collect();
    world.run(SEC);
    let ranks = |route: &Route| route.links.iter().map(|link| link.rank).collect::<Vec<_>>();
    let route = world.ready(one.ranks[0], all);
    assert_eq!(ranks(&route), [0, 1, 2, 3]);
    assert!(route.confirms.iter().all(|confirm| confirm.hears == [0]));
    for (n, (rank, id)) in two.ranks.iter().zip(mine).enumerate() {
        let route = world.ready(*rank, id);
        assert_eq!(ranks(&route), [n]);
        assert_eq!((route.confirms[0].rank, &*route.confirms[0].hears), (n, &[n][..]));
    }
}

/// Whom a producer rank hears is the same for all consumer ranks: known failure 78 seen from here (vllm PR#46332).
#[test]
fn all_ranks_agree_on_who_is_heard() {
    let mut world = World::new(1);
    let prefill = world.start(&Plan::new("prefill", 2, 1), 100);
    let decode = world.start(&Plan::new("decode", 4, 1), 200);
    let wants: Vec<_> =
        decode.ranks.iter().map(|rank| world.want(*rank, &prefill, Role::Consumer)).collect();
    let writers: Vec<_> =
        prefill.ranks.iter().map(|rank| world.want(*rank, &decode, Role::Producer)).collect();
    world.run(SEC);
    for (n, (rank, id)) in decode.ranks.iter().zip(wants).enumerate() {
        let route = world.ready(*rank, id);
        let half = n / 2;
        assert_eq!(route.links[0].rank, half);
        assert_eq!(route.confirms.len(), 1);
        assert_eq!(
            (route.confirms[0].rank, &*route.confirms[0].hears),
            (half, &[2 * half, 2 * half + 1][..])
        );
    }
    for (n, (rank, id)) in prefill.ranks.iter().zip(writers).enumerate() {
        let route = world.ready(*rank, id);
        let readers: Vec<_> = route.links.iter().map(|link| link.rank).collect();
        assert_eq!(readers, [2 * n, 2 * n + 1]);
        assert!(route.confirms.iter().all(|confirm| confirm.hears == [n]));
    }
}

/// Known failures 26 and 77 (vllm PR#18495, vllm#20965): with replicas, every rank is one of its own and is met as such.
#[test]
fn each_replica_is_met_by_its_own_ranks() {
    let mut world = World::new(1);
    let mut plan = Plan::with_dp("prefill", 2, 1, 2);
    plan.blocks = 20;
    let prefill = world.start(&plan, 100);
    let decode = world.start(&Plan::new("decode", 1, 1), 200);
    let rank = decode.ranks[0];
    let mut met = std::collections::BTreeSet::new();
    for replica in 0..2 {
        let (name, address) = (plan.name.clone(), at_port(&prefill));
        let id = world.want_replica(rank, &name, replica, address, None, Role::Consumer, SEC);
        world.run(SEC);
        let route = world.ready(rank, id);
        assert_eq!((route.replica, route.links.len()), (replica, 2));
        met.extend(route.links.iter().map(|link| link.incarnation));
    }
    let all: Vec<_> =
        prefill.ranks.iter().map(|rank| world.processes[*rank].remote.incarnation).collect();
    assert_eq!(met, all.into_iter().collect());
    let missing =
        world.want_replica(rank, &plan.name, 2, at_port(&prefill), None, Role::Consumer, SEC);
    world.run(SEC * 2);
    let error = world.refused(rank, missing).to_string();
    assert!(error.contains("replica=2"), "{error}");
}

/// Known failure 27 (llm-d#759): eight producers and two consumers, all at once.
#[test]
fn many_meet_at_once() {
    let mut world = World::new(1);
    let engine =
        |world: &mut World, name: &str, tp, port| world.start(&Plan::new(name, tp, 1), port);
    let decodes = [engine(&mut world, "d0", 4, 100), engine(&mut world, "d1", 4, 120)];
    let prefills: Vec<_> =
        (0..8).map(|n| engine(&mut world, &format!("p{n}"), 1, 200 + 10 * n)).collect();
    let mut wants = Vec::new();
    for (n, prefill) in prefills.iter().enumerate() {
        for rank in &decodes[n % 2].ranks {
            wants.push((*rank, world.want(*rank, prefill, Role::Consumer)));
        }
    }
    world.run(SEC);
    assert_eq!(wants.len(), 32);
    wants.into_iter().for_each(|(rank, id)| drop(world.ready(rank, id)));
}

/// Known failures 68, 69, 73 and 75 (vllm#49238, smg#2382, vllm#58063, vllm#23086): restarted at the same address with more
/// blocks, while the old connection does not even break. The old life is ended before the new one is met.
#[test]
fn a_restart_at_the_same_address() {
    let (mut world, decode, prefill) = pair();
    world.weather.unnoticed = 1024;
    let rank = decode.ranks[0];
    let before = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let before = world.ready(rank, before);
    world.kill_engine(&prefill);
    let mut plan = prefill.plan.clone();
    plan.blocks = 20;
    let again = world.start(&plan, prefill.port);
    world.run(MS * 100);
    let after = world.want(rank, &again, Role::Consumer);
    world.run(SEC);
    let after = world.ready(rank, after);
    assert_eq!(after.life, again.life);
    let [old, new] = [&before.links[0], &after.links[0]];
    assert_ne!((old.incarnation, old.connection), (new.incarnation, new.connection));
    assert_eq!(*new.card.layout(), plan.layouts(0)[0]);
    let said = &world.processes[rank].said;
    let place = |wanted: &dyn Fn(&Said) -> bool| said.iter().position(|(_, said)| wanted(said));
    let ended = place(&|said| matches!(said, Said::Ended(c) if *c == old.connection)).unwrap();
    let gone = place(
        &|said| matches!(said, Said::Gone(Some(c), GoneReason::Superseded) if *c == old.connection),
    );
    let met = place(&|said| matches!(said, Said::Met(c) if *c == new.connection)).unwrap();
    assert!(ended < met && gone.unwrap() < met);
    // A request that speaks of the old life is told so.
    let stale = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let error = world.refused(rank, stale);
    assert_eq!(error.as_mismatch().unwrap().field, "life");
}

/// Known failure 69 from the other side: the consumer restarts, and the producer takes its new life for what it is.
#[test]
fn the_one_who_reads_restarts() {
    let (mut world, decode, prefill) = pair();
    world.weather.unnoticed = 1024;
    let id = world.want(decode.ranks[0], &prefill, Role::Consumer);
    world.run(SEC);
    world.ready(decode.ranks[0], id);
    world.kill_engine(&decode);
    let again = world.start(&decode.plan, decode.port);
    let id = world.want(again.ranks[0], &prefill, Role::Consumer);
    world.run(SEC * 8);
    world.ready(again.ranks[0], id);
    let producer = prefill.ranks[0];
    assert_eq!(world.gone(producer).len(), 1);
    let status = world.processes[producer].peers.status();
    assert_eq!(status.len(), 1);
    assert_eq!(
        status[0].incarnation,
        world.processes[again.ranks[0]].remote.incarnation.to_string()
    );
}

/// Known failure 70 (vllm-backport#33): a fixed pair loses its connection, its sessions, or both, and meets again.
#[test]
fn a_fixed_pair_meets_again() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    let mut last: Option<Connection> = None;
    for round in 0..9 {
        let id = world.want(rank, &prefill, Role::Consumer);
        world.run(SEC * 2);
        let connection = world.ready(rank, id).links[0].connection;
        if round % 3 > 0 {
            assert_ne!(Some(connection), last, "round {round}");
        }
        last = Some(connection);
        match round % 3 {
            0 => world.break_fabric(rank, prefill.ranks[0]),
            1 => {
                world.break_fabric(rank, prefill.ranks[0]);
                (0..3).for_each(|_| world.cut(rank));
            }
            _ => (0..3).for_each(|_| world.cut(rank)),
        }
        world.run(MS * 100);
    }
}

/// Known failure 71 (nixl#1983): what fails once is tried again, while somebody wants it.
#[test]
fn what_fails_first_is_tried_again() {
    let (mut world, decode, prefill) = pair();
    world.weather.fail_step = 1024;
    let rank = decode.ranks[0];
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(MS * 300);
    assert!(world.outcome(rank, id).is_none());
    let status = world.processes[rank].peers.status();
    assert!(status[0].last_error.as_ref().unwrap().contains("bad luck"), "{status:?}");
    world.weather.fail_step = 0;
    world.run(SEC);
    world.ready(rank, id);
    assert!(world.processes[rank].peers.stats().failures >= 2);
}

/// Known failures 72 and 73 (nixl#795, vllm#58063): a peer that is not heard of is ended within its bound, though its
/// connection never breaks and nothing comes in its place.
#[test]
fn who_is_not_heard_of_is_ended() {
    let (mut world, decode, prefill) = pair();
    world.weather.unnoticed = 1024;
    let rank = decode.ranks[0];
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let connection = world.ready(rank, id).links[0].connection;
    world.kill_engine(&prefill);
    world.run(SEC * 3);
    let alone = world.processes[rank].peers.status();
    assert_eq!(alone[0].state, PeerState::Alone);
    let bound = world.limits.alone + SEC;
    world.run(bound);
    assert_eq!(world.gone(rank), [GoneReason::Lost]);
    assert_eq!(world.processes[rank].fabric.given[&connection.peer].severed, 1);
    assert!(world.processes[rank].peers.status().is_empty());
    let again = world.start(&prefill.plan, prefill.port);
    let id = world.want(rank, &again, Role::Consumer);
    world.run(SEC);
    world.ready(rank, id);
}

/// Known failure 74 (vllm PR#55471): the other side says that its cards have changed, and they are fetched anew.
#[test]
fn changed_cards_are_fetched_anew() {
    let (mut world, decode, mut prefill) = pair();
    let rank = decode.ranks[0];
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let before = world.ready(rank, id);
    let asked = world.sent(rank, asks);
    prefill.plan.key_bytes = 20;
    world.serve(&prefill);
    world.run(MS * 10);
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let after = world.ready(rank, id);
    assert!(world.sent(rank, asks) > asked);
    assert_eq!(world.gone(rank), [GoneReason::Changed]);
    assert_eq!(after.links[0].incarnation, before.links[0].incarnation);
    assert_ne!(after.links[0].connection, before.links[0].connection);
    assert_eq!(after.links[0].card.offers()[0].keys()[0].as_bytes().len(), 20);
}

/// Known failures 76 and 77 (vllm#27083, vllm#20965, ray#57757): another engine is at the address.
#[test]
fn another_engine_at_the_address() {
    let (mut world, decode, prefill) = pair();
    let (rank, wanted) = (decode.ranks[0], EngineName::new("wanted").unwrap());
    let id = world.want_with(rank, &wanted, at_port(&prefill), None, Role::Consumer, SEC);
    world.run(MS * 100);
    let error = world.refused(rank, id);
    assert_eq!(error.kind(), ErrorKind::Peer);
    let text = error.to_string();
    for part in ["wanted", "prefill", "10.0.0.1:200"] {
        assert!(text.contains(part), "{text} does not name {part}");
    }
    // Its own address is no other engine's.
    let own = world.want_with(
        decode.ranks[0],
        &decode.plan.name.clone(),
        at(101),
        None,
        Role::Consumer,
        SEC,
    );
    world.run(MS * 100);
    assert!(world.refused(rank, own).to_string().contains("own"));
}

/// Cards say who there was when they were asked for: an answer of an engine that has died meanwhile may come after its next life is
/// known. What they leave out is not over for good; found by the simulation of whole engines (seed 4000).
#[test]
fn old_cards_end_no_life_for_good() {
    let (mut world, decode, older) = pair();
    let rank = decode.ranks[0];
    let newer = world.start(&older.plan, 300);
    let id = world.want(rank, &newer, Role::Consumer);
    world.run(SEC);
    assert_eq!(world.ready(rank, id).life, newer.life);
    // The older one's rank has died, and what it said of itself is still on its way; all that there is with the newer breaks.
    world.kill(older.ranks[0]);
    world.break_fabric(rank, newer.ranks[0]);
    world.run(MS * 100);
    for _ in 0..20 {
        world.cut(rank);
        world.run(MS * 3);
    }
    let late = world.want(rank, &older, Role::Consumer);
    world.run(SEC);
    assert!(world.outcome(rank, late).is_none(), "nobody is there");
    assert_eq!(world.gone(rank), [GoneReason::Down, GoneReason::Unlisted]);
    world.kill(older.scheduler);
    let id = world.want(rank, &newer, Role::Consumer);
    world.run(SEC * 5);
    assert_eq!(world.ready(rank, id).life, newer.life);
}

/// Known failure 77 (ray PR#65756): two engines that live at the same time and have one name: who has met both keeps to the one it heard of last, and the other is told
/// at once, on both sides, why and what to do; it is let in when that one is gone.
#[test]
fn two_engines_of_one_name_are_told_so() {
    let (mut world, decode, first) = pair();
    let (rank, one) = (decode.ranks[0], first.ranks[0]);
    let id = world.want(rank, &first, Role::Consumer);
    world.run(SEC);
    world.ready(rank, id);
    let second = world.start(&first.plan, 300);
    let id = world.want(rank, &second, Role::Consumer);
    world.run(SEC);
    assert_eq!(world.ready(rank, id).life, second.life);

    let named = |error: &kvx_core::Error| {
        let text = error.to_string();
        let remedy = ["a name of its own", "end one of the two"];
        for said in ["two engines have one name", "refused=prefill", "in_its_place=prefill"] {
            assert!(text.contains(said), "{text}");
        }
        assert!(remedy.iter().all(|said| text.contains(said)), "{text}");
    };
    let (here, there) =
        (world.want(rank, &first, Role::Consumer), world.want(one, &decode, Role::Producer));
    world.run(SEC);
    named(&world.refused(one, there));
    // By its cards, which might be old.
    world.run(SEC * 10);
    named(&world.refused(rank, here));
    // Again and again, and nothing happens to the other.
    for _ in 0..20 {
        let id = world.want(one, &decode, Role::Producer);
        world.run(SEC * 11);
        world.refused(one, id);
    }
    assert_eq!(world.gone(rank), [GoneReason::Superseded]);
    let id = world.want(rank, &second, Role::Consumer);
    world.run(MS * 100);
    assert_eq!(world.ready(rank, id).life, second.life);

    world.kill_engine(&second);
    world.run(SEC * 10);
    let id = world.want(rank, &first, Role::Consumer);
    world.run(SEC * 10);
    assert_eq!(world.ready(rank, id).life, first.life);
}

/// Known failure 98 (nixl#1097; vllm#26382; dynamo PR#1314): RDMA is required, and only TCP is there.
#[test]
fn rdma_or_fail() {
    let mut world = World::new(1);
    let mut picky = Plan::new("picky", 1, 1);
    picky.transports = vec!["rc_mlx5".into()];
    picky.transport = "tcp".into();
    let picky = world.start(&picky, 100);
    let mut easy = Plan::new("easy", 1, 1);
    easy.transport = "tcp".into();
    let easy = world.start(&easy, 200);
    let id = world.want(picky.ranks[0], &easy, Role::Consumer);
    world.run(SEC);
    let error = world.refused(picky.ranks[0], id);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("transport=tcp"), "{error}");
    let status = &world.processes[picky.ranks[0]].peers.status()[0];
    assert_eq!(status.state, PeerState::Refused);
    // Nor is it taken where the other side asks for it.
    let id = world.want(easy.ranks[0], &picky, Role::Consumer);
    world.run(SEC);
    let error = world.refused(easy.ranks[0], id).to_string();
    assert!(error.contains("transport"), "{error}");
    for process in [picky.ranks[0], easy.ranks[0]] {
        let given = world.processes[process].fabric.given.values();
        assert!(given.clone().count() > 0 && given.clone().all(|given| given.down));
    }
    // Where it may be, it is told which one it is, and why.
    let third = world.start(&Plan::new("third", 1, 1), 300);
    let id = world.want(easy.ranks[0], &third, Role::Consumer);
    world.run(SEC);
    world.ready(easy.ranks[0], id);
    let status = world.processes[easy.ranks[0]].peers.status();
    let status = status.iter().find(|status| status.engine == "third").unwrap();
    let shown = [&status.backend, &status.transport, &status.reason].map(Option::as_deref);
    assert_eq!(shown, [Some(FAB), Some("tcp"), Some("the only one")]);
}

/// Known failure 108 (nixl#1161; TRT-LLM#10024): what one backend needs for a region is its own business, also where the two
/// sides have another number of rails.
#[test]
fn keys_of_any_length() {
    let mut world = World::new(1);
    let mut four = Plan::new("four", 1, 1);
    four.key_bytes = 4096;
    let four = world.start(&four, 100);
    let two = world.start(&Plan::new("two", 1, 1), 200);
    let one = world.want(two.ranks[0], &four, Role::Consumer);
    let other = world.want(four.ranks[0], &two, Role::Consumer);
    world.run(SEC);
    world.ready(two.ranks[0], one);
    world.ready(four.ranks[0], other);
}

/// Known failure 109 (Mooncake PR#3188): the other side connects anew; what was there before is ended, once.
#[test]
fn what_was_connected_before_is_retired() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    let before = world.ready(rank, id).links[0].connection;
    // Only the other side's end breaks.
    let life = world.processes[rank].remote.incarnation;
    let now = world.now;
    let peer = world.processes[prefill.ranks[0]].fabric.break_off(life, now).unwrap();
    let connection = Connection { backend: FAB, peer };
    world.step(prefill.ranks[0], Input::PeerDown { connection, error: None });
    world.run(SEC);
    assert_eq!(world.gone(rank), [GoneReason::Bye]);
    assert_eq!(world.processes[rank].fabric.given[&before.peer].severed, 1);
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC);
    assert_ne!(world.ready(rank, id).links[0].connection, before);
}

/// Breaks whatever connects a rank with an engine's, with an error, as often as there is something, for ten seconds in which
/// somebody always wants it.
fn breaks(world: &mut World, rank: usize, engine: &Engine, error: fn() -> kvx_core::Error) {
    for _ in 0..1000 {
        world.want(rank, engine, Role::Consumer);
        world.run(MS * 10);
        let (now, life) = (world.now, world.processes[engine.ranks[0]].remote.incarnation);
        if let Some(peer) = world.processes[rank].fabric.break_off(life, now) {
            let connection = Connection { backend: FAB, peer };
            world.step(rank, Input::PeerDown { connection, error: Some(error()) });
        }
    }
}

/// A connection that breaks as soon as it is made, as where the other side has no descriptors left, is an attempt that failed: it
/// is not made thousands of times a second, and whoever waited is told why.
#[test]
fn a_connection_that_breaks_at_once_is_not_made_again_at_once() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    let error = || kvx_core::Error::new(ErrorKind::Resources, "fab", "no descriptor");
    breaks(&mut world, rank, &prefill, error);
    let meetings = world.sent(rank, meets);
    assert!((1..=15).contains(&meetings), "{meetings} meetings in ten seconds");
    let id = world.want(rank, &prefill, Role::Consumer);
    breaks(&mut world, rank, &prefill, error);
    world.run(SEC);
    if let Some(Err(error)) = world.outcome(rank, id) {
        assert!(error.to_string().contains("no descriptor"), "{error}");
    }
    // Once it lasts, it is as if nothing had been: one that breaks then is made again at once.
    world.run(SEC * 6);
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(SEC * 6);
    world.ready(rank, id);
    world.break_fabric(rank, prefill.ranks[0]);
    world.run(MS * 60);
    let id = world.want(rank, &prefill, Role::Consumer);
    world.run(MS * 20);
    world.ready(rank, id);
}

/// What does not change by itself, such as a policy, is told to all who wait, at once, for a while.
#[test]
fn a_connection_that_is_refused_for_good_is_told_at_once() {
    let (mut world, decode, prefill) = pair();
    let rank = decode.ranks[0];
    let first = world.want(rank, &prefill, Role::Consumer);
    breaks(&mut world, rank, &prefill, || kvx_core::Error::config("fab", "not this user"));
    let second = world.want(rank, &prefill, Role::Consumer);
    world.run(MS * 50);
    let met = world.outcome(rank, first).expect("it has ended").is_ok();
    let error = world.refused(rank, second);
    assert!(error.to_string().contains("not this user"), "{met} {error}");
    assert_eq!(error.kind(), ErrorKind::Config);
    let meetings = world.sent(rank, meets);
    assert!(meetings <= 3, "{meetings} meetings in ten seconds");
}

/// Known failure 110 (ROCm/ATOM PR#2249): a request that says no life is no request for the life that is remembered: the engine
/// is asked anew, unless it is heard of now.
#[test]
fn without_a_life_the_engine_is_asked() {
    let (mut world, decode, prefill) = pair();
    let (rank, name) = (decode.ranks[0], prefill.plan.name.clone());
    let ask = |world: &mut World, life| {
        let before = world.sent(rank, asks);
        let id = world.want_with(rank, &name, at_port(&prefill), life, Role::Consumer, SEC);
        world.run(MS * 50);
        world.ready(rank, id);
        world.sent(rank, asks) - before
    };
    assert_eq!(ask(&mut world, None), 1);
    assert_eq!(ask(&mut world, None), 0);
    // The session that the cards came by is lost.
    world.cut(prefill.scheduler);
    world.run(MS * 50);
    assert_eq!(ask(&mut world, None), 1);
    world.cut(prefill.scheduler);
    world.run(MS * 50);
    // Nor is what is remembered taken where it is named: nobody would have said that the cards have changed.
    assert_eq!(ask(&mut world, Some(prefill.life)), 1);
    assert_eq!(ask(&mut world, Some(prefill.life)), 0);
    for name in ["", "None", "null"] {
        assert!(EngineName::new(name).is_err());
    }
}
