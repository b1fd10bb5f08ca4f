//! What the two engines do: grant, publish, withdraw, ask, abort.

use kvx_core::id::Incarnation;
use rand::RngExt as _;

use super::script::{Climate, Job, Mistake, other};
use super::world::{Event, Granted, World};
use crate::protocol::id::{Attempt, Fingerprint, LeaseName, Reader};
use crate::protocol::owner::{self, Grant};
use crate::protocol::terms::{Access, Ranks, Reason, RequestNumber};
use crate::protocol::user::{self, Ask, Source};

impl World {
    /// The beginning: everything that is planned from the start.
    pub(super) fn open(&mut self) {
        for _ in 0..self.setting.jobs {
            let at = self.dice.among(0, 400_000);
            self.after(at, Event::NewJob);
        }
        let wild = self.setting.climate == Climate::Wild;
        for _ in 0..if wild { self.dice.among(0, 8) } else { 0 } {
            let at = self.dice.among(0, 600_000);
            self.after(at, Event::Weather);
        }
        self.exactly(100_000_000, Event::Finish);
        self.exactly(1_000_000_000, Event::Check);
    }

    pub(super) fn new_job(&mut self) {
        self.next_lease += 1;
        let lease = LeaseName { owner: self.owner_engine, number: self.next_lease, epoch: 0 };
        let job = Job::new(&self.setting, lease, &mut self.next_tag, &mut self.dice);
        self.start(job);
    }

    /// The owner's engine takes a job that it has withdrawn up again: new blocks, another epoch.
    pub(super) fn regrant(&mut self, before: usize) {
        let mut job = self.jobs[before].clone();
        if job.lease.owner != self.owner_engine {
            return;
        }
        job.lease.epoch += 1;
        for tag in job.tags.values_mut() {
            self.next_tag += 1;
            *tag = self.next_tag;
        }
        self.start(job);
    }

    fn start(&mut self, job: Job) {
        let wild = self.setting.climate == Climate::Wild;
        let at = self.jobs.len();
        let mut granted = Granted {
            lives: self.owners.iter().map(|seat| seat.process.life).collect(),
            ..Granted::default()
        };
        for (owner, user, part) in job.tags.keys() {
            let block = self.owners[*owner].process.memory.allocate();
            granted.blocks.insert((*owner, *user, *part), block);
        }
        self.jobs.push(job.clone());
        self.granted.push(granted);
        if job.access == Access::Read && job.stages == 0 {
            for owner in 0..self.owners.len() {
                self.fill(at, owner, 0..job.at_first);
            }
        }
        // One withdrawal, which comes to all ranks at almost the same time.
        let withdrawn = wild && self.dice.chance(1, 5);
        let withdrawn = withdrawn.then(|| self.dice.among(1_000, 400_000));
        let why = [Reason::Aborted, Reason::Preempted, Reason::Failed][self.dice.index(3)];
        for owner in 0..self.owners.len() {
            let life = self.owners[owner].process.life;
            let first = self.dice.among(0, if wild { 60_000 } else { 20_000 });
            let known = job.at_first == job.parts;
            let grant = Grant {
                lease: job.lease,
                key: job.key.clone(),
                access: job.access,
                fingerprint: Some(job.fingerprint()),
                ttl: job.ttl,
                hard: job.hard,
                parts: job.part_list(0, job.at_first),
                total: known.then_some(job.parts),
                stages: job.stages,
            };
            // Some engines say what they will grant.
            if job.lease.number.is_multiple_of(2) {
                let (lease, key) = (job.lease, job.key.clone());
                let expect = owner::Input::Expect { lease, key };
                self.after(first / 2, Event::Owner(owner, life, expect));
            }
            self.after(first, Event::Owner(owner, life, owner::Input::Grant(grant)));
            let mut from = job.at_first;
            let mut late = first;
            while from < job.parts {
                let to = u32::try_from(self.dice.among(from.into(), job.parts.into())).unwrap_or(0);
                late += self.dice.among(1_000, 40_000);
                let input = owner::Input::Publish {
                    lease: job.lease,
                    parts: job.part_list(from, to),
                    total: (to == job.parts).then_some(to),
                };
                self.after(late, Event::Owner(owner, life, input));
                from = to;
            }
            if let Some(at) = withdrawn {
                let input = owner::Input::Withdraw { lease: job.lease, why };
                self.after(first.max(at) + 1_000, Event::Owner(owner, life, input));
            }
        }
        if withdrawn.is_some() && why == Reason::Preempted && self.dice.chance(2, 3) {
            self.after(550_000, Event::Regrant(at));
        }
        if !wild || self.dice.chance(9, 10) {
            let after = self.dice.among(0, 60_000);
            self.after(after, Event::Attempt(at));
        }
        if wild && self.dice.chance(1, 3) {
            let after = self.dice.among(0, 300_000);
            self.after(after, Event::Attempt(at));
        }
    }

    /// Parts of a job are in the owner's blocks.
    pub(super) fn fill(&mut self, job: usize, owner: usize, parts: std::ops::Range<u32>) {
        for ((one, user, part), tag) in &self.jobs[job].tags {
            if *one == owner && parts.contains(part) {
                let block = self.granted[job].blocks[&(*one, *user, *part)];
                self.owners[owner].process.memory.tags[block] = *tag;
            }
        }
    }

    pub(super) fn attempt(&mut self, at: usize) {
        let wild = self.setting.climate == Climate::Wild;
        let job = self.jobs[at].clone();
        self.next_attempt += 1;
        let attempt = Attempt { user: self.user_engine, number: self.next_attempt };
        let admitted = self.dice.chance(2, 3);
        let aborted = wild && self.dice.chance(1, 5);
        let aborted = aborted.then(|| self.dice.among(0, 200_000));
        let queue = u64::try_from(self.setting.ttl.as_micros()).unwrap_or(0) * 3;
        let queued = self.dice.among(0, queue.min(900_000));
        // An engine that is mistaken: not among those who do not say what they do. Of a lease without parts there is nothing to be
        // mistaken in: it ends with its grant, as used, whoever asks.
        let may = wild && !self.setting.earlier && job.parts > 0;
        let mistake = match may.then(|| self.dice.0.random_range(0..25_u32)) {
            Some(0) => Some(Mistake::Access),
            Some(1) => Some(Mistake::Ticket),
            _ => None,
        };
        let access = match mistake {
            Some(Mistake::Access) => other(job.access),
            _ => job.access,
        };
        let fingerprint = match mistake {
            Some(Mistake::Ticket) => Fingerprint(self.dice.0.random()),
            _ => job.fingerprint(),
        };
        for user in 0..self.users.len() {
            let Some(sources) = self.sources(at, user) else { continue };
            // A rank that never hears of it.
            if wild && self.dice.chance(1, 40) {
                continue;
            }
            let life = self.users[user].process.life;
            self.next_request += 1;
            let request = RequestNumber(self.next_request);
            let begin = admitted || aborted.is_some_and(|_| self.dice.chance(1, 2));
            let ask = Ask {
                request,
                key: job.key.clone(),
                lease: job.lease,
                access,
                fingerprint: Some(fingerprint),
                reader: Reader { attempt, rank: u16::try_from(user).unwrap_or(0) },
                sources,
                deadline: self.setting.deadline,
                begin,
                prove: job.prove,
                before: job.before,
                after: job.after,
                keeping: user::Keeping::default(),
            };
            let late = self.dice.among(0, 15_000);
            self.ask_of(user, life, late, ask);
            if !begin {
                let admitted = late + queued + self.dice.among(0, 2_000);
                self.after(admitted, Event::User(user, life, user::Input::Begin { request }));
            }
            if job.access == Access::Write {
                self.publish_at(user, life, &job, request, late);
            }
            if let Some(when) = aborted {
                let when = late.max(when) + self.dice.among(0, 2_000);
                self.after(when + 100, Event::User(user, life, user::Input::Abort { request }));
            }
        }
    }

    fn ask_of(&mut self, user: usize, life: Incarnation, late: u64, ask: Ask) {
        self.after(late, Event::User(user, life, user::Input::Ask(ask)));
    }

    /// The producer's rank that writes has its parts.
    fn publish_at(
        &mut self,
        user: usize,
        life: Incarnation,
        job: &Job,
        request: RequestNumber,
        late: u64,
    ) {
        let (mut from, mut at) = (0, late + 10);
        loop {
            let to = if from == 0 {
                job.at_first
            } else {
                u32::try_from(self.dice.among(u64::from(from), job.parts.into())).unwrap_or(0)
            };
            let to = if from == 0 && to == 0 && job.parts > 0 { 1 } else { to };
            let total = (to == job.parts).then_some(to);
            let parts = job.part_list(from, to);
            let input = user::Input::Publish { request, parts, total };
            self.after(at, Event::User(user, life, input));
            if to == job.parts {
                return;
            }
            from = to;
            at += self.dice.among(1_000, 40_000);
        }
    }

    /// The ranks of the owner that one of the user's confirms to; `None`: it has none.
    fn sources(&mut self, at: usize, user: usize) -> Option<Vec<Source>> {
        let job = &self.jobs[at];
        let mut sources = Vec::new();
        for ((owner, one), data) in &job.pairs {
            if *one != user {
                continue;
            }
            let set = Ranks::new(job.readers_of(*owner)).ok()?;
            let handed = job.access == Access::Read && job.handed;
            sources.push(Source {
                peer: self.granted[at].lives[*owner],
                set,
                data: *data,
                parts: if handed { job.part_list(0, job.parts) } else { Vec::new() },
                total: handed.then_some(job.parts),
            });
        }
        (!sources.is_empty()).then_some(sources)
    }

    /// Something that takes a while: mostly short.
    pub(super) fn a_while(&mut self) -> u64 {
        match self.dice.index(20) {
            0 => self.dice.among(20_000, 120_000),
            1..=4 => self.dice.among(2_000, 20_000),
            _ => self.dice.among(50, 2_000),
        }
    }

    pub(super) fn junk(&mut self) -> u32 {
        self.dice.0.random_range(1 << 30..1 << 31)
    }
}
