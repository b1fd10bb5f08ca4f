//! Rules: what a fabric does to an operation, decided by a test instead of by the seed.
//!
//! A rule is asked about every operation when it is about to happen, once, and answers with a [`Verdict`]. The first rule
//! that does not say [`Verdict::Pass`] decides; they are asked in the order in which they were installed. What a verdict
//! does is bounded by the contract: a fabric under any rules still keeps every clause of it. Bytes that are lost fail a
//! transfer or end a connection, as they would on a reliable fabric; what comes twice is suppressed, and counted in the log.
//!
//! | | `Register`, `Handshake` | `Post` | `Data` | `Completion` | `Notification` |
//! |---|---|---|---|---|---|
//! | `Drop` | - | - | the transfer fails, or the connection is lost: as the preset says | the connection is lost | the connection is lost |
//! | `Delay` | - | - | comes later | comes later | comes later |
//! | `Double` | - | - | suppressed | suppressed | suppressed |
//! | `Reorder` | - | - | others overtake it, where nothing is promised | as data | as data |
//! | `Hold` | - | - | until released | until released | until released |
//! | `Fail` | the call fails | the call fails, nothing is posted | the transfer fails | reported as failed, though all data arrived | - |
//! | `Full` | - | the call says full, nothing is posted | - | - | - |
//!
//! A dash: the verdict is taken as `Pass`, and the log says so ([`What::Ignored`](crate::What::Ignored)). Where batches to a
//! peer are visible in order ([`Ordering::PerPeer`](kvx_core::capability::Ordering::PerPeer)), one that is delayed, held or
//! lost holds up those behind it, and `Reorder` is ignored.
//!
//! *The connection is lost*: nothing more of it moves, and after the preset's [`death`](crate::Timing::death) time this side
//! gives it up. Its transfers fail, the peer is down, and the other side is told.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::ErrorKind;
use kvx_core::id::{Incarnation, TransferId};
use kvx_core::transfer::Mode;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::fabric::Fabric;
use crate::net::EngineId;

/// What a rule is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// An engine registers a region.
    Register,
    /// An engine takes another's message of the handshake.
    Handshake,
    /// An engine posts a batch.
    Post,
    /// Some of a transfer's data arrives.
    Data,
    /// A transfer is reported to its initiator.
    Completion,
    /// A notification arrives.
    Notification,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Register,
        Self::Handshake,
        Self::Post,
        Self::Data,
        Self::Completion,
        Self::Notification,
    ];
}

/// An engine, as a rule sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// Its name.
    pub name: Arc<str>,
    /// Which life of it.
    pub incarnation: Incarnation,
}

/// An operation that is about to happen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Operation {
    /// What it is.
    pub kind: Kind,
    /// The engine that posted it, registers, or sent the message.
    pub from: Party,
    /// Its peer. The engine itself, when it registers.
    pub to: Party,
    /// The transfer to which it belongs.
    pub id: Option<TransferId>,
    /// The direction of that transfer.
    pub mode: Option<Mode>,
    /// How many bytes it carries: of the batch, of this part of its data, of the notification, of the region.
    pub bytes: u64,
    /// How many operations of this kind there were before from this engine to that.
    pub nth: u64,
}

/// What becomes of an operation. See the [table](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// It happens.
    Pass,
    /// It is lost for good.
    Drop,
    /// It happens later, by this much virtual time.
    Delay(Duration),
    /// It comes twice. The fabric suppresses the second, as it must.
    Double,
    /// Whatever else is under way from this engine to that overtakes it.
    Reorder,
    /// It waits until its rule's guard is dropped, or [releases](RuleGuard::release) it.
    Hold,
    /// It fails, with an error of this kind.
    Fail(ErrorKind),
    /// There is no room for it now.
    Full,
}

impl Verdict {
    /// Whether it means something for an operation of this kind: the [table](self).
    #[must_use]
    pub const fn applies_to(self, kind: Kind) -> bool {
        match self {
            Self::Pass => true,
            Self::Drop | Self::Delay(_) | Self::Double | Self::Reorder | Self::Hold => {
                matches!(kind, Kind::Data | Kind::Completion | Kind::Notification)
            }
            Self::Fail(_) => !matches!(kind, Kind::Notification),
            Self::Full => matches!(kind, Kind::Post),
        }
    }
}

/// A rule's own source of chance: the same seed and the same rules, in the order of their installation, draw the same.
#[derive(Debug)]
pub struct Chance(ChaCha8Rng);

impl Chance {
    /// `true` in `numerator` of `denominator` cases. Always, when it is not less; never, when the denominator is zero.
    pub fn of(&mut self, numerator: u32, denominator: u32) -> bool {
        denominator > 0 && self.0.random_range(0..denominator) < numerator
    }
}

/// Decides what becomes of operations. Closures over an [`Operation`] are rules.
///
/// It is called while the fabric is locked: a rule must not call a fabric or a backend of it.
pub trait Rule: Send {
    /// Says what becomes of an operation that is about to happen.
    fn judge(&mut self, operation: &Operation, chance: &mut Chance) -> Verdict;
}

impl<F: FnMut(&Operation) -> Verdict + Send> Rule for F {
    fn judge(&mut self, operation: &Operation, _: &mut Chance) -> Verdict {
        self(operation)
    }
}

/// Keeps a rule installed. When it is dropped the rule is uninstalled, and what it holds goes on.
#[must_use = "a rule is uninstalled when its guard is dropped; `.forever()` keeps it"]
pub struct RuleGuard {
    fabric: Fabric,
    number: Option<u64>,
}

impl RuleGuard {
    pub(crate) const fn new(fabric: Fabric, number: u64) -> Self {
        Self { fabric, number: Some(number) }
    }

    /// How many operations the rule has decided: for how many it did not say `Pass`, and that meant something.
    #[must_use]
    pub fn decided(&self) -> u64 {
        self.fabric.with(|net| net.rules.decided(self.number?)).unwrap_or(0)
    }

    /// How many operations it holds now. One whose transfer settles meanwhile is held no more.
    #[must_use]
    pub fn held(&self) -> usize {
        self.number.map_or(0, |number| self.fabric.with(|net| net.held_by(number)))
    }

    /// Lets go of what it holds now, and returns how many operations that is. The rule stays.
    pub fn release(&self) -> usize {
        self.number.map_or(0, |number| self.fabric.with(|net| net.release(number)))
    }

    /// Keeps the rule as long as the fabric exists. What it holds is then never released: only the end of the connection
    /// settles it.
    pub fn forever(mut self) {
        self.number = None;
    }
}

impl Drop for RuleGuard {
    fn drop(&mut self) {
        let Some(number) = self.number.take() else { return };
        // The rule itself is dropped once the lock is released: it is somebody else's code.
        let _rule = self.fabric.with(|net| {
            net.release(number);
            net.rules.remove(number)
        });
    }
}

impl fmt::Debug for RuleGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuleGuard").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The rules of a fabric, in the order in which they were installed.
pub(crate) struct Rules {
    seed: u64,
    next: u64,
    list: Vec<Installed>,
    counts: BTreeMap<(Kind, EngineId, EngineId), u64>,
}

/// A rule that is installed.
pub(crate) struct Installed {
    number: u64,
    rule: Box<dyn Rule>,
    chance: Chance,
    decided: u64,
}

/// The first stream of the seed's generator that belongs to a rule; those below are the fabric's own.
const FIRST_STREAM: u64 = 16;

impl Rules {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seed, next: 0, list: Vec::new(), counts: BTreeMap::new() }
    }

    pub(crate) fn install(&mut self, rule: Box<dyn Rule>) -> u64 {
        let number = self.next;
        self.next += 1;
        let mut generator = ChaCha8Rng::seed_from_u64(self.seed);
        generator.set_stream(FIRST_STREAM + number);
        let chance = Chance(generator);
        self.list.push(Installed { number, rule, chance, decided: 0 });
        number
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<Installed> {
        let at = self.list.iter().position(|rule| rule.number == number)?;
        Some(self.list.remove(at))
    }

    fn find(&mut self, number: u64) -> Option<&mut Installed> {
        self.list.iter_mut().find(|rule| rule.number == number)
    }

    fn decided(&mut self, number: u64) -> Option<u64> {
        self.find(number).map(|rule| rule.decided)
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Counts an operation of this kind, and returns how many there were before.
    pub(crate) fn count(&mut self, kind: Kind, from: EngineId, to: EngineId) -> u64 {
        let count = self.counts.entry((kind, from, to)).or_default();
        *count += 1;
        *count - 1
    }

    /// What the first rule that has something to say says, and that rule's number.
    pub(crate) fn judge(&mut self, operation: &Operation) -> Option<(Verdict, u64)> {
        self.list.iter_mut().find_map(|rule| {
            let verdict = rule.rule.judge(operation, &mut rule.chance);
            if verdict == Verdict::Pass {
                return None;
            }
            rule.decided += u64::from(verdict.applies_to(operation.kind));
            Some((verdict, rule.number))
        })
    }

    /// Forgets what was counted for an engine that is gone.
    pub(crate) fn forget(&mut self, engine: EngineId) {
        self.counts.retain(|(_, from, to), _| *from != engine && *to != engine);
    }
}
