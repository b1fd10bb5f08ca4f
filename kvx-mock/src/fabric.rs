//! The fabric, as its users see it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvx_core::id::Incarnation;

use crate::backend::MockBackend;
use crate::net::{Net, Pace};
use crate::preset::Preset;
use crate::rule::{Rule, RuleGuard};
use crate::timing::nanos;
use crate::trace::Entry;

/// A fabric in memory, to which any number of engines of one process belong. Clones are the same fabric.
///
/// Everything that it does is decided by its seed and by the calls made to it: there is no clock and no thread. Time is
/// virtual: it stands still until something moves it, and then goes on to the next happening. What moves it is every
/// [`poll`](kvx_core::backend::TransferBackend::poll) by any engine, or only [`advance`](Self::advance) and its like where the
/// fabric is [`manual`](Self::manual).
#[derive(Clone)]
pub struct Fabric {
    pub(crate) shared: Arc<Shared>,
}

/// What all clones of a [`Fabric`] share.
pub(crate) struct Shared {
    pub(crate) id: FabricId,
    net: Mutex<Net>,
}

/// What tells one fabric from another in the bytes that engines exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FabricId {
    pub(crate) seed: u64,
    /// Drawn at random for a fabric that backends opened by name share, so that two processes' fabrics differ. Otherwise
    /// zero, so that the bytes follow from the seed.
    pub(crate) process: [u8; 16],
}

impl fmt::Display for FabricId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.seed)?;
        if self.process != [0; 16] {
            write!(f, " of process {}", Incarnation::from_bytes(self.process))?;
        }
        Ok(())
    }
}

impl Fabric {
    /// A fabric whose every choice follows from `seed`. Each poll by any engine lets between 1 and 16 things happen, and
    /// moves time to them however far off they are: so whoever goes on polling waits for nothing.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::make(FabricId { seed, process: [0; 16] }, Pace::Polled)
    }

    /// As [`new`](Self::new), but polling moves nothing: for simulations that have other clocks to keep in step.
    /// [`next_at`](Self::next_at) tells when something happens next, [`advance`](Self::advance) and
    /// [`advance_by`](Self::advance_by) let it happen.
    ///
    /// ```
    /// use std::time::Duration;
    /// use kvx_core::backend::{Events, TransferBackend as _};
    /// use kvx_core::handshake::Handshake as _;
    /// use kvx_core::id::TransferId;
    /// use kvx_core::transfer::Mode;
    /// use kvx_mock::{Fabric, Preset};
    ///
    /// # fn main() -> kvx_core::Result<()> {
    /// let fabric = Fabric::manual(7);
    /// let (one, other) = (fabric.backend(Preset::rc(), "one"), fabric.backend(Preset::rc(), "other"));
    /// let (_, reply) = other.accept(&one.offer()?)?;
    /// let (peer, completion) = one.complete(&reply)?;
    /// other.finish(&completion)?;
    /// let _submitted = one.submit(TransferId(1), peer, Mode::Write, &[], Some(b"hello"))?;
    ///
    /// // Polling gives nothing, however often, until time is moved on.
    /// let mut events = Events::with_limit(8);
    /// other.poll(&mut events);
    /// assert!(events.is_empty());
    ///
    /// // To just before the next thing that happens, and to it.
    /// let next = fabric.next_at().expect("a notification is under way");
    /// assert_eq!(fabric.advance_by(next - fabric.now() - Duration::from_nanos(1)), 0);
    /// assert_eq!(fabric.advance(1), 1);
    /// assert_eq!(fabric.now(), next);
    ///
    /// // To the end of everything.
    /// assert!(fabric.run_until_idle(1000));
    /// other.poll(&mut events);
    /// assert!(!events.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn manual(seed: u64) -> Self {
        Self::make(FabricId { seed, process: [0; 16] }, Pace::Manual)
    }

    pub(crate) fn with_process(seed: u64, process: [u8; 16]) -> Self {
        Self::make(FabricId { seed, process }, Pace::Polled)
    }

    fn make(id: FabricId, pace: Pace) -> Self {
        Self { shared: Arc::new(Shared { id, net: Mutex::new(Net::new(id, pace)) }) }
    }

    /// The seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.shared.id.seed
    }

    /// Opens an engine's backend. Opening another one with the same name gives another engine, with an incarnation of its
    /// own; faults by name are then the newest one's.
    #[must_use]
    pub fn backend(&self, preset: Preset, name: impl Into<Arc<str>>) -> Arc<MockBackend> {
        let (name, capabilities) = (name.into(), preset.capabilities().clone());
        let transport = preset.transport();
        let (engine, incarnation) = self.with(|net| net.open(preset, name));
        Arc::new(MockBackend::new(self.clone(), engine, incarnation, capabilities, transport))
    }

    /// Virtual time since the fabric was made.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.with(|net| net.schedule.now))
    }

    /// When something happens next, if nothing else is called; `None` when nothing will.
    #[must_use]
    pub fn next_at(&self) -> Option<Duration> {
        self.with(|net| net.schedule.next_at()).map(Duration::from_nanos)
    }

    /// Lets the next `steps` things happen, moves time to the last of them, and returns how many there were.
    pub fn advance(&self, steps: u32) -> u32 {
        self.with(|net| {
            let mut made = 0;
            while made < steps && net.step() {
                made += 1;
            }
            made
        })
    }

    /// Moves time on by `by`, lets everything happen that is due by then, and returns how much that was.
    pub fn advance_by(&self, by: Duration) -> u64 {
        self.with(|net| {
            let until = net.schedule.now.saturating_add(nanos(by));
            let mut made = 0;
            while net.schedule.next_at().is_some_and(|next| next <= until) && net.step() {
                made += 1;
            }
            net.schedule.now = until;
            made
        })
    }

    /// Lets things happen until there is nothing left that will, or until there were `limit`. Returns whether nothing is
    /// left. What a rule holds, and what cannot get through, is not among them.
    pub fn run_until_idle(&self, limit: u64) -> bool {
        self.with(|net| {
            for _ in 0..limit {
                if !net.step() {
                    break;
                }
            }
            net.schedule.is_empty()
        })
    }

    /// Installs a rule, for as long as its guard lives. See [`Verdict`](crate::Verdict) for what rules can do.
    pub fn rule(&self, rule: impl Rule + 'static) -> RuleGuard {
        let number = self.with(|net| net.rules.install(Box::new(rule)));
        RuleGuard::new(self.clone(), number)
    }

    /// The event log, oldest entry first: the newest 65,536 entries.
    #[must_use]
    pub fn log(&self) -> Vec<Entry> {
        self.with(|net| net.log.entries())
    }

    /// The newest `count` entries of the event log, oldest first.
    #[must_use]
    pub fn log_tail(&self, count: usize) -> Vec<Entry> {
        self.with(|net| net.log.newest(count))
    }

    /// A digest of the whole event log, including what [`log`](Self::log) no longer holds. The same seed and the same calls
    /// give the same digest, in every process and build.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.with(|net| net.log.digest())
    }

    /// What is left of engines, connections and things to come, in words: `None` when all backends are gone and nothing is.
    #[must_use]
    pub fn remains(&self) -> Option<String> {
        self.with(|net| {
            let counts = [
                ("engines", net.engines.len()),
                ("incarnations", net.incarnations.len()),
                ("connections", net.connections.len()),
                ("pairs", net.pairs.len()),
                ("partitions", net.cuts.len()),
                ("scheduled", net.schedule.len()),
            ];
            let left = counts.iter().filter(|(_, count)| *count > 0);
            let left: Vec<String> = left.map(|(what, count)| format!("{count} {what}")).collect();
            (!left.is_empty()).then(|| left.join(", "))
        })
    }

    /// Runs `act` on the state. Regions that it gives up are dropped after the lock is, because what backs them is
    /// somebody else's code.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut Net) -> R) -> R {
        let (result, _given_up) = {
            let mut net = self.shared.net.lock().unwrap_or_else(PoisonError::into_inner);
            let result = act(&mut net);
            (result, std::mem::take(&mut net.given_up))
        };
        result
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("seed", &self.seed()).finish_non_exhaustive()
    }
}
