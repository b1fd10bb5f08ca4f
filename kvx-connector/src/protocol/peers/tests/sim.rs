//! Several engines, everything that can go wrong, and what must hold all the same.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engines::Plan;
use super::world::{Engine, MS, SEC, Said, Weather, World, at_port};
use crate::protocol::peers::fault::Fault;
use crate::protocol::peers::{Input, Limits, Role, WantId};

/// What became of a seed.
#[derive(Debug, Default)]
struct Report {
    ready: usize,
    failed: usize,
    gone: usize,
    connections: usize,
}

fn limits() -> Limits {
    Limits {
        attempt: SEC * 2,
        again: MS * 300,
        young_attempts: 8,
        young: MS * 50,
        longest_pause: SEC,
        refusal: SEC * 2,
        alone: SEC * 2,
        ending: SEC,
        ..Limits::default()
    }
}

struct Sim {
    world: World,
    engines: Vec<Engine>,
    open: Vec<(usize, WantId)>,
    next_port: u16,
}

impl Sim {
    fn new(seed: u64, fault: Option<Fault>) -> Self {
        let mut world = World::new(seed);
        (world.limits, world.fault) = (limits(), fault);
        let mut bad = |parts| if world.happens(512) { world.below(parts) } else { 0 };
        world.weather = Weather {
            lose_message: bad(40),
            fail_step: bad(100),
            slow_step: bad(300),
            slow_message: bad(60),
            fail_dial: bad(200),
            undead: bad(100),
            unnoticed: bad(700),
        };
        let mut sim = Self { world, engines: Vec::new(), open: Vec::new(), next_port: 1000 };
        for n in 0..3 + sim.world.below(2) {
            let (tp, pp) = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)][sim.pick(5)];
            let plan = Plan::new(&format!("engine-{n}"), tp, pp);
            let port = sim.port();
            let engine = sim.world.start(&plan, port);
            sim.engines.push(engine);
        }
        sim
    }

    fn pick(&mut self, end: usize) -> usize {
        usize::try_from(self.world.below(end as u64)).unwrap()
    }

    fn port(&mut self) -> u16 {
        self.next_port += 20;
        self.next_port
    }

    /// One rank wants another engine, as it is or as it was.
    fn want(&mut self) {
        let (from, to) = (self.pick(self.engines.len()), self.pick(self.engines.len()));
        if from == to {
            return;
        }
        let engine = self.engines[to].clone();
        let ranks = self.engines[from].ranks.clone();
        let rank = ranks[self.pick(ranks.len())];
        let role = if self.world.happens(256) { Role::Producer } else { Role::Consumer };
        let within = MS * (50 + u32::try_from(self.world.below(5000)).unwrap());
        let life = self.world.happens(512).then_some(engine.life);
        let (name, address) = (engine.plan.name.clone(), at_port(&engine));
        let id = self.world.want_with(rank, &name, address, life, role, within);
        self.open.push((rank, id));
    }

    /// A rank wants all the others.
    fn want_all(&mut self, rank: usize, within: Duration) {
        let own = self.world.processes[rank].remote.engine.clone();
        let others = self.engines.iter().filter(|engine| engine.plan.name != own);
        let others: Vec<_> = others.map(|to| (to.plan.name.clone(), at_port(to))).collect();
        for (name, address) in others {
            self.world.want_with(rank, &name, address, None, Role::Consumer, within);
        }
    }

    fn trouble(&mut self) {
        let which = self.pick(self.engines.len());
        let engine = self.engines[which].clone();
        let rank = engine.ranks[self.pick(engine.ranks.len())];
        self.trouble_with(which, &engine, rank);
        let time = MS * u32::try_from(self.world.below(60)).unwrap();
        self.world.run(time);
        if self.world.processes[rank].alive {
            self.want_all(rank, SEC);
        }
    }

    fn trouble_with(&mut self, which: usize, engine: &Engine, rank: usize) {
        match self.pick(10) {
            // The whole engine starts anew, at the same address or at another one, with more memory or not.
            0 | 1 => {
                self.world.kill_engine(engine);
                let down = MS * u32::try_from(self.world.below(1500)).unwrap();
                self.world.run(down);
                let mut plan = engine.plan.clone();
                plan.blocks += u32::from(self.world.happens(512));
                let port = if self.world.happens(512) { self.port() } else { engine.port };
                self.engines[which] = self.world.start(&plan, port);
            }
            // One rank does.
            2 => {
                self.world.kill(rank);
                let down = MS * u32::try_from(self.world.below(500)).unwrap();
                self.world.run(down);
                let index = engine.ranks.iter().position(|known| *known == rank).unwrap();
                let address = self.world.processes[rank].address.clone();
                let again = self.world.spawn(&engine.plan, engine.life, Some((0, index)), address);
                self.engines[which].ranks[index] = again;
                let engine = self.engines[which].clone();
                self.world.serve(&engine);
            }
            // It has other cards, of the same ranks.
            3 => {
                self.engines[which].plan.key_bytes += 1;
                let engine = self.engines[which].clone();
                self.world.serve(&engine);
            }
            4 | 5 => self.world.cut(rank),
            6 => self.world.cut(engine.scheduler),
            7 => {
                let other = self.pick(self.engines.len());
                let other = self.engines[other].ranks[0];
                if other != rank {
                    self.world.break_fabric(rank, other);
                }
            }
            8 => {
                let other = self.pick(self.engines.len());
                let name = self.engines[other].plan.name.clone();
                self.world.step(rank, Input::Forget(name));
            }
            _ => {
                let Some((rank, id)) = self.open.pop() else { return };
                if self.world.processes[rank].wants.remove(&id).is_some() {
                    self.world.step(rank, Input::Unwant(id));
                }
            }
        }
    }

    fn run(mut self) -> Report {
        for _ in 0..20 + self.pick(40) {
            for _ in 0..self.pick(4) {
                self.want();
            }
            if self.world.happens(300) {
                self.trouble();
            }
            let time = MS * u32::try_from(self.world.below(400)).unwrap();
            self.world.run(time);
        }
        self.world.weather = Weather::default();
        self.world.run(SEC * 12);
        self.all_ended();
        self.the_patient_are_met();
        self.everybody_is_met();
        self.the_dead_are_forgotten();
        self.nothing_is_left()
    }

    fn living(&self) -> Vec<usize> {
        (0..self.world.processes.len()).filter(|at| self.world.processes[*at].alive).collect()
    }

    fn all_ended(&self) {
        for at in self.living() {
            let wants = &self.world.processes[at].wants;
            assert!(wants.is_empty(), "wants that never ended: {wants:?}");
        }
    }

    /// Who waits for an engine that is not there yet is given it when it comes.
    fn the_patient_are_met(&mut self) {
        let engine = self.engines[0].clone();
        let rank = self.engines[1].ranks[0];
        self.world.kill_engine(&engine);
        let (name, address) = (engine.plan.name.clone(), at_port(&engine));
        let id = self.world.want_with(rank, &name, address, None, Role::Consumer, SEC * 10);
        self.world.run(SEC);
        self.engines[0] = self.world.start(&engine.plan, engine.port);
        self.world.run(SEC * 10);
        let mut said = self.world.processes[rank].said.iter();
        let ready = said.any(|(_, said)| matches!(said, Said::Ready(ready, _) if *ready == id));
        assert!(ready, "what failed at first is not tried again");
    }

    /// Whatever was before: whoever is well is met, with the cards that it has now.
    fn everybody_is_met(&mut self) {
        let mut wanted = Vec::new();
        for from in self.engines.clone() {
            let rank = from.ranks[self.pick(from.ranks.len())];
            for to in self.engines.clone() {
                if to.scheduler != from.scheduler {
                    let id = self.world.want(rank, &to, Role::Consumer);
                    wanted.push((rank, id, to));
                }
            }
        }
        self.world.run(SEC * 11);
        for (rank, id, to) in wanted {
            let said = &self.world.processes[rank].said;
            let route = said.iter().find_map(|(_, said)| match said {
                Said::Ready(ready, route) if *ready == id => Some(Arc::clone(route)),
                Said::Failed(failed, error) if *failed == id => {
                    panic!("{} was not met: {error}", to.plan.name)
                }
                _ => None,
            });
            let route = route.expect("a want ends");
            assert_eq!((route.life, route.ranks), (to.life, to.ranks.len()));
            for link in &route.links {
                let there = &self.world.processes[to.ranks[link.rank]];
                assert_eq!(link.incarnation, there.remote.incarnation, "not who is there now");
                let layout = to.plan.layouts(0)[link.rank].clone();
                assert_eq!(*link.card.layout(), layout, "not the layout that it has now");
                let keys = link.card.offers()[0].keys()[0].as_bytes().len();
                assert_eq!(keys, to.plan.key_bytes, "not the keys that it has now");
            }
        }
    }

    fn the_dead_are_forgotten(&mut self) {
        self.world.run(SEC * 8);
        let living: BTreeSet<_> = self
            .living()
            .into_iter()
            .map(|at| self.world.processes[at].remote.incarnation.to_string())
            .collect();
        for at in self.living() {
            for status in self.world.processes[at].peers.status() {
                let known = living.contains(&status.incarnation);
                assert!(known, "a dead peer is remembered: {status:?}");
            }
        }
    }

    fn nothing_is_left(mut self) -> Report {
        let mut report = Report::default();
        for at in self.living() {
            self.world.step(at, Input::Close);
            self.world.run(MS * 10);
        }
        self.world.run(SEC * 10);
        for at in self.living() {
            let process = &self.world.processes[at];
            assert_eq!(process.peers.entries(), 0, "something is left: {:?}", process.peers);
            for (peer, given) in &process.fabric.given {
                let ended = given.down || given.severed + given.disconnected > 0;
                assert!(ended, "a connection is left: {peer} {given:?}");
            }
        }
        for process in &self.world.processes {
            report.connections += process.fabric.given.len();
            for (_, said) in &process.said {
                match said {
                    Said::Ready(..) => report.ready += 1,
                    Said::Failed(..) => report.failed += 1,
                    Said::Gone(..) => report.gone += 1,
                    _ => {}
                }
            }
        }
        report
    }
}

impl Report {
    const fn add(&mut self, one: &Self) {
        self.ready += one.ready;
        self.failed += one.failed;
        self.gone += one.gone;
        self.connections += one.connections;
    }
}

/// Runs one seed; a failure names it.
fn seed(seed: u64) -> Report {
    catch_unwind(|| Sim::new(seed, None).run()).unwrap_or_else(|cause| {
        eprintln!("seed {seed}: run it again with KVX_SEED={seed}");
        std::panic::resume_unwind(cause)
    })
}

/// The seeds that `KVX_SEEDS` says (`N`, or `FROM..TO`), or the one that `KVX_SEED` says, or as many as go into some seconds.
#[test]
fn whatever_goes_wrong_every_want_ends_and_nothing_is_left() {
    let said = ["KVX_SEED", "KVX_SEEDS"].iter().any(|name| std::env::var_os(name).is_some());
    let (mut seeds, mut sum) = (0..0, Report::default());
    if said {
        seeds = kvx_mock::sim::seeds(0).unwrap();
        let run = |number| Ok::<_, String>(seed(number));
        sum = kvx_tests::sweep(seeds.clone(), run, |sum: &mut Report, one| sum.add(&one));
    } else {
        let began = Instant::now();
        while seeds.end < 20 || began.elapsed() < Duration::from_secs(8) {
            sum.add(&seed(seeds.end));
            seeds.end += 1;
        }
    }
    println!("seeds {seeds:?}: {sum:?}");
    assert!(sum.ready > 0);
    if seeds.end - seeds.start >= 20 {
        assert!(sum.failed > 0 && sum.gone > 0 && sum.connections > 0, "{sum:?}");
    }
}

/// Seeds that have found something.
#[test]
fn what_was_found_before_is_not_there_again() {
    // A peer that was met after its last session had ended was never forgotten.
    assert!(seed(8902).ready > 0);
}

/// Each planted fault is found within this many seeds.
const WITHIN: u64 = 300;

#[test]
fn every_planted_fault_is_found() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for fault in Fault::ALL {
        let find =
            |seed: u64| catch_unwind(AssertUnwindSafe(|| Sim::new(seed, Some(*fault)).run())).err();
        let found = (0..WITHIN).find_map(|seed| Some((seed, find(seed)?)));
        match found {
            Some((seed, cause)) => {
                let said = cause.downcast_ref::<String>().map(String::as_str);
                let said = said.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("?");
                println!("{fault:?}: seed {seed}: {:.100}", said.replace('\n', " "));
            }
            None => missed.push(*fault),
        }
    }
    std::panic::set_hook(hook);
    assert!(missed.is_empty(), "not found within {WITHIN} seeds: {missed:?}");
}
