//! The world: what happens when, and to whom.

use std::collections::{BTreeMap, BTreeSet};

use kvx_core::id::Incarnation;
use kvx_core::wire;
use kvx_mock::sim::Violation;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::fabric::{Flights, Memory};
use super::script::{Climate, Dice, Job, Setting};
use super::seat::{Clock, OwnerSeat, Process, UserSeat};
use super::{Report, ensure};
use crate::protocol::id::LeaseName;
use crate::protocol::message::{Confirm, Hold, Release, ToOwner, ToUser};
use crate::protocol::owner::{self, Owner};
use crate::protocol::plant::Plant;
use crate::protocol::terms::RequestNumber;
use crate::protocol::user::{self, User};

pub(super) type Verdict<T = ()> = Result<T, Violation>;

/// No run has as many events: it would go on for ever.
const MOST: u64 = 100_000;

/// Something that happens.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Owner(usize, Incarnation, owner::Input),
    User(usize, Incarnation, user::Input),
    /// A transfer copies its next block.
    Copy(u64),
    /// A transfer settles, unless that was put off or brought forward since.
    Settle(u64),
    /// A user's rank has met a peer, or has not.
    Connect(usize, Incarnation, Incarnation),
    NewJob,
    /// The user's engine asks for what a job grants.
    Attempt(usize),
    /// The owner's engine grants a job anew.
    Regrant(usize),
    Weather,
    /// A request must be over.
    MustEnd(usize, Incarnation, RequestNumber, u64),
    /// A lease must be over.
    MustFree(usize, Incarnation, LeaseName, u64),
    /// All users die.
    Finish,
    /// Nothing is left.
    Check,
}

pub(super) struct World {
    pub(super) setting: Setting,
    pub(super) plant: Option<Plant>,
    pub(super) dice: Dice,
    pub(super) now: u64,
    queue: BTreeMap<(u64, u64), Event>,
    events: u64,
    pub(super) owner_engine: Incarnation,
    pub(super) user_engine: Incarnation,
    pub(super) owners: Vec<OwnerSeat>,
    pub(super) users: Vec<UserSeat>,
    pub(super) jobs: Vec<Job>,
    /// For each job: lives of the owner's ranks, and blocks by owner's rank, user's rank, part.
    pub(super) granted: Vec<Granted>,
    pub(super) flights: Flights,
    pub(super) next_lease: u64,
    pub(super) next_attempt: u64,
    pub(super) next_request: u64,
    pub(super) next_tag: u32,
    /// Whether processes still die and the like.
    pub(super) stormy: bool,
    pub(super) report: Report,
    logging: bool,
    pub(super) log: Vec<String>,
    owner_out: Vec<owner::Output>,
    user_out: Vec<user::Output>,
}

/// What the owner's engine did for a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Granted {
    pub(super) lives: Vec<Incarnation>,
    pub(super) blocks: BTreeMap<(usize, usize, u32), usize>,
}

impl World {
    pub(super) fn new(seed: u64, plant: Option<Plant>, logging: bool) -> Self {
        let mut dice = Dice(ChaCha8Rng::seed_from_u64(seed));
        let setting = Setting::new(seed, &mut dice);
        let mut world = Self {
            plant,
            now: 0,
            queue: BTreeMap::new(),
            events: 0,
            owner_engine: dice.life(),
            user_engine: dice.life(),
            owners: Vec::new(),
            users: Vec::new(),
            jobs: Vec::new(),
            granted: Vec::new(),
            flights: Flights::default(),
            next_lease: 0,
            next_attempt: 0,
            next_request: 0,
            next_tag: 0,
            stormy: setting.climate == Climate::Wild,
            report: Report::default(),
            logging,
            log: Vec::new(),
            owner_out: Vec::new(),
            user_out: Vec::new(),
            setting,
            dice,
        };
        for _ in 0..world.setting.owners {
            let process = world.process();
            let machine = world.owner();
            world.owners.push(OwnerSeat {
                process,
                machine,
                specs: BTreeMap::new(),
                early: BTreeMap::new(),
                expected: BTreeSet::new(),
                stages: BTreeMap::new(),
            });
        }
        for _ in 0..world.setting.users {
            let process = world.process();
            let machine = world.user();
            world.users.push(UserSeat {
                process,
                machine,
                requests: BTreeMap::new(),
                connections: BTreeMap::new(),
                stages: BTreeMap::new(),
                transfers: BTreeMap::new(),
            });
        }
        world.open();
        world
    }

    pub(super) fn process(&mut self) -> Process {
        let clock = Clock {
            base: self.dice.among(0, 1_000_000_000),
            rate: if self.setting.coarse { 1000 } else { self.dice.among(900, 1100) },
        };
        Process {
            life: self.dice.life(),
            alive: true,
            clock,
            stopped_until: 0,
            stopped: 0,
            wake: None,
            memory: Memory::default(),
        }
    }

    pub(super) fn owner(&self) -> Owner {
        let mut config = self.setting.owner.clone();
        config.life = self.owner_engine;
        let owner = Owner::new(config);
        match self.plant {
            Some(plant) => owner.with_fault(plant),
            None => owner,
        }
    }

    pub(super) fn user(&mut self) -> User {
        let seed = self.dice.among(0, u64::MAX - 1);
        let user = User::new(self.setting.user.clone(), seed);
        match self.plant {
            Some(plant) => user.with_fault(plant),
            None => user,
        }
    }

    /// Something happens after a while.
    pub(super) fn after(&mut self, micros: u64, event: Event) {
        self.events += 1;
        let mut at = self.now + micros;
        if self.setting.coarse {
            at = at.next_multiple_of(1000);
        }
        self.queue.insert((at, self.events), event);
    }

    pub(super) fn exactly(&mut self, at: u64, event: Event) {
        self.events += 1;
        self.queue.insert((at.max(self.now), self.events), event);
    }

    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        if self.logging {
            self.log.push(format!("{:>9} {}", self.now, text()));
        }
    }

    pub(super) fn run(&mut self) -> Verdict {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            self.report.events += 1;
            ensure!(self.report.events < MOST, "it goes on for ever");
            self.happen(event)?;
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Verdict {
        match event {
            Event::Owner(seat, life, input) => {
                let process = &self.owners[seat].process;
                if process.life == life && process.alive {
                    if process.stopped_until > self.now {
                        let at = process.stopped_until;
                        self.exactly(at, Event::Owner(seat, life, input));
                        return Ok(());
                    }
                    // What an engine says of one lease it says in order.
                    if let owner::Input::Withdraw { lease, .. } = &input
                        && !self.owners[seat].specs.contains_key(lease)
                    {
                        self.after(2_000, Event::Owner(seat, life, input));
                        return Ok(());
                    }
                    return self.tell_owner(seat, input);
                }
            }
            Event::User(seat, life, input) => {
                let process = &self.users[seat].process;
                if process.life == life && process.alive {
                    if process.stopped_until > self.now {
                        let at = process.stopped_until;
                        self.exactly(at, Event::User(seat, life, input));
                        return Ok(());
                    }
                    return self.tell_user(seat, input);
                }
            }
            Event::Copy(flight) => self.copy(flight),
            Event::Settle(flight) => self.settle(flight),
            Event::Connect(seat, life, peer) => self.connect(seat, life, peer),
            Event::NewJob => self.new_job(),
            Event::Attempt(job) => self.attempt(job),
            Event::Regrant(job) => self.regrant(job),
            Event::Weather => self.weather(),
            Event::MustEnd(seat, life, request, stopped) => {
                return self.must_end(seat, life, request, stopped);
            }
            Event::MustFree(seat, life, lease, stopped) => {
                return self.must_free(seat, life, lease, stopped);
            }
            Event::Finish => return self.finish(),
            Event::Check => return self.all_gone(),
        }
        Ok(())
    }

    fn tell_owner(&mut self, seat: usize, input: owner::Input) -> Verdict {
        let now = self.owners[seat].process.clock.at(self.now);
        if self.owners[seat].process.wake.is_some_and(|at| at <= self.now) {
            self.owners[seat].process.wake = None;
        }
        self.note(|| format!("owner {seat} at {now:?}: {input:?}"));
        let expected = self.before_owner(seat, now, &input)?;
        let mut out = std::mem::take(&mut self.owner_out);
        self.owners[seat].machine.step(now, input, &mut out);
        if self.logging {
            for output in &out {
                self.note(|| format!("    owner {seat}: {output:?}"));
            }
        }
        self.after_owner(seat, now, &expected, &out)?;
        for output in out.drain(..) {
            self.owner_says(seat, output)?;
        }
        self.owner_out = out;
        if let Some(wake) = self.owners[seat].machine.wake() {
            let process = &mut self.owners[seat].process;
            let at = process.clock.when(wake).max(self.now + 1);
            if process.wake.is_none_or(|planned| planned > at) {
                process.wake = Some(at);
                let life = process.life;
                self.exactly(at, Event::Owner(seat, life, owner::Input::Tick));
            }
        }
        Ok(())
    }

    fn tell_user(&mut self, seat: usize, input: user::Input) -> Verdict {
        let now = self.users[seat].process.clock.at(self.now);
        if self.users[seat].process.wake.is_some_and(|at| at <= self.now) {
            self.users[seat].process.wake = None;
        }
        self.note(|| format!("user {seat} at {now:?}: {input:?}"));
        self.before_user(seat, now, &input)?;
        let mut out = std::mem::take(&mut self.user_out);
        self.users[seat].machine.step(now, input, &mut out);
        for output in out.drain(..) {
            self.note(|| format!("    user {seat}: {output:?}"));
            self.user_says(seat, now, output)?;
        }
        self.user_out = out;
        if let Some(wake) = self.users[seat].machine.wake() {
            let process = &mut self.users[seat].process;
            let at = process.clock.when(wake).max(self.now + 1);
            if process.wake.is_none_or(|planned| planned > at) {
                process.wake = Some(at);
                let life = process.life;
                self.exactly(at, Event::User(seat, life, user::Input::Tick));
            }
        }
        Ok(())
    }

    /// How long a message takes; `None` where it is lost. A second time where it comes twice.
    fn ways(&mut self) -> [Option<u64>; 2] {
        let (lost, doubled) = (self.setting.lost, self.setting.doubled);
        let way = |world: &mut Self| {
            let late = world.dice.chance(1, 100);
            let most = if late { world.setting.very_late } else { world.setting.late };
            world.dice.among(50, most)
        };
        let first = (!self.dice.chance(lost, 100)).then(|| way(self));
        let second = self.dice.chance(doubled, 100).then(|| way(self));
        [first, second]
    }

    pub(super) fn send_owner(&mut self, from: Incarnation, to: Incarnation, message: &ToOwner) {
        let Some(seat) = self.owners.iter().position(|seat| seat.process.life == to) else {
            return;
        };
        let mut message = if self.setting.encoded { carried(message) } else { message.clone() };
        if let ToOwner::Hold(Hold { access, fingerprint, .. })
        | ToOwner::Confirm(Confirm { access, fingerprint, .. })
        | ToOwner::Release(Release { access, fingerprint, .. }) = &mut message
            && self.setting.earlier
        {
            (*access, *fingerprint) = (None, None);
        }
        for way in self.ways().into_iter().flatten() {
            let input = owner::Input::Message { peer: from, message: message.clone() };
            self.after(way, Event::Owner(seat, to, input));
        }
    }

    pub(super) fn send_user(&mut self, from: Incarnation, to: Incarnation, message: &ToUser) {
        let Some(seat) = self.users.iter().position(|seat| seat.process.life == to) else {
            return;
        };
        let mut message = if self.setting.encoded { carried(message) } else { message.clone() };
        if let ToUser::Verdict(verdict) = &mut message
            && self.setting.earlier
        {
            verdict.why = None;
        }
        for way in self.ways().into_iter().flatten() {
            let input = user::Input::Message { peer: from, message: message.clone() };
            self.after(way, Event::User(seat, to, input));
        }
    }
}

/// A message as it arrives: what was made of its bytes.
fn carried<T: serde::Serialize + serde::de::DeserializeOwned>(message: &T) -> T {
    let bytes = wire::to_bytes("sim", message);
    bytes
        .and_then(|bytes| wire::from_bytes("sim", "a message", &bytes))
        .unwrap_or_else(|error| unreachable!("{error}"))
}
