//! One run: a producer and a consumer of random shapes, one request after another over the same blocks, read or written, and
//! everything that can go wrong.

mod bytes;
mod ends;
mod tickets;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use kvx_connector::protocol::peers::Place;
use kvx_connector::protocol::user::Prove;
use kvx_connector::protocol::{
    Access, Attempt, LeaseName, Part, Plant, Reason, RequestNumber, TransferKey,
};
use kvx_connector::rank::{FetchOptions, FetchOrder, GrantOrder, Kept, RankSetup};
use kvx_connector::ticket::Table;
use kvx_core::capability::Revoke;
use kvx_core::plan::Pairing;
use kvx_mock::sim::Weather;
use kvx_mock::{Fabric, Preset};
use kvx_tests::oracle::{Oracle, Scene};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use crate::engine::Engine;
use crate::mad::{Heard, Mad};
use crate::net::Net;

/// What was seen of a run that broke nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) runs: u64,
    pub(crate) published: u64,
    pub(crate) ready: u64,
    pub(crate) failed: u64,
    pub(crate) aborted: u64,
    pub(crate) quarantined: u64,
    pub(crate) killed: u64,
    pub(crate) stuck: u64,
    pub(crate) edited: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.published += other.published;
        self.ready += other.ready;
        self.failed += other.failed;
        self.aborted += other.aborted;
        self.quarantined += other.quarantined;
        self.killed += other.killed;
        self.stuck += other.stuck;
        self.edited += other.edited;
    }
}

/// What a promise that was broken looks like.
pub(crate) type Verdict<T = ()> = Result<T, String>;

const TTL: Duration = Duration::from_millis(400);
const HARD: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(3);

/// A lease that was granted, while some rank has not freed it.
struct Lease {
    name: LeaseName,
    /// What it may hold: to read, one serial; to write, one for each attempt.
    serials: Vec<u64>,
    freed: Vec<bool>,
    /// Ranks at which it is not known whether somebody still writes.
    quarantined: Vec<bool>,
    /// A process that may have been writing has died.
    user_died: bool,
}

/// An attempt of the user, while some rank has not ended it.
struct Try {
    request: RequestNumber,
    lease: LeaseName,
    serial: u64,
    begun: Duration,
    /// For each rank, whether it has ended, and whether its blocks are still kept.
    ended: Vec<bool>,
    kept: Vec<bool>,
    ready: usize,
    /// Whether its ticket was edited.
    edited: bool,
}

pub(crate) struct World<'a> {
    scene: &'a Scene,
    oracle: Oracle<'a>,
    /// The producers' bytes, before they are made a serial's.
    base: Vec<Vec<Vec<u8>>>,
    fabric: Fabric,
    preset: Preset,
    net: Rc<RefCell<Net>>,
    weather: Weather,
    rng: ChaCha8Rng,
    now: Duration,
    producer: Engine,
    consumer: Engine,
    lease: Option<Lease>,
    /// The last ticket that was given out: its lease, and the serial.
    ticket: Option<(LeaseName, u64)>,
    attempt: Option<Try>,
    /// What each consumer's memory holds that nobody may change: by which number its noise was made.
    noise: Vec<u64>,
    next_noise: u64,
    /// Whether the producer writes, or the consumer reads.
    access: Access,
    /// Why leases ended, by the owner's rank.
    ended: BTreeMap<(LeaseName, usize), Reason>,
    serial: u64,
    next_attempt: u64,
    digests: bool,
    since_stop: Duration,
    /// Why the last request failed.
    last_error: String,
    /// Whether tickets are edited on their way.
    edits: bool,
    /// `KVX_SAY` is set.
    says: bool,
    tally: Tally,
    /// A fault of the machines of leases.
    plant: Option<Plant>,
}

fn places_differ(ranks: &[kvx_core::layout::RankLayout]) -> bool {
    let places: std::collections::BTreeSet<_> =
        ranks.iter().map(|rank| Place::from(rank.coords())).collect();
    places.len() == ranks.len()
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Bytes of memory that this process has.
fn memory_in_use() -> Verdict<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").map_err(|error| error.to_string())?;
    let pages = text.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok());
    pages.map(|pages| pages * 4096).ok_or_else(|| "no figure of memory".into())
}

/// A byte of a serial.
fn key(serial: u64, at: u64) -> u8 {
    let mixed = (serial << 20 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

fn tables(tables: &[kvx_tests::oracle::Table]) -> Vec<Table> {
    tables.iter().map(|table| Table { first: table.first, ids: table.ids.clone() }).collect()
}

impl<'a> World<'a> {
    pub(crate) fn new(
        scene: &'a Scene,
        seed: u64,
        preset: Preset,
        mut rng: ChaCha8Rng,
        net_rng: ChaCha8Rng,
        plant: Option<Plant>,
        access: Access,
    ) -> Option<Self> {
        let (producers, consumers) = (&scene.producer.ranks, &scene.consumer.ranks);
        // A second grid beside the first has ranks of the same place: no engine is so.
        if ![producers, consumers].into_iter().all(|ranks| places_differ(ranks)) {
            return None;
        }
        let pairing = Pairing::new(producers, consumers, 0).ok()?;
        let oracle = Oracle::new(scene, pairing.pairs()).ok()?;
        let memory = oracle.memory().ok()?;
        let base = (0..producers.len())
            .map(|rank| {
                let regions = producers[rank].regions().len();
                (0..regions)
                    .map(|region| memory.producer(rank, region).unwrap_or_default().to_vec())
                    .collect()
            })
            .collect();
        let fabric = Fabric::manual(seed);
        let producer = Engine::new("p", producers.clone(), &mut rng);
        let consumer = Engine::new("c", consumers.clone(), &mut rng);
        let names: Vec<std::sync::Arc<str>> = [&producer, &consumer]
            .iter()
            .flat_map(|engine| (0..engine.layouts.len()).map(|rank| engine.rank_name(rank).into()))
            .collect();
        Some(Self {
            weather: Weather::new(&fabric, &names),
            scene,
            oracle,
            base,
            fabric,
            preset,
            net: Net::new(net_rng),
            digests: rng.random_ratio(1, 3),
            rng,
            now: Duration::ZERO,
            producer,
            consumer,
            lease: None,
            ticket: None,
            attempt: None,
            noise: vec![0; consumers.len()],
            next_noise: 0,
            access,
            ended: BTreeMap::new(),
            serial: 0,
            next_attempt: 1,
            since_stop: Duration::ZERO,
            last_error: String::new(),
            edits: true,
            says: std::env::var_os("KVX_SAY").is_some(),
            tally: Tally::default(),
            plant,
        })
    }

    pub(crate) fn run(mut self, steps: u32) -> Verdict<Tally> {
        self.open(true, false)?;
        self.open(false, false)?;
        self.scribble()?;
        self.tally.runs = 1;
        for _ in 0..steps {
            self.act()?;
            self.pass()?;
        }
        self.quieten()?;
        Ok(self.tally)
    }

    /// The same, while a member of the deployment that is out of its mind says `frames` things to everybody. Once it is silent,
    /// all is as it was.
    pub(crate) fn run_beside(mut self, frames: u64, rng: ChaCha8Rng) -> Verdict<(Tally, Heard)> {
        self.open(true, false)?;
        self.open(false, false)?;
        self.scribble()?;
        self.net.borrow_mut().tap = Some(Vec::new());
        let mut mad = Mad::enter(&self.net, rng).map_err(|error| error.to_string())?;
        let victims = |world: &Self| {
            let of = |engine: &Engine| {
                (0..engine.lives.len()).map(|rank| engine.address(rank)).collect()
            };
            let both: [Vec<_>; 2] = [of(&world.producer), of(&world.consumer)];
            both.concat()
        };
        let mut used = None;
        while mad.said < frames {
            self.act()?;
            mad.speak(&victims(&self), 3);
            self.pass()?;
            if mad.said > frames / 2 && used.is_none() {
                used = Some(memory_in_use()?);
            }
        }
        let heard = self.heard_of(&mad);
        self.quieten()?;
        if let Some(used) = used {
            let grown = memory_in_use()?.saturating_sub(used);
            if grown > 64 << 20 {
                return Err(format!("{grown} bytes more than after half of {frames} frames"));
            }
        }
        Ok((self.tally, heard))
    }

    fn heard_of(&self, mad: &Mad) -> Heard {
        let lives = self.producer.lives.iter().chain(&self.consumer.lives);
        let bad = lives.map(|life| life.rank.counts().bad_frames).sum();
        Heard { said: mad.said, sessions: mad.sessions_had, bad }
    }

    fn open(&mut self, producing: bool, again: bool) -> Verdict {
        let engine = if producing { &mut self.producer } else { &mut self.consumer };
        let plant = self.plant;
        let config = |setup: &mut RankSetup| {
            setup.user.hold_every = TTL / 4;
            setup.user.grace = Duration::from_millis(200);
            setup.plant = plant;
        };
        for _ in 0..50 {
            match engine.open(&self.fabric, &self.preset, again, &self.net, &mut self.rng, config) {
                Ok(()) => return Ok(()),
                // A rule of the weather made registering fail. Lives that were opened so far are gone again.
                Err(error) if again => {
                    let _ = error;
                    for rank in 0..engine.layouts.len() {
                        let _dead = self.fabric.kill(&engine.rank_name(rank));
                    }
                }
                Err(error) => return Err(format!("open: {error}")),
            }
        }
        Err("an engine cannot be opened again".into())
    }

    /// Something that an engine, or the world, does.
    fn act(&mut self) -> Verdict {
        match self.rng.random_range(0..100) {
            0..20 => self.publish()?,
            20..45 => self.fetch()?,
            45..48 => self.abort(),
            48..50 => self.withdraw(),
            50..53 => self.net.borrow_mut().break_one(),
            53..60 => {
                self.weather.change().map_err(|error| format!("the weather: {error}"))?;
            }
            60 => {
                let producing = self.rng.random_ratio(1, 2);
                self.kill(producing)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Time passes, and everybody looks.
    fn pass(&mut self) -> Verdict {
        let micros = match self.rng.random_range(0..40) {
            0 => self.rng.random_range(0..600_000),
            1..10 => self.rng.random_range(0..20_000),
            _ => self.rng.random_range(0..500),
        };
        self.advance(Duration::from_micros(micros))
    }

    fn advance(&mut self, by: Duration) -> Verdict {
        self.now += by;
        self.fabric.advance_by(by);
        self.net.borrow_mut().advance(self.now);
        for producing in [true, false] {
            for rank in 0..self.engine(producing).lives.len() {
                let engine = self.engine(producing);
                if self.weather.is_stopped(&engine.rank_name(rank)) {
                    self.since_stop = self.now;
                    continue;
                }
                let clock = engine.clock(self.now);
                let engine = if producing { &mut self.producer } else { &mut self.consumer };
                let life = &mut engine.lives[rank];
                life.rank.step(clock);
                let mut events = Vec::new();
                while let Some(event) = life.rank.next_event() {
                    events.push(event);
                }
                for event in events {
                    self.heard(producing, rank, event)?;
                }
            }
        }
        self.check_times()
    }

    /// Says what happens, where that was asked for.
    fn note(&self, what: impl FnOnce() -> String) {
        if self.says {
            eprintln!("{:?} {}", self.now, what());
        }
    }

    fn engine(&self, producing: bool) -> &Engine {
        if producing { &self.producer } else { &self.consumer }
    }

    /// Whether a side has the memory that leases are on.
    fn owns(&self, producing: bool) -> bool {
        producing == (self.access == Access::Read)
    }

    fn owner(&self) -> &Engine {
        self.engine(self.owns(true))
    }

    fn owner_mut(&mut self) -> &mut Engine {
        if self.owns(true) { &mut self.producer } else { &mut self.consumer }
    }

    fn user(&self) -> &Engine {
        self.engine(!self.owns(true))
    }

    fn user_mut(&mut self) -> &mut Engine {
        if self.owns(true) { &mut self.consumer } else { &mut self.producer }
    }

    fn owner_tables(&self) -> Vec<Table> {
        let side = if self.owns(true) { &self.scene.producer } else { &self.scene.consumer };
        tables(&side.tables)
    }

    fn user_tables(&self) -> Vec<Table> {
        let side = if self.owns(true) { &self.scene.consumer } else { &self.scene.producer };
        tables(&side.tables)
    }

    fn publish(&mut self) -> Verdict {
        if self.lease.is_some() || self.owner().lives.is_empty() {
            return Ok(());
        }
        self.serial += 1;
        let serials = if self.access == Access::Read {
            self.fill(self.serial)?;
            vec![self.serial]
        } else {
            // Nothing was written since the last lease ended.
            self.check_noise()?;
            Vec::new()
        };
        let owner = self.owner_mut();
        let name = LeaseName { owner: owner.life, number: owner.next_number, epoch: 0 };
        owner.next_number += 1;
        let order = GrantOrder {
            lease: name,
            key: TransferKey::new(format!("r{}", self.serial))
                .map_err(|error| error.to_string())?,
            access: self.access,
            tables: self.owner_tables(),
            fingerprint: Some(self.ticket(name, self.serial)?.fingerprint()),
            ttl: TTL,
            hard: HARD,
            total: Some(1),
            parts: self.parts(),
            stages: 0,
            kept: Kept::default(),
        };
        for life in &mut self.owner_mut().lives {
            life.rank.grant(order.clone());
        }
        self.tally.published += 1;
        self.note(|| format!("publish {name}"));
        self.ticket = Some((name, self.serial));
        let freed = vec![false; self.owner().lives.len()];
        let quarantined = freed.clone();
        self.lease = Some(Lease { name, serials, freed, quarantined, user_died: false });
        Ok(())
    }

    /// The request's parts: the range that is asked for, and those layers.
    fn parts(&self) -> Vec<Part> {
        let tokens = 0..self.scene.tokens;
        vec![Part { number: 0, group: None, layers: self.scene.layers.clone(), tokens }]
    }

    /// The user's side of a ticket: reads, or writes.
    fn fetch(&mut self) -> Verdict {
        let Some((lease, mut serial)) = self.ticket else { return Ok(()) };
        if self.attempt.is_some() || self.user().lives.is_empty() {
            return Ok(());
        }
        let mut ticket = self.ticket(lease, serial)?;
        let edited = self.edit(&mut ticket);
        self.tally.edited += u64::from(edited);
        if self.access == Access::Read {
            // Nothing of earlier attempts has moved since they ended.
            self.check_noise()?;
            self.scribble()?;
        } else {
            self.serial += 1;
            serial = self.serial;
            self.fill(serial)?;
            // Of an edited ticket's nothing may be there.
            if let Some(open) = self.lease.as_mut().filter(|open| open.name == lease && !edited) {
                open.serials.push(serial);
            }
        }
        let request = RequestNumber(self.next_attempt);
        self.next_attempt += 1;
        let fingerprint = Some(ticket.fingerprint());
        let mut order = FetchOrder {
            request,
            key: ticket.key,
            engine: ticket.engine,
            address: ticket.cards,
            replica: ticket.replica,
            lease,
            access: self.access,
            attempt: Attempt { user: self.user().life, number: request.0 },
            tokens: ticket.tokens,
            range: self.scene.range.clone(),
            theirs: ticket.groups.into_iter().map(|group| group.table).collect(),
            ours: self.user_tables(),
            total: Some(1),
            parts: self.parts(),
            deadline: DEADLINE,
            begin: true,
            prove: Prove::Whole,
            digests: self.digests && self.access == Access::Read,
            stages: (0, 0),
            options: FetchOptions { fingerprint, ..FetchOptions::default() },
        };
        if self.rng.random_ratio(1, 4) {
            order.prove = Prove::EachPart;
        }
        let clock = self.user().clock(self.now);
        for life in &mut self.user_mut().lives {
            life.rank.fetch(clock, order.clone()).map_err(|error| error.to_string())?;
        }
        self.note(|| format!("fetch {} of {lease}", request.0));
        let ranks = self.user().lives.len();
        self.attempt = Some(Try {
            request,
            lease,
            serial,
            begun: self.now,
            ended: vec![false; ranks],
            kept: vec![false; ranks],
            ready: 0,
            edited,
        });
        Ok(())
    }

    fn abort(&mut self) {
        if let Some(request) = self.attempt.as_ref().map(|attempt| attempt.request) {
            for life in &mut self.user_mut().lives {
                life.rank.abort(request);
            }
        }
    }

    fn withdraw(&mut self) {
        if let Some(name) = self.lease.as_ref().map(|lease| lease.name) {
            for life in &mut self.owner_mut().lives {
                life.rank.withdraw(name, Reason::Preempted);
            }
        }
    }

    /// All ranks of an engine die, and come again as another life.
    fn kill(&mut self, producing: bool) -> Verdict {
        self.tally.killed += 1;
        self.note(|| format!("the {} dies", if producing { "producer" } else { "consumer" }));
        let engine = if producing { &mut self.producer } else { &mut self.consumer };
        for (rank, life) in engine.lives.iter().enumerate() {
            let name = engine.rank_name(rank);
            self.fabric.kill(&name).map_err(|error| error.to_string())?;
            self.weather.reborn(&name);
            self.net.borrow_mut().kill(life.process);
        }
        engine.lives.clear();
        if self.owns(producing) {
            self.lease = None;
        } else {
            self.attempt = None;
            if let Some(lease) = &mut self.lease {
                lease.user_died = true;
            }
        }
        self.open(producing, true)?;
        if producing { Ok(()) } else { self.scribble() }
    }

    /// Whatever happens, a request ends in time, unless its process stands still.
    fn check_times(&self) -> Verdict {
        let bound = DEADLINE * 12 / 10 + Duration::from_secs(8);
        match &self.attempt {
            Some(attempt) if attempt.ended.iter().any(|ended| !ended) => {
                let since = attempt.begun.max(self.since_stop);
                if self.now > since + bound {
                    return Err(format!(
                        "request {} has not ended after {:?}",
                        attempt.request.0,
                        self.now - attempt.begun
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// All faults end: everything is over in time, the next request is served, and nothing is left.
    fn quieten(&mut self) -> Verdict {
        self.weather.clear().map_err(|error| error.to_string())?;
        self.net.borrow_mut().foul = false;
        self.edits = false;
        self.settle(Duration::from_secs(60), "what was under way is over", |world| {
            world.attempt.is_none() && (world.lease.is_none() || world.is_stuck())
        })?;
        if self.is_stuck() {
            self.tally.stuck += 1;
            return Ok(());
        }
        for round in 0.. {
            let before = self.tally.ready;
            self.publish()?;
            self.fetch()?;
            self.settle(Duration::from_secs(60), "the last request is over", |world| {
                world.attempt.is_none() && world.lease.is_none()
            })?;
            if self.tally.ready == before + self.user().lives.len() as u64 {
                break;
            }
            // Some peer may still be thought to be there that is not: the fabric takes its time to say so.
            let later = self.now + Duration::from_secs(1);
            self.settle(Duration::from_secs(2), "time passes", |world| world.now >= later)?;
            if round > 20 {
                for life in &self.user().lives {
                    self.note(|| format!("{:#?} {:?}", life.rank.peers(), life.rank));
                }
                return Err(format!("in fair weather no request is served: {}", self.last_error));
            }
        }
        self.check_noise()?;
        // Leases of requests that were aborted early are still being released.
        self.settle(Duration::from_secs(30), "nothing is left", |world| {
            let lives = world.producer.lives.iter().chain(&world.consumer.lives);
            lives.into_iter().all(|life| life.rank.open() == (0, 0))
        })
    }

    /// Whether blocks are kept for good: a writer has died, and this fabric cannot say whether something of it is still under way.
    fn is_stuck(&self) -> bool {
        let revocable = self.preset.capabilities().revoke == Revoke::PerPeer;
        self.lease.as_ref().is_some_and(|lease| {
            let mut ranks = lease.freed.iter().zip(&lease.quarantined);
            let kept = ranks.all(|(freed, quarantined)| *freed || *quarantined);
            kept && lease.user_died && self.access == Access::Write && !revocable
        })
    }

    fn settle(&mut self, within: Duration, what: &str, done: impl Fn(&Self) -> bool) -> Verdict {
        let until = self.now + within;
        while !done(self) {
            if self.now > until {
                return Err(format!("not in {within:?}: {what}"));
            }
            self.advance(Duration::from_micros(500))?;
        }
        Ok(())
    }
}
