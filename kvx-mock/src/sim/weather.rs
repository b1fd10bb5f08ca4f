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
use crate::rules;

/// Most rules at one time.
const RULES: usize = 4;

/// Random faults of a fabric, drawn from the fabric's seed: rules, partitions, flapping links, stopped processes. All of it
/// ends when it is [cleared](Self::clear) or dropped. Killing is left to the scenario, which has to open the next life.
pub struct Weather {
    fabric: Fabric,
    names: Vec<Arc<str>>,
    rng: ChaCha8Rng,
    rules: Vec<RuleGuard>,
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
        match self.rng.random_range(0..16) {
            0..=5 => self.begin_rule(),
            6..=8 => self.end_rule(),
            9 => {
                for rule in &self.rules {
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

    /// Ends all faults. A flapping link goes on until it has done so for the last time.
    ///
    /// # Errors
    ///
    /// As for [`change`](Self::change).
    pub fn clear(&mut self) -> Result<()> {
        self.rules.clear();
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
        let rule = match rng.random_range(0..11) {
            0 => rules::drop().kind(way).times(1),
            1 => rules::delay(late).kind(way),
            2 => rules::double().kind(way),
            3 => rules::reorder().kind(way),
            4 | 5 => rules::hold().kind(way),
            6 => rules::fail_post(kind),
            7 => rules::fail(kind).kind(Kind::Data),
            8 => rules::fail_completion(kind),
            9 => rules::full(),
            _ => {
                let call = [Kind::Register, Kind::Handshake][rng.random_range(0..2)];
                rules::fail(kind).kind(call).times(2)
            }
        };
        let rule = rule.chance(1, rng.random_range(1..5));
        let rule = match rng.random_range(0..3) {
            0 => rule.from(self.one()),
            1 => rule.to(self.one()),
            _ => rule,
        };
        self.rules.push(self.fabric.rule(rule));
    }

    fn end_rule(&mut self) {
        if !self.rules.is_empty() {
            let at = self.rng.random_range(0..self.rules.len());
            drop(self.rules.swap_remove(at));
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
