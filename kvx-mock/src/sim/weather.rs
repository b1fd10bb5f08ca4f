//! Everything that a fabric can do to engines, at random.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{ErrorKind, Result};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use super::{Purpose, stream};
use crate::fabric::Fabric;
use crate::fault::Partition;
use crate::rule::{Kind, RuleGuard};
use crate::rules::{self, Matched};

/// Most rules at one time, unless all are installed.
const RULES: usize = 4;

/// A rule that was installed, as far as it can be the cause of something.
struct Cause {
    /// What it fails, loses, or answers with full.
    kind: Kind,
    full: bool,
    from: Option<Arc<str>>,
    to: Option<Arc<str>>,
    /// Until which change it was installed.
    until: u64,
}

/// Random faults of a fabric, drawn from the fabric's seed: rules, partitions, flapping links, stopped processes. All of it
/// ends when it is [cleared](Self::clear) or dropped. Killing is left to the scenario, which has to open the next life.
pub struct Weather {
    fabric: Fabric,
    names: Vec<Arc<str>>,
    rng: ChaCha8Rng,
    /// Each with its place among the causes, if it is one.
    rules: Vec<(RuleGuard, Option<usize>)>,
    causes: Vec<Cause>,
    changes: u64,
    /// Whether all rules are installed at once.
    all: bool,
    partitions: Vec<Partition>,
    stopped: Vec<Arc<str>>,
}

impl Weather {
    /// Fair weather, for the engines of these names.
    #[must_use]
    pub fn new(fabric: &Fabric, names: &[Arc<str>]) -> Self {
        Self {
            fabric: fabric.clone(),
            names: names.to_vec(),
            rng: stream(fabric.seed(), Purpose::Weather),
            rules: Vec::new(),
            causes: Vec::new(),
            changes: 0,
            all: false,
            partitions: Vec::new(),
            stopped: Vec::new(),
        }
    }

    /// Whether the process of this name is stopped: a scenario must not let it do anything.
    #[must_use]
    pub fn is_stopped(&self, name: &str) -> bool {
        self.stopped.iter().any(|stopped| **stopped == *name)
    }

    /// Changes something: a fault begins or one ends.
    ///
    /// # Errors
    ///
    /// An engine of one of the names was never opened.
    pub fn change(&mut self) -> Result<()> {
        self.changes += 1;
        match self.rng.random_range(0..16) {
            0..=5 if !self.all => self.begin_rule(),
            6..=8 if !self.all => self.end_rule(),
            0..=9 => {
                for (rule, _) in &self.rules {
                    rule.release();
                }
            }
            10 => {
                let (one, other) = self.two();
                self.partitions.push(self.fabric.partition(&one, &other)?);
            }
            11 => {
                if !self.partitions.is_empty() {
                    let at = self.rng.random_range(0..self.partitions.len());
                    self.partitions.swap_remove(at).heal();
                }
            }
            12 => {
                let (one, other) = self.two();
                let mut micros = || Duration::from_micros(self.rng.random_range(1..2_000));
                let (down, up) = (micros(), micros());
                self.fabric.flap(&one, &other, down, up, 2)?;
            }
            13 => {
                let name = self.one();
                if !self.is_stopped(&name) {
                    self.fabric.stop(&name)?;
                    self.stopped.push(name);
                }
            }
            _ => self.resume_one()?,
        }
        Ok(())
    }

    /// A process that was killed is stopped no more: the next life of that name is a process of its own.
    pub fn reborn(&mut self, name: &str) {
        self.stopped.retain(|stopped| **stopped != *name);
    }

    /// How often it has changed.
    pub(super) const fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether some rule may have failed, or lost, an operation of this kind, of one engine to another, at any time since the
    /// change of this number.
    pub(super) fn may_fail(&self, kind: Kind, names: [&str; 2], since: u64) -> bool {
        self.may(kind, false, names, since)
    }

    /// Whether some rule may answer a post with full now.
    pub(super) fn may_be_full(&self, names: [&str; 2]) -> bool {
        self.may(Kind::Post, true, names, self.changes)
    }

    fn may(&self, kind: Kind, full: bool, [from, to]: [&str; 2], since: u64) -> bool {
        let named = |wanted: &Option<Arc<str>>, name| wanted.as_deref().is_none_or(|it| it == name);
        self.causes.iter().any(|cause| {
            let what = cause.kind == kind && cause.full == full && cause.until >= since;
            what && named(&cause.from, from) && named(&cause.to, to)
        })
    }

    /// Ends all faults. A flapping link goes on until it has done so for the last time.
    ///
    /// # Errors
    ///
    /// As for [`change`](Self::change).
    pub fn clear(&mut self) -> Result<()> {
        self.all = false;
        while !self.rules.is_empty() {
            self.end_rule();
        }
        self.partitions.clear();
        while !self.stopped.is_empty() {
            self.resume_one()?;
        }
        Ok(())
    }

    fn begin_rule(&mut self) {
        if self.rules.len() >= RULES {
            self.end_rule();
        }
        let rng = &mut self.rng;
        let kind =
            [ErrorKind::Resources, ErrorKind::Fabric, ErrorKind::Peer][rng.random_range(0..3)];
        let late = Duration::from_nanos(rng.random_range(1..5_000_000));
        let way = [Kind::Data, Kind::Completion, Kind::Notification][rng.random_range(0..3)];
        let which = rng.random_range(0..11);
        let call = [Kind::Register, Kind::Handshake][usize::from(rng.random_ratio(1, 2))];
        let rule = match which {
            0 => rules::drop().kind(way).times(1),
            1 => rules::delay(late).kind(way),
            2 => rules::double().kind(way),
            3 => rules::reorder().kind(way),
            4 | 5 => rules::hold().kind(way),
            6 => rules::fail_post(kind),
            7 => rules::fail(kind).kind(Kind::Data),
            8 => rules::fail_completion(kind),
            9 => rules::full(),
            _ => rules::fail(kind).kind(call).times(2),
        };
        let failing = match which {
            0 => Some(way),
            6 | 9 => Some(Kind::Post),
            7 => Some(Kind::Data),
            8 => Some(Kind::Completion),
            10 => Some(call),
            _ => None,
        };
        let rule = rule.chance(1, rng.random_range(1..5));
        let (mut from, mut to) = (None, None);
        let rule = match self.rng.random_range(0..3) {
            0 => rule.from(Arc::clone(from.insert(self.one()))),
            1 => rule.to(Arc::clone(to.insert(self.one()))),
            _ => rule,
        };
        let place = failing.map(|kind| {
            self.causes.push(Cause { kind, full: which == 9, from, to, until: u64::MAX });
            self.causes.len() - 1
        });
        self.rules.push((self.fabric.rule(rule), place));
    }

    /// Installs every rule that there is, for everybody, each with a small chance, until it is [cleared](Self::clear). What is held
    /// is released from time to time.
    pub fn every_rule(&mut self) {
        self.all = true;
        let late = Duration::from_micros(500);
        let failing = ErrorKind::Fabric;
        for way in [Kind::Data, Kind::Completion, Kind::Notification] {
            self.install(rules::drop().kind(way).chance(1, 100), Some(way));
            let harmless = [rules::delay(late), rules::double(), rules::reorder(), rules::hold()];
            for rule in harmless {
                self.install(rule.kind(way).chance(1, 20), None);
            }
        }
        let calls = [Kind::Register, Kind::Handshake, Kind::Post, Kind::Data, Kind::Completion];
        for kind in calls {
            self.install(rules::fail(failing).kind(kind).chance(1, 20), Some(kind));
        }
        let place = self.cause(Kind::Post, true);
        self.rules.push((self.fabric.rule(rules::full().chance(1, 20)), Some(place)));
    }

    fn install(&mut self, rule: Matched, failing: Option<Kind>) {
        let place = failing.map(|kind| self.cause(kind, false));
        self.rules.push((self.fabric.rule(rule), place));
    }

    fn cause(&mut self, kind: Kind, full: bool) -> usize {
        self.causes.push(Cause { kind, full, from: None, to: None, until: u64::MAX });
        self.causes.len() - 1
    }

    fn end_rule(&mut self) {
        if !self.rules.is_empty() {
            let at = self.rng.random_range(0..self.rules.len());
            let (rule, place) = self.rules.swap_remove(at);
            if let Some(cause) = place.and_then(|place| self.causes.get_mut(place)) {
                cause.until = self.changes;
            }
            drop(rule);
        }
    }

    fn resume_one(&mut self) -> Result<()> {
        if self.stopped.is_empty() {
            return Ok(());
        }
        let at = self.rng.random_range(0..self.stopped.len());
        let name = self.stopped.swap_remove(at);
        self.fabric.resume(&name)
    }

    fn one(&mut self) -> Arc<str> {
        let at = self.rng.random_range(0..self.names.len());
        Arc::clone(&self.names[at])
    }

    /// Two different names, if there are.
    fn two(&mut self) -> (Arc<str>, Arc<str>) {
        let count = self.names.len();
        let one = self.rng.random_range(0..count);
        let other = (one + self.rng.random_range(1..count.max(2))) % count;
        (Arc::clone(&self.names[one]), Arc::clone(&self.names[other]))
    }
}

impl fmt::Debug for Weather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weather")
            .field("rules", &self.rules.len())
            .field("partitions", &self.partitions)
            .field("stopped", &self.stopped)
            .finish_non_exhaustive()
    }
}
